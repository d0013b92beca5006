"""Ramps against Megatron's rule played step by step, and against counting."""

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenotron.config.data_stages import Data
from kenotron.data import open_run
from kenotron.data.ramps import levels
from kenotron.data.stage_plan import StagePlan
from support.data_runs import quiet, run_config
from support.written_tokens import counting, write_ds


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


def stage(start: int, stop: int, ramp: tuple[int, int, int, int] | None, size: int = 0, length: int = 7) -> StagePlan:
    given = None
    if ramp is not None:
        given, size = SimpleNamespace(start=ramp[0], increment=ramp[1], samples=ramp[2]), ramp[3]
    return StagePlan(0, "one", start, stop, length, levels(given, size), Data(dataset=None), ())


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


def test_a_ramp_of_a_thousand_billion_samples_is_a_short_table() -> None:
    one = stage(1, 10**10, (256, 256, 10**12, 2048))
    assert len(one.levels) == 8
    assert one.batch_size(10**10 - 1) == 2048
    assert one.step_of(one.samples - 1) == one.stop - 1


# ---- a run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["windows", "best_fit"])
def test_no_stage_trains_on_what_is_validated_on_whatever_its_length_and_packing(first: str, tmp_path: Path) -> None:
    """Every token is its own number: what was trained on and what is held out share none as an input."""
    for file in range(3):
        write_ds(tmp_path / "ds" / f"{file}.ds", counting(file * 700, [350, 350]), tokenizer=None)
    np.arange(2100, 3500).astype("<u2").tofile(tmp_path / "raw.bin")
    other = {"windows": "best_fit", "best_fit": "windows"}[first]
    folder = {"dataset_folder": str(tmp_path / "ds")}
    packed = [{**folder, "packing": packing} for packing in (first, other, other, first)]
    raw = [{"tokens": str(tmp_path / "raw.bin"), "token_dtype": "uint16"}] * 4
    for datasets in (packed, raw):
        shapes = list(zip(datasets, (32, 7, 50, 32)))
        stages = [{"dataset": data, "length": length, "start": 1 + i} for i, (data, length) in enumerate(shapes)]
        config = run_config(*stages, train_steps=4, arch__vocab_size=4096, val_fraction=0.3)
        with open_run(config, 1, quiet) as data:
            held_out = {int(t) for batch, *_ in data.validation() for t in batch.tokens.ravel()}
            assert len(held_out) > 350
            for step, (_, length) in enumerate(shapes, 1):
                source = data.stage_of(step).sources[0]
                inputs = source.read(np.arange(len(source))).tokens[:, :-1]
                assert inputs.shape[1] == length
                assert not (held_out - {2}) & set(inputs.ravel().tolist())  # 2 ends texts, and fills packed rows up
                assert len(source) * length > 850  # nearly all that is not held out
