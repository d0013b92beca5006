"""Standard normals from random integers, with the same bits on every machine.

log, cos and erfinv differ in their last bits between libraries and devices; +, x, /, sqrt in float64 are
defined by IEEE 754. So a table of the normal quantile function is computed once, with only these operations,
and a number becomes a normal by looking it up:

    64 random bits -> 1 sign bit and u = (52 bits + 1/2) / 2**53, in (0, 1/2)
    u's own float bits -> its octave and 256th of the octave -> one row (a, b) of the table
    normal = -+ (a[row] + b[row] * u)

Octaves keep the tail exact: each segment is 1/256 as wide as u is small, so the straight line is within 1e-6
of the true quantile from the center to 8.2 sigma (u = 2**-54), the smallest u.

It uses only numpy; `kernels.random` looks numbers up in the table.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SEGMENT_BITS = 8  # an octave has 2**8 segments
LOWEST_EXPONENT = -54  # u >= 2**-54
DROPPED_BITS = 52 - SEGMENT_BITS  # the mantissa bits of a float64 below the segment
FIRST_ROW = (1023 + LOWEST_EXPONENT) << SEGMENT_BITS  # a float64's leading bits at u = 2**-54

# Wichura 1988, algorithm AS 241 (PPND16): relative error 1e-16. Highest power first.
CENTRE = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608),
    (5226.495278852854561, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867,
     5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0),
)  # fmt: skip
NEAR_TAIL = (
    (7.7454501427834140764e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1,
     1.27045825245236838258, 3.64784832476320460504, 5.76949722146069140550,
     4.63033784615654529590, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2,
     1.48103976427480074590e-1, 6.89767334985100004550e-1, 1.67638483018380384940,
     2.05319162663775882187, 1.0),
)  # fmt: skip
FAR_TAIL = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3,
     2.65321895265761230930e-2, 2.96560571828504891230e-1, 1.78482653991729133580,
     5.46378491116411436990, 6.65790464350110377720),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5,
     7.86869131145613259100e-4, 1.48753612908506148525e-2, 1.36929880922735805310e-1,
     5.99832206555887937690e-1, 1.0),
)  # fmt: skip


def log(x: Floats) -> Floats:
    """Return the natural logarithm of positive float64, by operations that IEEE 754 defines (relative error 1e-16).

    x = m * 2**e with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(s) = 2 (s + s**3/3 + s**5/5 + ...),
    s = (m - 1) / (m + 1), |s| < 0.172.
    """
    mantissa, exponent = np.frexp(x)
    small = mantissa < 0.7071067811865476
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    exponent = exponent - small
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.zeros_like(s)
    for power in range(21, 1, -2):  # 0.172**23 / 23 < 2e-19
        series = (series + 1.0 / power) * square
    return exponent * 0.6931471805599453 + 2.0 * (s + s * series)


def _rational(x: Floats, coefficients: tuple[tuple[float, ...], tuple[float, ...]]) -> Floats:
    upper, lower = np.zeros_like(x), np.zeros_like(x)
    for a, b in zip(*coefficients):
        upper, lower = upper * x + a, lower * x + b
    return upper / lower


def normal_quantile(u: Floats) -> Floats:
    """Return the x with Phi(x) = u, for 0 < u <= 1/2 (so x <= 0), in float64 (AS 241)."""
    q = u - 0.5
    r = np.sqrt(-log(u))
    centre = q * _rational(0.180625 - q * q, CENTRE)
    tail = np.where(r <= 5.0, _rational(r - 1.6, NEAR_TAIL), _rational(r - 5.0, FAR_TAIL))
    return np.where(np.abs(q) <= 0.425, centre, -tail)


@cache
def table() -> tuple[Floats, Floats]:
    """Return intercepts a and slopes b, each ``[octaves * segments]``: the quantile of u is a[row] + b[row] * u."""
    octaves = -1 - LOWEST_EXPONENT
    segments = 1 << SEGMENT_BITS
    scale = np.ldexp(1.0, np.arange(LOWEST_EXPONENT, LOWEST_EXPONENT + octaves))[:, None]
    knots = (scale * (1.0 + np.arange(segments) / segments)).ravel()
    knots = np.append(knots, 0.5)
    values = normal_quantile(knots)
    slopes = (values[1:] - values[:-1]) / (knots[1:] - knots[:-1])
    return values[:-1] - slopes * knots[:-1], slopes
