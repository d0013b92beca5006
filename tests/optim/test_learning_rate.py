"""The schedule against the walkthrough, the reference's curves, and what must hold for every curve."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenotron.config.errors import InputError
from kenotron.config.optimizer import LearningRateScheduler
from kenotron.optim.schedule import check_schedules, learning_rate


def curve(train_steps: int, **keys) -> list[float]:
    schedule = LearningRateScheduler(**keys)
    return [learning_rate(schedule, step, train_steps) for step in range(1, train_steps + 1)]


LATE = {"lr_decay_style": "linear", "lr_decay_starting_step": 15, "min_decay_lr": 0.0}
SQRT = {"lr_decay_style": "sqrt", "lr_warmup_steps": 4, "min_decay_lr": 0.08}
DROPS = {"lr_decay_style": "step", "lr_step_size": 3, "lr_step_gamma": 0.1, "min_decay_lr": 0.005}
REFERENCE = {"learning_rate": 1e-2, "lr_warmup_steps": 3, "lr_decay_steps": 10, "min_decay_lr": 1e-3}


@pytest.mark.parametrize(
    ("style", "keys", "first", "thousandths"),
    [
        (
            *("cosine", {}, 1),
            [3.333, 6.667, 10, 9.78, 9.141, 8.145, 6.891, 5.5, 4.109, 2.855, 1.859, 1.22, 1, 1, 1],
        ),
        ("linear", {}, 4, [9.1, 8.2, 7.3, 6.4, 5.5, 4.6, 3.7, 2.8, 1.9, 1, 1]),
        ("1-sqrt", {}, 4, [7.15, 5.98, 5.07, 4.31, 3.64, 3.03, 2.47, 1.95, 1.46, 1]),
        ("cosine", {"lr_warmup_style": "constant"}, 1, [10, 10, 10, 9.78, 9.141]),
        ("linear", {"lr_decay_starting_step": 8, "lr_decay_steps": 4}, 3, [*[10] * 6, 7.75, 5.5, 3.25, 1, 1]),
    ],
)
def test_curves_are_the_references_read_one_step_earlier(style, keys, first, thousandths):
    """The reference lists iterations, whose formula stands at t = iteration - 1."""
    rates = curve(16, **{**REFERENCE, **keys, "lr_decay_style": style})[first - 1 :]
    assert rates[: len(thousandths)] == pytest.approx([1e-3 * each for each in thousandths], rel=2e-3)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"lr_decay_steps": 0, "min_decay_lr": 0.01}, [0.1] * 4),  # without decay it is the rate, and not its square
        ({"lr_decay_style": "linear", "min_decay_lr": 0.0}, [0.075, 0.05, 0.025, 0.0]),  # the first step moves already
        *(({"lr_decay_style": style}, [0.1] * 9) for style in ("linear", "cosine", "1-sqrt")),  # without a floor
        ({"lr_decay_style": "sqrt"}, [0.1, 0.1 * math.sqrt(1 / 2), 0.1 * math.sqrt(1 / 3), 0.05]),
        (SQRT, [0.025, 0.05, 0.075, 0.1, 0.1 * math.sqrt(4 / 5), 0.1 * math.sqrt(4 / 6), 0.08, 0.08]),
        (LATE | {"lr_warmup_steps": 2}, [0.05, *[0.1] * 14, 0.08, 0.06, 0.04, 0.02, 0.0]),  # it ends with the run
        (DROPS | {"lr_warmup_steps": 1}, [0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.005, 0.005]),
    ],
)
def test_curves_without_some_of_warm_up_decay_and_floor(keys, expected):
    assert curve(len(expected), learning_rate=0.1, **keys) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@st.composite
def schedules(draw):
    warmup = draw(st.integers(0, 50))
    peak = draw(st.floats(1e-6, 1.0))
    style = draw(st.sampled_from(["linear", "cosine", "1-sqrt", "sqrt", "step", "constant"]))
    schedule = LearningRateScheduler(
        learning_rate=peak,
        lr_warmup_steps=warmup,
        lr_warmup_style=draw(st.sampled_from(["linear", "constant"])),
        lr_decay_style=style,
        lr_decay_steps=draw(st.none() | st.integers(0, 100)),
        lr_decay_starting_step=draw(st.none() | st.integers(warmup, warmup + 50)),
        min_decay_lr=draw(st.none() | st.floats(0, peak)),
        lr_step_size=draw(st.integers(1, 20)) if style == "step" else None,
        lr_step_gamma=draw(st.floats(0.1, 1.0)),
    )
    return schedule, draw(st.integers(1, 200))


@given(schedules())
def test_every_rate_lies_within_its_bounds_and_rises_through_warmup_and_never_again(case):
    schedule, train_steps = case
    rates = [learning_rate(schedule, step, train_steps) for step in range(1, train_steps + 1)]
    top = max(schedule.lr_warmup_steps, 1)
    assert rates[:top] == sorted(rates[:top])
    assert all(after <= before * (1 + 1e-12) for before, after in zip(rates[top - 1 :], rates[top:], strict=False))
    assert all(0 <= rate <= schedule.learning_rate for rate in rates)
    assert all(rate >= (schedule.min_decay_lr or 0.0) * (1 - 1e-12) for rate in rates[top - 1 :])


def test_a_decay_by_dotted_path_is_a_factor_on_the_peak_within_warm_up_end_and_floor():
    keys = {"learning_rate": 8e-3, "lr_warmup_steps": 2, "lr_decay_starting_step": 3, "lr_decay_steps": 6}
    rates = curve(10, **keys, lr_decay_style="support.user_parts.half_life")
    expected = [4e-3, 8e-3, 8e-3, *(8e-3 * 0.5 ** (n / 2) for n in range(1, 7)), 1e-3]
    assert rates == pytest.approx(expected, rel=1e-12)
    floored = curve(10, **keys, lr_decay_style="support.user_parts.half_life", min_decay_lr=3e-3)
    assert floored == [max(rate, 3e-3) for rate in rates]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("support.user_parts.half_lif", r"lr_decay_style: module .* has no 'half_lif'; did you mean 'half_life'\?"),
        ("support.user_parts.__name__", r"lr_decay_style: expected a function at 'support.user_parts.__name__'"),
        ("math.log", r"lr_decay_style: math.log\(1, 1\) failed: "),
        ("builtins.divmod", r"divmod\(1, 1\) returned \(1, 0\); expected the factor on the learning rate"),
        ("math.copysign", None),
    ],
)
def test_a_decay_that_is_no_function_of_two_counts_is_found_before_training(path, message, section):
    bad = {"learning_rate": 1.0, "lr_decay_style": path}
    groups = [{"pattern": "proj", "learning_rate_scheduler": bad}]
    for config in (section(learning_rate_scheduler=bad), section(param_groups=groups)):
        if message is None:
            check_schedules(config)
            continue
        with pytest.raises(InputError, match=message):
            check_schedules(config)


def test_an_unknown_decay_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"expected one of linear, cosine, .* or the dotted path of a function"):
        LearningRateScheduler(learning_rate=1.0, lr_decay_style="cosin")
