"""A run killed at any moment and started again is, bit for bit, the run that was never killed."""

import contextlib
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kenotron.checkpoint.start import Start
from kenotron.observers.signals import Signals
from kenotron.text.hash_split import text_hash
from kenotron.training.run import Run
from soak import run as soak
from support.nursery import Nursery
from support.tiny_run import (
    Shell,
    environment,
    metrics,
    text_overrides,
    tiny_config,
    tiny_yaml,
    train_quietly,
    wait_until,
)

STEPS = 12
ENDLESS = "tokens.train_steps=1000000"
MOMENTS = ("lm_loss", "grad_norm", "lr", "consumed_tokens", "real_tokens", "val_loss", "skipped")


def stages(dataset: str, *seeds: int) -> str:
    """Two of one dataset, the second from step 6 on."""
    first, second = (f"data: {{dataset: {dataset}, seed: {seed}}}" for seed in seeds)
    return f"data_stages=[{{name: a, start_training_step: 1, {first}}}, {{name: b, start_training_step: 6, {second}}}]"


RUNS: dict[str, tuple[str, ...]] = {
    "fp32 with AdamW": (),
    "bf16 with Muon, two micro-batches": (
        *("model.dtype=bfloat16", "model.model_config.tie_word_embeddings=true"),
        "optimizer.optimizer_factory={name: muon, adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-8}",
        *("tokens.micro_batch_size=2", "tokens.batch_accumulation_per_replica=2"),
    ),
    "text that is streamed": (
        "model.document_masking=true",
        stages("{text_files: texts.jsonl, streaming: {shuffle_buffer: 20}}", 1, 1),
    ),
    "local checkpoints after every step": ("checkpoints.local={path: local, interval: 1}",),
}


def two_stages_of_text(folder: Path, changes: tuple[str, ...]) -> list[str | Path]:
    """The arguments of a run over two stages of text with validation, saved every third step."""
    text = [*text_overrides(folder)[1:], stages("{text_files: texts.jsonl}", 1, 2)]  # in the current folder
    validation = ("tokens.val_check_interval=3", "tokens.limit_val_batches=1", "tokens.val_fraction=0.1")
    saves = ("checkpoints.checkpoint_interval=3", "checkpoints.keep_last=2", f"tokens.train_steps={STEPS}")
    return [tiny_yaml(folder), *text, *validation, *saves, *changes]


