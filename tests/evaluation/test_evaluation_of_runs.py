"""`evaluation:` in a run: each checkpoint's results reach the log, metrics.jsonl and hooks, and training goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kenotron as kn
from kenotron.config import InputError
from kenotron.config.evaluation import Evaluation
from kenotron.evaluation.worker import Worker
from kenotron.observers import evaluation
from support.slurm_cluster import available, cluster
from support.tiny_run import metrics, text_overrides, tiny_config, train_and_listen

ROWS = [
    {"question": f"The sum of {a} and {b} is", "choices": [str(a + b), str(a), "the"], "answer": 0}
    for a in range(3)
    for b in range(3)
]
TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {0}/sums.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def keys(folder: Path, *more: str) -> list[str]:
    (folder / "tasks").mkdir(exist_ok=True)
    (folder / "tasks" / "sums.yaml").write_text(TASK.format(folder))
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    section = f"evaluation={{tasks: [sums], include_path: {folder}/tasks}}"
    return [*text_overrides(folder), section, "checkpoints.checkpoint_interval=2", "tokens.train_steps=6", *more]


class Listener(kn.Hook):
    """Keeps what it is called with."""

    found: list[Any] = []  # noqa: RUF012

    def after_evaluation(self, run: Any, result: Any) -> None:
        """Note it."""
        self.found.append(result)


class Pretender:
    """A `Worker` that answers when it is told to; of checkpoint 3 it says that it went wrong."""

    made: list[Pretender] = []  # noqa: RUF012
    slow = True

    def __init__(self, settings: Any, folder: Path) -> None:
        self.asked: list[Path] = []
        self.ended = False
        self.made.append(self)

    def ask(self, checkpoint: Path) -> None:
        assert checkpoint.is_dir()
        self.asked.append(checkpoint)

    def answer(self, wait_s: float | None = 0) -> dict[str, Any] | None:
        if not self.asked:
            return {"ready": 0.0}
        if self.slow and wait_s == 0:
            return None
        step = int(self.asked[-1].name)
        if step == 3:
            return {"problem": "out of memory"}
        return {"results": {"sums": {"acc": [step / 10, 0.1], "f1": [1.0, None]}}, "seconds": 1.0}

    def stop(self) -> None:
        self.ended = True


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> type[Pretender]:
    Pretender.made, Pretender.slow, Listener.found = [], True, []
    monkeypatch.setattr(evaluation, "Worker", Pretender)
    return Pretender


def test_slow_evaluations_leave_checkpoints_out_and_retention_leaves_theirs_alone(
    tmp_path: Path, pretend: type[Pretender]
) -> None:
    more = ("checkpoints.checkpoint_interval=1", "checkpoints.keep_last=1", "tokens.train_steps=5")
    config = tiny_config(tmp_path, *keys(tmp_path, *more))
    _, said = train_and_listen(config)
    (worker,) = pretend.made
    assert [path.name for path in worker.asked] == ["1", "5"]
    assert worker.ended
    for step in (2, 3, 4):
        assert f"evaluation: {tmp_path}/checkpoints/{step} is left out" in said
    assert "evaluation: 1 | sums acc 0.1 ± 0.1, f1 1 | seconds: 1.0" in said
    common = {"eval/sums/acc_stderr": 0.1, "eval/sums/f1": 1.0}
    left = [line for line in metrics(config) if "eval/sums/acc" in line]
    assert left == [{"iteration": step, "eval/sums/acc": step / 10} | common for step in (1, 5)]
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()}
    assert kept == {"1", "4", "5"}  # at the last save 1 was being evaluated, and 4 was to be the next


def test_an_evaluation_that_fails_is_said_and_the_interval_is_kept(tmp_path: Path, pretend: type[Pretender]) -> None:
    more = ("checkpoints.checkpoint_interval=1", "evaluation.eval_interval=3", "tokens.train_steps=7")
    pretend.slow, hook = False, "general.hooks=[test_evaluation_of_runs.Listener]"
    _, said = train_and_listen(tiny_config(tmp_path, *keys(tmp_path, *more, hook)))
    assert [path.name for path in pretend.made[0].asked] == ["3", "6", "7"]
    assert "evaluation of step 3: out of memory; training goes on" in said
    assert [(each.step, each.metrics["eval/sums/acc"]) for each in Listener.found] == [(6, 0.6), (7, 0.7)]


@pytest.mark.parametrize("gone", ["the dataset is gone", "evaluation.srun: srun was not found"])
def test_a_worker_that_cannot_be_started_again_leaves_training_alone(
    gone: str, tmp_path: Path, pretend: type[Pretender], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(Pretender):
        """Ends after its first evaluation; the next ones do not start."""

        def __init__(self, settings: Any, folder: Path) -> None:
            super().__init__(settings, folder)
            if "srun" in gone and len(self.made) > 1:
                raise InputError(gone)

        def answer(self, wait_s: float | None = 0) -> dict[str, Any] | None:
            if len(self.made) > 1:
                return {"problem": gone}
            self.ended = bool(self.asked)
            return super().answer(wait_s)

    pretend.slow = False
    monkeypatch.setattr(evaluation, "Worker", Dying)
    config = tiny_config(tmp_path, *keys(tmp_path, "checkpoints.keep_last=1"))
    _, said = train_and_listen(config)
    for step in (4, 6):
        assert f"evaluation of step {step}: {gone}; training goes on" in said
    assert max(metrics(config), key=lambda line: line["iteration"])["iteration"] == 6
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()}
    assert kept == {"6"}  # nothing is protected any more


def test_the_next_start_makes_up_for_what_a_stop_left_out(tmp_path: Path, pretend: type[Pretender]) -> None:
    stops = "general.hooks=[{path: support.user_parts.StopAt, kwargs: {step: 4}}]"
    overrides = keys(tmp_path)
    _, said = train_and_listen(tiny_config(tmp_path, *overrides, stops))
    assert "evaluation of step 4: the next start makes up for it" in said
    config = tiny_config(tmp_path, *overrides)
    train_and_listen(config)
    assert [path.name for path in pretend.made[1].asked] == ["4", "6"]
    found = [line["iteration"] for line in metrics(config) if "eval/sums/acc" in line]
    assert found == [4, 6]  # 2 was in flight at the stop
    train_and_listen(tiny_config(tmp_path, *overrides, "tokens.train_steps=8"))
    assert [path.name for path in pretend.made[2].asked] == ["8"]


SRUN = """#!/bin/sh
echo "$*" >> {0}/arguments
env | grep -c -e ^SLURM_ -e ^LOCAL_RANK= >> {0}/arguments
read first
echo '{{"ready": 1.0}}
{{"results": {{"sums": {{"acc": [0.25, null]}}}}, "seconds": 1.0}}'
while read path; do echo '{{"results": {{"sums": {{"acc": [0.5, null]}}}}, "seconds": 1.0}}'; done
"""


def test_by_srun_the_process_has_a_job_of_its_own(
    tmp_path: Path, pretend: type[Pretender], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN.format(tmp_path))
    (tmp_path / "bin" / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_NTASKS", "64")
    monkeypatch.setattr(evaluation, "Worker", lambda given, folder: (Worker if given.srun else pretend)(given, folder))
    config = tiny_config(tmp_path, *keys(tmp_path, "evaluation.srun={partition: eval, gpus: 1, exclusive: null}"))
    train_and_listen(config)
    assert pretend.made[0].ended  # has looked for the tasks
    given, of_this_job = (tmp_path / "arguments").read_text().splitlines()
    assert given.startswith(f"--ntasks=1 --partition=eval --gpus=1 --exclusive {sys.executable} -c")
    assert of_this_job == "0"
    found = {line["iteration"]: line["eval/sums/acc"] for line in metrics(config) if "eval/sums/acc" in line}
    assert (found[2], found[6]) == (0.25, 0.5)  # "ready" and the first answer came together


def test_an_srun_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"evaluation\.srun: srun was not found on rank 0's machine; expected Slurm"):
        Worker(Evaluation(tasks=["sums"], srun={}), tmp_path)


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"evaluation\.eval_interval: expected a multiple of checkpoint_interval 2"):
        tiny_config(tmp_path, *keys(tmp_path, "evaluation.eval_interval=3"))
    with pytest.raises(InputError, match=r"evaluation\.tasks: need a tokenizer; expected tokenizer\.tokenizer_name_or"):
        tiny_config(tmp_path, "evaluation={tasks: [sums]}")
    with pytest.raises(InputError, match=r"evaluation\.ema: expected optimizer\.ema_decay beside it"):
        tiny_config(tmp_path, *keys(tmp_path, "evaluation.ema=true"))


@pytest.mark.slow
def test_a_device_that_is_not_there_is_said_before_the_first_step(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    with pytest.raises(InputError, match=r"^evaluation\.device: gpu: Expected one of cpu, cuda"):
        train_and_listen(tiny_config(tmp_path, *keys(tmp_path, "evaluation.device=gpu")))


@pytest.mark.slow
def test_a_run_is_evaluated_as_the_command_does(tmp_path: Path) -> None:
    """With the average of the weights, too, which gives each right answer another probability."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    options = {"num_fewshot": 1, "limit": 7, "batch_size": 2, "device": "cpu", "ema": True}
    more = (*keys(tmp_path), *(f"evaluation.{name}={value}" for name, value in options.items()))
    config = tiny_config(tmp_path, *more, "optimizer.ema_decay=0.9")
    _, said = train_and_listen(config)
    assert "Evaluation: loading sums" in said
    left = {line["iteration"]: line for line in metrics(config) if "eval/sums/acc" in line}
    folder = Path(config.logging.log_dir) / config.general.run / "evaluation"
    assert list(folder.glob("requests-sums-1shot*.pickle"))
    checkpoint = tmp_path / "checkpoints" / "6"
    found = kn.evaluate(checkpoint, "sums", include_path=tmp_path / "tasks", **options)["sums"]
    assert found["acc"].value * 7 == pytest.approx(round(found["acc"].value * 7))
    assert left[6]["eval/sums/acc"] == found["acc"].value
    assert left[6]["eval/sums/bits_per_byte"] == pytest.approx(found["bits_per_byte"].value, rel=1e-6)
    last = kn.evaluate(checkpoint, "sums", include_path=tmp_path / "tasks", **options | {"ema": False})["sums"]
    assert last["bits_per_byte"].value != pytest.approx(found["bits_per_byte"].value, rel=1e-4)


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_a_real_srun_evaluates_the_checkpoints(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    monkeypatch.setenv("SLURM_CONF", "")
    monkeypatch.setenv("SLURM_JOB_ID", "999")  # of a job that trains, and is not the one to evaluate in
    with cluster(tmp_path_factory.mktemp("slurm")):
        train_and_listen(config := tiny_config(tmp_path, *keys(tmp_path, "evaluation.srun={time: '5'}")))
        left = subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True).stdout
    assert not left.strip()
    found = {line["iteration"]: line for line in metrics(config) if "eval/sums/acc" in line}
    expected = kn.evaluate(tmp_path / "checkpoints" / "6", "sums", include_path=tmp_path / "tasks")["sums"]["acc"]
    assert found[6]["eval/sums/acc"] == expected.value
