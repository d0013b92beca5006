"""A rank that raises, dies, hangs or finds wrong input: all end in seconds, and it is reported once, as the cause."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from kenotron.config.errors import PeerFailed
from kenotron.parallel.ranks import comes_from_another_rank
from support.nursery import Finished, Nursery
from support.tiny_run import environment, tiny_yaml

pytestmark = pytest.mark.budget(20, reason="ranks are real processes here, and each imports torch for 3 s")

TWO = ("parallelism.dp=2", "tokens.micro_batch_size=2")
# From the last step that was written to the end of the command: a second or two on an idle machine; hanging, 600.
GRACE_S = 100.0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer"), True),
        (dist.DistNetworkError("the store is gone"), True),
        (PeerFailed("rank 1: no space left"), True),
        (FileNotFoundError("/data/gloo/x.jsonl"), False),
        (RuntimeError("cannot open gloom.txt"), False),
        (ValueError("gloo"), False),
    ],
    ids=repr,
)
def test_another_ranks_end_is_known_by_the_error(error: Exception, expected: bool) -> None:
    assert comes_from_another_rank(error) == expected
    outer = ValueError("while saving")
    outer.__cause__ = error
    assert comes_from_another_rank(outer) == expected


def on_rank_1(what: str, *overrides: str) -> tuple[str, ...]:
    hook = f"general.hooks=[{{path: support.user_parts.OnRank, kwargs: {{what: {what}}}}}]"
    return (*TWO, hook, "tokens.train_steps=5", *overrides)


def train(nursery: Nursery, folder: Path, *overrides: str) -> tuple[Finished, float]:
    """What came of it, and the seconds from the second step to the end."""
    finished = nursery.run("train", tiny_yaml(folder), *overrides, folder=folder)
    return finished, time.time() - (folder / "logs" / "tiny" / "metrics.jsonl").stat().st_mtime


def errors(finished: Finished) -> list[str]:
    return [line for line in finished.stderr.splitlines() if line.startswith("error: ")]


def test_a_rank_that_raises_ends_all_and_its_error_comes_first_with_its_traceback(tmp_path: Path, nursery: Any) -> None:
    finished, seconds = train(nursery, tmp_path, *on_rank_1("raise"))
    assert (finished.code, seconds < GRACE_S) == (1, True)
    lines = finished.stderr.splitlines()
    assert lines[0] == "error: rank 1: RuntimeError: this hook is broken on one rank"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == f"Its output: {tmp_path}/logs/tiny/ranks/1.log"
    assert finished.stderr.count("Traceback") == 1
    assert "gloo" not in finished.stderr  # what the other rank saw of it
    assert "this hook is broken" in (tmp_path / "logs" / "tiny" / "ranks" / "1.log").read_text()


def test_a_rank_that_is_killed_ends_all_and_is_named_with_the_signal(tmp_path: Path, nursery: Nursery) -> None:
    finished, seconds = train(nursery, tmp_path, *on_rank_1("SIGKILL"))
    assert (finished.code, seconds < GRACE_S) == (1, True)
    assert re.fullmatch(r"error: rank 1 was killed by SIGKILL(; out of memory\?.*)?", finished.stderr.splitlines()[0])
    assert len(errors(finished)) == 1
    assert "Traceback" not in finished.stderr


@pytest.mark.slow
def test_a_mapped_file_that_is_cut_short_while_it_is_read_is_named(tmp_path: Path, nursery: Nursery) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(50_000, dtype=np.uint16) % 50)
    data = f"data_stages.0.data={{seed: 3, num_loading_workers: 0, dataset: {{tokens: {path}}}}}"
    hook = f"general.hooks=[{{path: support.user_parts.CutShort, kwargs: {{path: {path}}}}}]"
    finished, _ = train(nursery, tmp_path, *TWO, data, hook, "tokens.train_steps=2")
    assert finished.code == 1
    assert finished.stderr.splitlines()[0] == (
        "error: rank 1 was killed by SIGBUS; a memory-mapped file was cut short while it was read: "
        f"{path}: 50000 ids of uint16 from byte 128 on end at byte 100128, but the file ends at byte 1000"
    )
    assert re.search(r"user_parts\.py.* in after_step", finished.stderr)


def test_a_command_whose_mapped_file_is_cut_short_says_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(50_000, dtype=np.uint16))
    cut = f"""
import os
from kenotron.cli import main
from kenotron.data.formats import numpy
mapped = numpy.map_array
def cut_short(*arguments):
    found = mapped(*arguments)
    os.truncate({str(path)!r}, 1000)
    return found
