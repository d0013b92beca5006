"""Runs whose steps grow: the same as a loop by hand, also across a stop and the border of a stage."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_train_step import hf_model

from kenotron.data import open_run
from kenotron.observers.progress import Pace
from support.tiny_run import metrics, same_saved, saved_weights, tiny_config, train_and_listen, train_quietly

RAMPS = (
    "tokens.batch_accumulation_per_replica=3",
    "data_stages.0.batch_size_ramp={start: 4, increment: 4, samples: 12}",
)
SIZES = [4, 4, 8, 12, 12, 12]
TWO_LENGTHS = """data_stages=[{name: short, start_training_step: 1, data: {dataset: null}},
    {name: long, start_training_step: 4, sequence_length: 32, data: {dataset: null}}]"""


def test_a_ramped_run_is_a_loop_over_the_same_samples_by_hand(tmp_path: Path) -> None:
    sgd = "optimizer.optimizer_factory={name: sgd, momentum: 0.9}"
    keys = (sgd, "tokens.train_steps=6", "checkpoints.save_initial_state=true", "optimizer.clip_grad=null")
    config = train_quietly(tiny_config(tmp_path, *RAMPS, *keys)).config
    steps = metrics(config)
    assert [step["global_batch_size"] for step in steps] == SIZES
    assert [step["consumed_tokens"] for step in steps] == [16 * n for n in np.cumsum(SIZES)]

    with open_run(tiny_config(tmp_path, "tokens.train_steps=13")) as plain:
        batches = [batch for step in range(1, 14) for batch in plain.batch(step)]
    tokens, labels = (torch.from_numpy(np.concatenate([getattr(b, n) for b in batches])) for n in ("tokens", "labels"))
    model = hf_model(config, saved_weights(tmp_path / "checkpoints" / "0"))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=0.1)
    taken, expected = 0, []
    for size, rate in zip(SIZES, [0.005] + 5 * [0.01]):
        optimizer.param_groups[0]["lr"] = rate
        total = torch.zeros(())
        for sample in range(taken, taken + size):
            logits = model(tokens[sample : sample + 1]).logits[0]
            total = total + F.cross_entropy(logits, labels[sample], reduction="sum")
        loss = total / (16 * size)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
        taken += size
    assert [step["lm_loss"] for step in steps] == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize(("keys", "stop"), [(RAMPS, 3), ((TWO_LENGTHS,), 2), ((TWO_LENGTHS,), 4)])
def test_a_run_stopped_amid_a_ramp_or_at_a_border_goes_on(keys: tuple[str, ...], stop: int, tmp_path: Path) -> None:
    whole = train_quietly(tiny_config(tmp_path / "whole", *keys, "tokens.train_steps=6")).config
    train_quietly(tiny_config(tmp_path / "parts", *keys, f"tokens.train_steps={stop}"))
    parts = train_quietly(tiny_config(tmp_path / "parts", *keys, "tokens.train_steps=6")).config

    def story(config: Any) -> list[dict[str, Any]]:
        names = ("iteration", "lm_loss", "grad_norm", "consumed_tokens", "global_batch_size", "sequence_length")
        return [{name: step.get(name) for name in names} for step in metrics(config)]

    assert story(whole) == story(parts)
    assert same_saved(*(tmp_path / name / "checkpoints" / "6" for name in ("whole", "parts")))


def test_stages_of_two_lengths_count_their_own_tokens_and_validate_at_the_first(tmp_path: Path) -> None:
    validation = ("tokens.val_check_interval=1", "tokens.limit_val_batches=2")
    config = tiny_config(tmp_path, TWO_LENGTHS, "tokens.train_steps=7", *validation)
    run, said = train_and_listen(config)
    steps = metrics(config)
    assert [step["sequence_length"] for step in steps] == [16, 16, 16, 32, 32, 32, 32]
    assert [step["consumed_tokens"] for step in steps] == [64, 128, 192, 320, 448, 576, 704]
    assert {step["val_tokens"] for step in steps} == {2 * 4 * 16}
    assert {batch.tokens.shape for batch in run.data.batch(7)} == {(4, 32)}
    assert " tokens | sequence length 32" in said
    # Of a token: the same products, and an attention square as long as the step's own sequence.
    short, long = (step["model_tflops_per_gpu"] / step["tokens_per_sec"] for step in (steps[0], steps[-1]))
    assert long - short == pytest.approx(3 * 2 * 4 * 16 * 16 / 1e12)  # layers, 4 l h


def test_the_time_left_counts_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a minute a step: 4 of 52 samples took one."""
    clock = iter(range(100))
    monkeypatch.setattr(Pace, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr("kenotron.observers.progress.time", SimpleNamespace(perf_counter=lambda: 60.0 * next(clock)))
    _, said = train_and_listen(tiny_config(tmp_path, *RAMPS, "tokens.train_steps=6"))
    assert "training: 8% | ETA 0:12:00" in said
