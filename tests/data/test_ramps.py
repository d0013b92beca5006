"""Ramps against Megatron's rule played step by step, and against counting."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from kenotron.data.plan import Stage
from kenotron.data.ramps import levels


def megatron_batch_size(consumed: int, start: int, increment: int, samples: int, size: int) -> int:
    """`RampupBatchsizeNumMicroBatchesCalculator` of Megatron-LM, its float division made exact."""
    increments = (size - start) // increment
    if consumed > samples:
        return size
    return start + int(consumed / Fraction(samples, increments)) * increment


@st.composite
def ramps(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """start, increment, samples, global batch size."""
    start, increment, rises = draw(st.integers(1, 12)), draw(st.integers(1, 12)), draw(st.integers(1, 12))
    return start, increment, draw(st.integers(1, 400)), start + rises * increment


def stage(start: int, stop: int, ramp: tuple[int, int, int, int] | None, size: int = 0, length: int = 7) -> Stage:
    given = None
    if ramp is not None:
        given, size = SimpleNamespace(start=ramp[0], increment=ramp[1], samples=ramp[2]), ramp[3]
    return Stage(0, "one", start, stop, length, levels(given, size), 42, 0, ())


@given(ramps(), st.integers(1, 50))
def test_the_batch_size_is_megatrons_at_every_step(ramp: tuple[int, int, int, int], first: int) -> None:
    one, consumed = stage(first, first + 120, ramp), 0
    for step in range(one.start, one.stop):
        assert one.batch_size(step) == megatron_batch_size(consumed, *ramp)
        assert one.samples_before(step) == consumed
        assert one.tokens_before(step) == consumed * 7
        consumed += one.batch_size(step)
    assert one.samples == one.samples_before(one.stop + 5) == consumed
    assert one.samples_before(first - 1) == one.samples_before(first) == 0


@given(ramps())
def test_every_sample_is_of_the_step_that_takes_it(ramp: tuple[int, int, int, int]) -> None:
    one = stage(3, 90, ramp)
    counted = [step for step in range(3, 90) for _ in range(one.batch_size(step))]
    assert [one.step_of(sample) for sample in range(one.samples)] == counted


def test_the_drawing_of_the_module() -> None:
    one = stage(1, 9, (2, 2, 12, 6))
    assert [one.batch_size(step) for step in range(1, 8)] == [2, 2, 2, 4, 4, 6, 6]
    assert [one.samples_before(step) for step in range(1, 8)] == [0, 2, 4, 6, 10, 14, 20]


def test_a_stage_without_a_ramp_takes_the_global_batch() -> None:
    one = stage(5, 8, None, 6)
    assert [one.samples_before(step) for step in range(1, 11)] == [0, 0, 0, 0, 0, 6, 12, 18, 18, 18]


def test_a_ramp_of_a_thousand_billion_samples_is_a_short_table() -> None:
    one = stage(1, 10**10, (256, 256, 10**12, 2048))
    assert len(one.levels) == 8
    assert one.batch_size(10**10 - 1) == 2048
    assert one.step_of(one.samples - 1) == one.stop - 1