numpy.map_array = cut_short
main(["data", "inspect", {str(path)!r}])
"""
    finished = subprocess.run([sys.executable, "-c", cut], env=environment(tmp_path), capture_output=True, text=True)
    assert finished.returncode == -signal.SIGBUS
    assert finished.stderr.startswith("Fatal Python error: Bus error")


def test_a_rank_that_hangs_is_named_with_the_collective_that_it_did_not_join(tmp_path: Path, nursery: Nursery) -> None:
    finished, seconds = train(nursery, tmp_path, *on_rank_1("sleep", "parallelism.timeout_seconds=5"))
    assert (finished.code, 4 < seconds < 5 + GRACE_S) == (1, True)
    first, asking, missing = finished.stderr.splitlines()
    late = r"error: rank 0 has waited more than 5 s \(parallelism\.timeout_seconds\) in gather \(number \d+\) of "
    assert re.fullmatch(late + "all ranks: rank 1 did not join it", first)
    assert re.match(r"  rank 0: at \w+\.py:\d+ in \w+", asking)
    assert re.match(r"  rank 1: at user_parts\.py:\d+ in after_step; the last that it joined was ", missing)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_and_ends_with_the_others(tmp_path: Path, nursery: Nursery) -> None:
    """By SIGSTOP: it cannot say where it is."""
    finished, seconds = train(nursery, tmp_path, *on_rank_1("SIGSTOP", "parallelism.timeout_seconds=5"))
    assert finished.code == 1
    assert seconds < 60
    assert re.search(r"error: rank 0 has waited more than 5 s .* in gather .*rank 1.* did not join", finished.stderr)
    assert "rank 1: did not reply" in finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_that_waits_for_its_data_is_called_a_data_stall(workers: int, tmp_path: Path, nursery: Nursery) -> None:
    dataset = "{source: support.user_parts.Hanging, kwargs: {rank: 1}}"
    data = f"data_stages.0.data={{seed: 3, num_loading_workers: {workers}, dataset: {dataset}}}"
    keys = (*TWO, data, "tokens.train_steps=20", "parallelism.timeout_seconds=5")
    finished, _ = train(nursery, tmp_path, *keys)
    assert finished.code == 1
    first, _, missing = finished.stderr.splitlines()
    assert first.endswith("of all ranks: rank 1 did not join it, a data stall: it waits for its batches")
    reads = (
        r"  rank 1: waits for its batches, reading at user_parts\.py:\d+ in __getitem__; the last that it joined was "
    )
    assert re.match(reads, missing)


def test_wrong_input_that_every_rank_finds_is_reported_once_and_is_exit_code_2(tmp_path: Path, nursery: Any) -> None:
    hook = "general.hooks=[support.user_parts.WrongInput]"
    finished = nursery.run("train", tiny_yaml(tmp_path), *TWO, hook, folder=tmp_path)
    assert (finished.code, finished.stderr) == (2, "error: general.hooks: expected another one, found this one\n")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["raise", pytest.param("SIGKILL", marks=pytest.mark.slow)])
def test_under_torchrun_too_all_end_and_the_cause_is_reported_once(what: str, tmp_path: Path, nursery: Nursery) -> None:
    given = ("run_train.py", "--config-file", tiny_yaml(tmp_path), *on_rank_1(what))
    finished = nursery.torchrun(*given, ranks=2, folder=tmp_path)
    seconds = time.time() - (tmp_path / "logs" / "tiny" / "metrics.jsonl").stat().st_mtime
    assert (finished.code, seconds < GRACE_S) == (1, True)
    assert "gloo" not in finished.stderr  # what the other rank saw of it
    if what == "raise":
        assert finished.stderr.count("RuntimeError: this hook is broken on one rank") == 1
    else:  # torchrun's own page names the signal; the other rank may have said that rank 1 is gone
        assert finished.stderr.count("error: rank 1 (process") <= 1
        assert re.search(r"Root Cause.*rank +: 1 .*SIGKILL", finished.stderr, re.DOTALL)


@pytest.mark.skipif(sys.platform != "linux", reason="names of threads are read from /proc")
def test_the_process_group_and_its_threads_end_before_the_interpreter_does(tmp_path: Path) -> None:
    """Else gloo's threads may abort the process (SIGABRT), and its exit code is lost."""
    program = """
import atexit, gc, sys, torch, torch.distributed as dist
from pathlib import Path
from kenotron.launch import start_process_group

def threads():
    return sorted({name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")} - {"python"})

gc.disable()  # what refers to itself is freed by `leave`, or not at all
atexit.register(lambda: print("group" if dist.is_initialized() else "no group", threads()))  # after what comes later
start_process_group(torch.device("cpu"), 60, dist.HashStore())
import torch._dynamo  # as the first step of an optimizer does
around = [dist.group.WORLD]
around.append(around)
del around
print(threads())
sys.exit(2)
"""
    alone = environment(tmp_path, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    process = subprocess.run([sys.executable, "-c", program], env=alone, capture_output=True, text=True, check=False)
    started, ended = process.stdout.splitlines()
    assert "pt_gloo_runloop" in started
    assert (process.returncode, ended, process.stderr) == (2, "no group []", "")