def digest(folder: Path) -> dict[str, str]:
    """Hash of every tensor file of a checkpoint."""
    files = [path for part in ("model", "optimizer") for path in sorted((folder / part).iterdir())]
    return {f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def story(folder: Path) -> list[dict[str, Any]]:
    """What must not depend on whether a run was killed: every step's numbers, in the order of the file."""
    config = tiny_config(folder)
    return [{name: step[name] for name in ("iteration", *MOMENTS) if name in step} for step in metrics(config)]


SLOW = "local checkpoints after every step"


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[pytest.mark.slow][: name == SLOW]) for name in RUNS])
def uninterrupted(request: Any, tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> tuple[Any, Path]:
    """The changes that make the run, and the folder in which it went through in one go."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    changes = RUNS[request.param]
    finished = nursery.run("train", *two_stages_of_text(folder, changes), folder=folder)
    assert (finished.code, finished.stderr) == (0, "")
    assert [step["iteration"] for step in story(folder)] == list(range(1, STEPS + 1))
    return changes, folder


def same_run(folder: Path, other: Path) -> None:
    assert story(folder) == story(other)
    last = Path("checkpoints") / str(STEPS)
    assert digest(folder / last) == digest(other / last)


@pytest.mark.cases(1)
@pytest.mark.parametrize("attempt", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_killed_at_file_system_events_ends_as_if_not(
    attempt: int, uninterrupted: tuple[Any, Path], nursery: Nursery, tmp_path: Path
) -> None:
    changes, whole = uninterrupted
    arguments = two_stages_of_text(tmp_path, changes)
    dice = random.Random(f"{attempt} {sorted(changes)}")
    kills = 0
    for _ in range(60):  # a save alone is some twenty events; a run that got nowhere for long would not end
        finished = nursery.run("train", *arguments, folder=tmp_path, die_at=dice.randint(10, 90))
        assert finished.code in (0, -signal.SIGKILL), finished.stderr
        if finished.code == 0:
            break
        kills += 1
    assert finished.code == 0, "killed 60 times, and never through"
    assert kills >= 2
    same_run(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.cases(slow=0)
def test_runs_killed_with_every_engine_lose_nothing_that_was_announced(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--kills", "30"]) == 0
    said = capsys.readouterr().out
    equal = said.count("every loss, gradient norm and hash of weights equals that of a run without kills")
    assert equal == len(soak.RUNS)


def wait_for_steps(folder: Path, count: int) -> None:
    """Until metrics.jsonl has `count` lines."""
    path = folder / "logs" / "tiny" / "metrics.jsonl"

    def done() -> bool:
        return path.exists() and len(path.read_text().splitlines()) >= count

    wait_until(done, 60, lambda: "no step was done in a minute")


@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_source_that_hangs_keeps_no_run_from_saving(workers: int, nursery: Nursery, tmp_path: Path) -> None:
    source = "data_stages.0.data.dataset={source: support.user_parts.Hanging}"
    more = ("tokens.train_steps=50", f"data_stages.0.data.num_loading_workers={workers}")
    child = nursery.start("train", tiny_yaml(tmp_path), source, *more, folder=tmp_path)
    wait_for_steps(tmp_path, 2)
    wait_until((tmp_path / "hanging").exists, 60, lambda: "the source was not asked for the step")
    os.kill(child.pid, signal.SIGUSR1)
    finished = child.wait()
    assert (finished.code, finished.stderr) == (0, "")
    last = story(tmp_path)[-1]["iteration"]
    assert (tmp_path / "checkpoints" / str(last) / "manifest.json").exists()


@pytest.mark.slow
def test_a_signal_to_all_processes_while_blocks_are_compiled_is_seen(tmp_path: Path) -> None:
    """As a scheduler sends it: to the whole process group, those that compile too."""
    overrides = ("model.compile=true", "model.model_config.num_hidden_layers=1", "tokens.train_steps=100000")
    run = subprocess.Popen(
        [sys.executable, "-m", "kenotron", "train", tiny_yaml(tmp_path), *overrides],
        env=environment(tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache")),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("Training from step 1 "):
            break
    time.sleep(1)
    assert not (tmp_path / "logs" / "tiny" / "metrics.jsonl").read_text()  # the first step is not done
    os.killpg(run.pid, signal.SIGUSR1)
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 0, said
    assert "SIGUSR1: saving after step 1 and stopping" in said
    assert (tmp_path / "checkpoints" / "1" / "manifest.json").exists()


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_saves_and_exits_with_0_and_the_run_goes_on(name: str, nursery: Nursery, tmp_path: Path) -> None:
    file = tiny_yaml(tmp_path)
    child = nursery.start("train", file, ENDLESS, "checkpoints.save_final_state=false", folder=tmp_path)
    wait_for_steps(tmp_path, 5)
    os.kill(child.pid, getattr(signal, name))
    finished = child.wait()
    assert (finished.code, finished.stderr) == (0, "")
    stopped = story(tmp_path)[-1]["iteration"]
    assert f"{name}: saving after step {stopped} and stopping" in finished.stdout
    assert (tmp_path / "checkpoints" / "latest.txt").read_text().strip() == str(stopped)

    more = f"tokens.train_steps={stopped + 4}"
    continued = nursery.run("train", file, more, folder=tmp_path)
    assert continued.code == 0
    assert f"Training from step {stopped + 1} to " in continued.stdout
    other = tmp_path / "whole"
    other.mkdir()
    assert nursery.run("train", tiny_yaml(other), more, folder=other).code == 0
    assert story(tmp_path) == story(other)
    last = Path("checkpoints") / str(stopped + 4)
    assert digest(tmp_path / last) == digest(other / last)


@pytest.mark.parametrize(
    ("first", "second", "seconds", "ends"),
    [
        ("SIGUSR1", "SIGTERM", 60, False),  # Slurm's at the time limit
        ("SIGINT", "SIGINT", 0, False),  # Ctrl-C, passed on by torchrun
        ("SIGTERM", "SIGTERM", 60, True),
    ],
)
def test_the_time_limit_after_its_warning_is_one_request(first: str, second: str, seconds: int, ends: bool) -> None:
    asked: list[str] = []
    hook = Signals()
    run: Any = SimpleNamespace(stop=asked.append, mesh=SimpleNamespace(is_first=False))
    ended = False
    hook.on_train_start(run)
    try:
        signal.raise_signal(getattr(signal, first))
        hook.received_at -= seconds  # ago: the run is being saved
        signal.raise_signal(getattr(signal, second))
    except KeyboardInterrupt:
        ended = True
    finally:
        hook.on_close(run)
    assert (ended, asked) == (ends, [first])


def test_a_second_signal_leaves_at_once_with_exit_code_130(nursery: Nursery, tmp_path: Path) -> None:
    slow = "general.hooks=[support.user_parts.SlowStep]"
    child = nursery.start("train", tiny_yaml(tmp_path), ENDLESS, slow, folder=tmp_path)
    wait_for_steps(tmp_path, 1)  # the hook comes after the metrics: the child is asleep within its step
    deadline = time.monotonic() + 60
    while child.runs():  # within two seconds of the first a signal is the same request; one of the later is the second
        with contextlib.suppress(ProcessLookupError):  # it may be gone already
            os.kill(child.pid, signal.SIGTERM)
        assert time.monotonic() < deadline, "signals for a minute did not end the run"
        time.sleep(0.2)
    finished = child.wait()
    assert finished.code == 130
    assert "Traceback" not in finished.stderr
    assert not (tmp_path / "checkpoints" / "1").exists()


# ---- what may differ, and what may not ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of a run that has ended after step 3."""
    folder = tmp_path_factory.mktemp("stopped")
    train_quietly(tiny_config(folder))
    return tiny_yaml(folder)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("optimizer.weight_decay=0.2", "optimizer.weight_decay is 0.1 there and 0.2 in this config"),
        ("general.seed=8", "general.seed is 7 there and 8"),
        ("tokens.batch_accumulation_per_replica=2", "tokens.batch_accumulation_per_replica"),
        ("data_stages.0.data.seed=4", "data_stages.0.data.seed"),
        ("model.dtype=bfloat16", "model.dtype"),
    ],
)
def test_a_changed_key_is_another_run_and_named(override: str, key: str, stopped: Path, shell: Shell) -> None:
    code, _, line = shell("train", stopped, "tokens.train_steps=6", override)
    assert code == 2
    assert re.fullmatch(f"error: .*{re.escape(key)}.*\n", line)
    assert "--fresh" in line
    assert "checkpoints.checkpoints_path" in line
    assert len(story(stopped.parent)) == 3  # nothing was touched


