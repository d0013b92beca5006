"""A rank that dies, stops or hangs is replaced while the others stay, and no number of the run changes."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from chaos import run as chaos
from kenotron.config.errors import RunFailed
from kenotron.launch import launch, recovery
from support.nursery import Finished, Nursery
from support.tiny_run import Shell, numbers, tiny_config, tiny_yaml, train_quietly, wait_until

pytestmark = pytest.mark.budget(25, reason="three processes and more, each of which imports torch for 3 s")

STEPS = 9
SAVED = (f"tokens.train_steps={STEPS}", "checkpoints.checkpoint_interval=3")
OVERRIDES = ("parallelism.dp=2", "tokens.micro_batch_size=2", *SAVED)


def train(nursery: Nursery, folder: Path, *overrides: str, spares: int = 1) -> Finished:
    return nursery.run("train", tiny_yaml(folder), *OVERRIDES, *overrides, "--spares", str(spares), folder=folder)


def fault(folder: Path, what: str, rank: int, step: int = 5, once: bool = True) -> str:
    arguments = f"what: {what}, rank: {rank}, step: {step}" + (f", once: {folder / 'happened'}" if once else "")
    return f"general.hooks=[{{path: support.user_parts.OnRank, kwargs: {{{arguments}}}}}]"


@pytest.fixture(scope="module")
def without_faults(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> list[list[object]]:
    folder = tmp_path_factory.mktemp("without")
    finished = nursery.run("train", tiny_yaml(folder), *OVERRIDES, folder=folder)
    assert finished.code == 0, finished.stderr
    return numbers(folder)


def replaced(finished: Finished) -> list[str]:
    return re.findall(r"^.*all ranks resume from the newest checkpoint$", finished.stderr, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.cases(slow=2)  # rank 0 is killed, rank 1 hangs
@pytest.mark.parametrize("engine", ["torch", "datastates"])
@pytest.mark.parametrize(
    ("what", "rank", "begins"),
    [
        ("SIGKILL", 0, r"warning: rank 0 was killed by SIGKILL; (out of memory\?.*; )?rank 0 is now process "),
        ("SIGKILL", 1, r"warning: rank 1 was killed by SIGKILL; (out of memory\?.*; )?rank 1 is now process "),
        ("SIGSTOP", 1, r"warning: rank 1 was stopped \(SIGSTOP\); rank 1 is now process "),
        ("raise", 0, "warning: rank 0: RuntimeError: this hook is broken on one rank; rank 0 is now process "),
        ("sleep", 1, r"warning: rank 0 has waited more than 5 s \(parallelism.timeout_seconds\) in "),
    ],
)
def test_whatever_fails_is_replaced(
    tmp_path: Path, nursery: Nursery, without_faults: list[list[object]], what: str, rank: int, begins: str, engine: str
) -> None:
    settings = (f"checkpoints.checkpointing_engine={engine}", "parallelism.timeout_seconds=5")
    finished = train(nursery, tmp_path, fault(tmp_path, what, rank), *settings)
    assert finished.code == 0, finished.stderr
    (line,) = replaced(finished)
    assert re.match(begins, line)
    assert numbers(tmp_path) == without_faults
    assert finished.stdout.count("Training from step") == 2


@pytest.mark.slow
def test_a_fault_before_the_first_checkpoint_begins_again(tmp_path: Path, nursery: Any, without_faults: Any) -> None:
    train_quietly(tiny_config(tmp_path, *SAVED))
    finished = train(nursery, tmp_path, fault(tmp_path, "SIGKILL", rank=0, step=2), "--fresh")
    assert finished.code == 0, finished.stderr
    assert finished.stdout.count("Training from step 1 ") == 2
    assert numbers(tmp_path) == without_faults


def test_a_run_from_another_runs_checkpoint_begins_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--fresh is done before there are ranks, which alone can read that checkpoint."""
    begun: list[bool] = []
    monkeypatch.setattr("kenotron.launch.recovery.start_ranks_with_spares", lambda *_, **__: begun.append(True))
    train_quietly(tiny_config(tmp_path / "parent", "tokens.train_steps=1"))
    source = f"checkpoints.resume_checkpoint_path={tmp_path}/parent/checkpoints"
    config = tiny_config(tmp_path / "child", source, "tokens.train_steps=2")
    train_quietly(config)
    launch(config, fresh=True, spares=1)
    assert begun
    assert [path.name for path in config.checkpoint_folder.glob("*/*") if path.name == "2"] == ["2"]
    assert not (config.checkpoint_folder / "2").exists()


@pytest.mark.slow
def test_a_fault_that_comes_back_ends_the_run_with_its_error(tmp_path: Path, nursery: Nursery) -> None:
    finished = train(nursery, tmp_path, fault(tmp_path, "raise", rank=1, once=False))
    assert finished.code == 1
    assert len(replaced(finished)) == 2
    assert "warning: 3 faults with no new checkpoint between them: the run ends" in finished.stderr
    assert "\nerror: rank 1: RuntimeError: this hook is broken on one rank\n" in finished.stderr


@pytest.mark.slow
def test_wrong_input_is_not_tried_again(tmp_path: Path, nursery: Nursery) -> None:
    finished = train(nursery, tmp_path, "general.hooks=[support.user_parts.WrongInput]")
    assert (finished.code, replaced(finished)) == (2, [])
    assert finished.stderr.splitlines()[-1] == "error: general.hooks: expected another one, found this one"


@pytest.mark.slow
def test_a_signal_saves_and_stops_all_processes(tmp_path: Path, nursery: Nursery) -> None:
    given = (*OVERRIDES, "tokens.train_steps=100000", "--spares", "1")
    child = nursery.start("train", tiny_yaml(tmp_path), *given, folder=tmp_path)
    log = tmp_path / "logs" / "tiny" / "metrics.jsonl"
    wait_until(lambda: log.exists() and log.read_bytes().count(b"\n") > 3, seconds=60)
    os.kill(child.pid, signal.SIGTERM)
    finished = child.wait()
    assert finished.code == 0, finished.stderr
    assert "Checkpoint: " in finished.stdout
    assert replaced(finished) == []


def test_a_process_that_cannot_be_killed_ends_the_run_with_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a file server that is gone."""

    class Stuck:
        pid = 4711

        def poll(self) -> None: ...

        def kill(self) -> None: ...

    monkeypatch.setattr(recovery, "LEAVE_WITHIN_S", 0.0)
    monkeypatch.setattr(recovery, "DIES_WITHIN_S", 0.2)
    ranks = recovery.ReplacedRanks(1, 0, Path(), Path(), (), lambda: None, None)
    ranks.places, ranks.processes = [0], [Stuck()]  # type: ignore[list-item]
    with pytest.raises(RunFailed, match=r"^alive 0.2 s after SIGKILL, .*: process 4711\nrank 0 has waited more than 5"):
        ranks._replace({0}, "rank 0 has waited more than 5 s")
    ranks.end()


def test_torchrun_with_spares_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, said = shell("train", tiny_yaml(tmp_path), *OVERRIDES, "--spares", "1")
    assert code == 2
    assert said.splitlines()[-1].startswith("error: --spares: expected ranks that kenotron starts itself")


@pytest.mark.slow
@pytest.mark.cases(slow=0)
def test_faults_at_random_moments(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--faults", "3", "--every", "5", "--layout", "parallelism.dp=2 optimizer.zero_stage=1"]) == 0
    said = capsys.readouterr().out
    assert "every loss, gradient norm and hash of weights equals that" in said
    assert " kill or stop a rank: mean stall " in said
