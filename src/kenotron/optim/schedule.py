"""The learning rate of every step, a function of only (config, step, train_steps).

    rate
    peak   |      ___________
           |    /            ` .
           |  /                  ` .
    floor  |/                        ` ._________________
           +------+-----------+----------+---------------> step
           0      W           S        S + D

W is `lr_warmup_steps`; S is `lr_decay_starting_step`, by default W (a later S makes warm-up, stable,
decay); D is `lr_decay_steps`, by default the rest of the run, `train_steps` - S. After S + D the rate
stays constant, so D = 0 is a run without decay. Steps count from 1, and step t of training has the
rate of t. For 3e-4, two linear warm-up steps and 13 cosine steps down to 1e-5:

    t     1        2       3         4         …   14        15
    rate  0.00015  0.0003  0.000296  0.000283  …   1.42e-05  1e-05

There is no state: a resumed run follows the same curve, and a changed config takes effect at the next step.

Decays, for S < t, with u = (t - S) / D, peak = `learning_rate`, floor = `min_decay_lr`:

    linear     floor + (peak - floor) * (1 - u)
    cosine     floor + (peak - floor) * (1 + cos(pi * u)) / 2        SGDR, arXiv 1608.03983
    1-sqrt     floor + (peak - floor) * (1 - sqrt(u))                Hägele et al., arXiv 2405.18392
    sqrt       peak * sqrt(S / t), never under floor (S = 0: as S = 1)   Vaswani et al., arXiv 1706.03762
    step       peak * lr_step_gamma ** ((t - S) // lr_step_size), never under floor
    constant   peak

Without `min_decay_lr` the floor of linear, cosine and 1-sqrt is the peak: no decay (nanotron's rule). The floor
of sqrt, step and your own function is 0, because their pace does not depend on the floor.

`lr_decay_style` may be the dotted path of your own function. `elapsed` counts from 1 to D and then stays at D:

    def half_every_1000(elapsed: int, decay_steps: int) -> float:
        return 0.5 ** (elapsed / 1000)                           the factor on peak; never under floor

A parameter group with `learning_rate_scale: s` follows s times the whole curve, floor included.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kenotron.config.dotted import import_dotted
from kenotron.config.errors import InputError

if TYPE_CHECKING:
    from kenotron.config.optimizer import LearningRateScheduler, Optimizer

STYLE = "optimizer.learning_rate_scheduler.lr_decay_style"


def learning_rate(schedule: LearningRateScheduler, step: int, train_steps: int) -> float:
    """Return the rate of training step `step` (1, 2, …) in a run of `train_steps` steps."""
    if step < schedule.lr_warmup_steps and schedule.lr_warmup_style == "linear":
        return schedule.learning_rate * step / schedule.lr_warmup_steps
    decay_steps = schedule.decay_steps(train_steps)
    elapsed = min(step - schedule.decay_start, decay_steps)
    if elapsed <= 0 or schedule.lr_decay_style == "constant":
        return schedule.learning_rate
    if schedule.lr_decay_style in ("sqrt", "step") or "." in schedule.lr_decay_style:
        return max(schedule.learning_rate * _pace(schedule, elapsed, decay_steps), schedule.min_decay_lr or 0.0)
    floor = schedule.final_lr
    return floor + (schedule.learning_rate - floor) * _remaining(schedule.lr_decay_style, elapsed / decay_steps)


def _remaining(style: str, u: float) -> float:
    """Return the share of peak - floor that remains after the fraction u of the decay: from 1 down to 0."""
    if style == "linear":
        return 1 - u
    if style == "cosine":
        return (1 + math.cos(math.pi * u)) / 2
    return 1 - math.sqrt(u)


def check_schedules(config: Optimizer) -> None:
    """Raise `InputError` if the dotted path of an `lr_decay_style` is not a function that returns a factor."""
    for _, schedule in config.schedules:
        if "." in schedule.lr_decay_style:
            _custom_pace(schedule.lr_decay_style, 1, 1)


def _custom_pace(path: str, elapsed: int, decay_steps: int) -> float:
    """Return the result of the function at `path`. Raises `InputError` unless it is a finite number >= 0."""
    function = import_dotted(path, STYLE)
    if not callable(function):
        raise InputError(f"{STYLE}: expected a function at '{path}', found {function!r}")
    try:
        factor = function(elapsed, decay_steps)
    except Exception as error:  # a user's function may raise anything
        raise InputError(f"{STYLE}: {path}({elapsed}, {decay_steps}) failed: {error}") from error
    if not isinstance(factor, int | float) or not math.isfinite(factor) or factor < 0:
        raise InputError(
            f"{STYLE}: {path}({elapsed}, {decay_steps}) returned {factor!r}; expected the factor on the learning rate, "
            "a finite number of at least 0"
        )
    return float(factor)


def _pace(schedule: LearningRateScheduler, elapsed: int, decay_steps: int) -> float:
    """Return rate / peak after `elapsed` steps of a decay whose pace does not depend on the floor."""
    if "." in schedule.lr_decay_style:
        return _custom_pace(schedule.lr_decay_style, elapsed, decay_steps)
    if schedule.lr_decay_style == "sqrt":
        start = max(schedule.decay_start, 1)
        return math.sqrt(start / max(schedule.decay_start + elapsed, start))
    assert schedule.lr_step_size is not None  # the config checks it
    return schedule.lr_step_gamma ** (elapsed // schedule.lr_step_size)