def test_a_document_that_was_validated_on_is_not_trained_on_once_files_were_added(tmp_path: Path) -> None:
    """Of a folder so small that the document with the smallest hash was held out; of the larger one it is another."""
    texts = {text_hash(text): text for text in (f"document {number} of nothing much\n" * 9 for number in range(40))}
    ordered = [texts[each] for each in sorted(texts)]
    folder = tmp_path / "texts"
    folder.mkdir()

    def put(documents: list[str]) -> None:
        for text in documents:
            (folder / f"{text_hash(text):016x}.txt").write_text(text)

    def side(run: Run, name: str) -> str:
        source: Any = run.data.stage_of(1).sources[0]
        assert run.tokenizer is not None
        return run.tokenizer.decode(getattr(source.cache, name).tokens)

    overrides = [*text_overrides(tmp_path), f"data_stages.0.data.dataset={{text_files: {folder}}}"]
    overrides += ["tokens.val_fraction=1e-12", "tokens.limit_val_batches=1", "tokens.val_check_interval=1"]
    put(ordered[1:30])
    held = side(train_quietly(tiny_config(tmp_path, *overrides)), "validation")
    assert ordered[1].strip() in held
    put(ordered[:1] + ordered[30:])
    weights = f"model.init_method={{path: {tmp_path / 'checkpoints'}}}"
    resumed = train_quietly(tiny_config(tmp_path, *overrides, "tokens.train_steps=5"))
    new = train_quietly(tiny_config(tmp_path / "new", *overrides, weights, "tokens.train_steps=1"))
    assert (resumed.start.step, new.start.step) == (3, 0)
    for run in (resumed, new):
        assert ordered[1].strip() not in side(run, "train")
        assert ordered[1].strip() in side(run, "validation")
        assert ordered[0].strip() in side(run, "validation")
        assert ordered[30].strip() in side(run, "train")


def test_a_name_of_the_hub_is_no_checkpoint_whose_documents_were_held_out(tmp_path: Path) -> None:
    """`kenotron data which` needs no network for it."""
    assert Start.new(tiny_config(tmp_path, "model.init_method={path: nobody/nothing}")) == Start()
