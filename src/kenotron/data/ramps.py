"""The batch size ramp of a stage: the number of samples of a step, as a function of the step.

    batch_size_ramp: {start: 2, increment: 2, samples: 12} up to a global batch of 6: two rises, one every 6 samples

    step of the stage    0  1  2    3  4    5  6  …
    samples              2  2  2    4  4    6  6  …
    samples before it    0  2  4    6 10   14 20  …

Samples and their order are the same as without a ramp; only the borders between steps move.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from kenotron.config.data_stages import BatchSizeRamp


@dataclass(frozen=True)
class Level:
    """From step `first` of the stage (from 0) on, every step has `size` samples; `before` were read before it."""

    first: int
    before: int
    size: int


def levels(ramp: BatchSizeRamp | None, size: int) -> tuple[Level, ...]:
    """Return the levels of a `batch_size_ramp` up to `size` samples per step; without a ramp (None) there is one.

    After c samples a step has ``start + increment * floor(c / (samples / rises))``, Megatron's rule
    (`--rampup-batch-size`), in whole numbers.
    """
    if ramp is None:
        return (Level(0, 0, size),)
    rises = (size - ramp.start) // ramp.increment
    found: list[Level] = []
    first = before = 0
    for rise in range(rises):
        here = ramp.start + rise * ramp.increment
        until = -(-(rise + 1) * ramp.samples // rises)  # samples after which the next level begins
        steps = -(-(until - before) // here)
        if steps > 0:  # a step may be larger than a level's share
            found.append(Level(first, before, here))
            first, before = first + steps, before + steps * here
    return (*found, Level(first, before, size))


def level_of_step(levels: Sequence[Level], step: int) -> Level:
    """Return the level of a step of the stage, from 0."""
    return levels[bisect_right(levels, step, key=lambda level: level.first) - 1]


def level_of_sample(levels: Sequence[Level], sample: int) -> Level:
    """Return the level of a sample of the stage, from 0."""
    return levels[bisect_right(levels, sample, key=lambda level: level.before) - 1]
