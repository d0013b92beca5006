"""Engines that save in the background: the files of the engine `torch`, and none of the faults of DataStates-LLM."""

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kenotron.checkpoint import write_plan
from kenotron.checkpoint.engine import GROUP, Engine, Keep, Saved, Unsaved, find_engine, find_writer
from kenotron.checkpoint.engines import background, staging
from kenotron.checkpoint.engines.background import BackgroundEngine
from kenotron.checkpoint.folders import list_checkpoints, newest_complete, verify
from kenotron.checkpoint.leftovers import tidy
from kenotron.config.errors import CheckpointError
from kenotron.parallel.ranks import rank_and_size
from kenotron.storage.native import find_compiler
from support.checkpoint_states import load_and_compare, moments, weights, write_tokenizer
from support.ranks import run_ranks
from support.tiny_run import environment, slow_copies, tiny_config, wait_until

ROWS = 3000  # of the largest tensor: 384 kB
SMALL_RING = "datastates with a small ring"  # of 64 KiB
ENGINES = {
    "async": ("checkpointing_engine=async",),
    "datastates": ("checkpointing_engine=datastates",),
    SMALL_RING: ("checkpointing_engine=datastates", "datastates={host_cache_size: 0.00001, parser_threads: 3}"),
}
if find_compiler():  # the bytes of the engine `torch`, whose writer is the one in Python
    ENGINES["datastates with the native writer"] = (*ENGINES["datastates"], "writer=native")
KEEP = Keep(2)
Make = Callable[..., Any]


def engine_of(name: str, folder: Path, *more: str) -> Engine:
    keys = (*ENGINES.get(name, ()), *more)
    config = tiny_config(folder, *(f"checkpoints.{key}" for key in keys))
    return find_engine(config.checkpoints.checkpointing_engine)(config)


def content(step: int, rows: int = ROWS) -> dict[str, Any]:
    """What `support.checkpoint_states.save_step` saves, with a position of a data stream."""
    return {
        "model": weights(step, rows),
        "optimizer": moments(step, rows),
        "state": {"step": step, "seed": step, "consumed_tokens": 512 * step},
        "config_yaml": f"general:\n  step: {step}\n",
        "model_config": {"hidden_size": 32},
        "save_tokenizer": write_tokenizer,
        "data": {f"stream{rank_and_size()[0]}": lambda: b"position", "shared": lambda: b"all ranks'"},
    }


def files_of(checkpoint: Path) -> dict[str, bytes]:
    """Every file; of the manifest what does not tell when it was saved, in its order."""
    found = {str(path.relative_to(checkpoint)): path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    manifest = json.loads(found["manifest.json"])
    del manifest["saved_at"], manifest["xxh3"]
    return found | {"manifest.json": json.dumps(manifest).encode()}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Engines by name; each is made once, as its process takes seconds to start."""
    made = cache(lambda name: engines.enter_context(closing(engine_of(name, tmp_path_factory.mktemp("engine")))))
    with ExitStack() as engines:
        yield made


@contextmanager
def stopped(writer: Any) -> Iterator[None]:
    """The process that writes does nothing meanwhile."""
    os.kill(writer.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(writer.process.pid, signal.SIGCONT)


def save(engine: Engine, root: Path, step: int) -> Any:
    """What became of a save that was waited for."""
    engine.save(root, step, content(step), KEEP)
    (outcome,) = engine.collect()
    return outcome


def wait_for_the_end(pid: int) -> None:
    state = Path(f"/proc/{pid}/stat")
    wait_until(lambda: not state.exists() or state.read_text().split()[2] == "Z", 20, lambda: "the writer lives on")


def spoil(state: dict[str, Any]) -> None:
    """What the next update does, to everything."""
    for tensor in [*state["model"].values(), *state["optimizer"].values()]:
        if torch.is_tensor(tensor):
            tensor.fill_(7)


@pytest.mark.parametrize("name", ENGINES)
def test_every_byte_is_the_synchronous_engines(name: str, tmp_path: Path, make: Make) -> None:
    """Also of what changes after the fence (fault 2: CPU tensors were handed to the file writer as they are)."""
    engine, reference = make(name), make("torch")
    for step in (10, 20, 30):
        state = content(step)
        before = engine.save(tmp_path / "a", step, state, KEEP)
        assert [outcome.path.name for outcome in before] == (["10"] if step == 20 else [])
        if name != "async":  # which has copied everything by now
            engine.fence()
        spoil(state)
        reference.save(tmp_path / "b", step, content(step), KEEP)
        if step == 20:
            (saved,) = engine.collect()
            assert saved.bytes == sum(file.stat().st_size for file in saved.path.rglob("*") if file.is_file())
            assert 0 <= saved.waited <= saved.seconds
    engine.collect()
    assert engine.collect() == []
    steps = [entry.path.name for entry in list_checkpoints(tmp_path / "a")]
    assert steps == ["20", "30"]
    for step in steps:
        assert files_of(tmp_path / "a" / step) == files_of(tmp_path / "b" / step)
        assert verify(tmp_path / "a" / step) == []
    assert sorted(os.listdir(tmp_path / "a")) == sorted(os.listdir(tmp_path / "b"))  # nothing else is left


@pytest.mark.parametrize("kind", ["torch", "datastates"])
def test_a_plan_is_made_once_for_equal_shapes(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    make_plan = write_plan.make_plan
    monkeypatch.setattr(write_plan, "make_plan", lambda *given: made.append(1) or make_plan(*given))
    with closing(engine_of(kind, tmp_path)) as engine:
        for step in (1, 2, 3):
            engine.save(tmp_path, step, content(step), KEEP)
        assert len(made) == 1
        engine.save(tmp_path, 4, content(4, rows=2 * ROWS), KEEP)
        engine.collect()
    assert len(made) == 2
    assert load_and_compare(tmp_path / "4", 2 * ROWS) == 4


# ---- the nine faults (reference: DataStates-LLM as published) ---------------------------------------------------


def test_no_file_is_truncated_after_its_first_bytes_were_written(tmp_path: Path, make: Make) -> None:
    """Fault 1: a header written by another thread than the tensors, in whatever order; 59 of 200 small files."""
    engine = make("datastates")
    for step in range(1, 41):
        engine.save(tmp_path, step, content(step, rows=2), None)
        engine.fence()
    engine.collect()
    found = list_checkpoints(tmp_path)
    assert len(found) == 40
    assert [problem for entry in found for problem in verify(entry.path)] == []
    assert [load_and_compare(entry.path, 2) for entry in found] == list(range(1, 41))


def test_nothing_is_announced_before_it_is_on_the_disk(tmp_path: Path, make: Make) -> None:
    """Fault 3: waiting for the copies is not waiting for the files."""
    engine = make("datastates")
    save(engine, tmp_path, 1)
    with stopped(engine.writer):
        assert engine.save(tmp_path, 2, content(2), KEEP) == []
        engine.fence()  # the copies need no disk
        assert engine.in_flight
        assert not engine.settled()
        assert not (tmp_path / "2").exists()
        assert (tmp_path / "latest.txt").read_text() == "1"
        assert newest_complete(tmp_path) == tmp_path / "1"
    (saved,) = engine.collect()
    assert saved.path == newest_complete(tmp_path) == tmp_path / "2"
    assert engine.settled()
    assert not engine.in_flight


def test_the_fence_waits_for_copies_not_begun(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 4: tensors were listed by a thread, and a fence before that found nothing to wait for."""
    slow_copies(monkeypatch, 0.3)
    engine, state = make("datastates"), content(1)
    engine.save(tmp_path, 1, state, KEEP)
    started = time.monotonic()
    engine.fence()
    assert time.monotonic() - started > 0.2
    spoil(state)
    (saved,) = engine.collect()
    assert saved.waited > 0.2  # it is counted
    assert load_and_compare(tmp_path / "1", ROWS) == 1


def test_a_device_is_read_after_the_work_that_was_queued_before_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 5: the copies' stream has to wait for an event of the stream that trains, recorded in the call."""
    calls: list[tuple[str, object]] = []

    class FakeStream:
        def __init__(self, device: object) -> None: ...

        def wait_event(self, event: object) -> None:
            calls.append(("the copies wait for", event))

        def record_event(self) -> str:
            calls.append(("recorded", "training"))
            return "training"

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(device))
    from kenotron.checkpoint.engines.ring import Ring

    memory = Ring.create()
    os.ftruncate(memory, 4096)
    copier = staging.Copier(Ring(memory, 4096), 1, pin=False)
    copier.mark([torch.empty(2, device="meta"), torch.empty(2)])
    assert calls == [("recorded", "training"), ("the copies wait for", "training")]
    copier.close()
    os.close(memory)


def test_tensors_live_until_they_are_copied(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 6: addresses were queued, and the memory behind them could be freed."""
    go, plain = threading.Event(), staging.Copier.copy
    monkeypatch.setattr(staging.Copier, "copy", lambda *given: (go.wait(), plain(*given)))
    engine, state, alive = make("datastates"), content(1), []
    for name, tensor in state["model"].items():  # one of them is not contiguous: its copy has to live, too
        owner = np.array(tensor.float().t().contiguous().numpy() if tensor.dim() == 2 else tensor.float().numpy())
        alive.append(weakref.ref(owner))
        view = torch.from_numpy(owner)
        state["model"][name] = (view.t() if tensor.dim() == 2 else view).to(tensor.dtype)
        del owner, view
    engine.save(tmp_path, 1, state, KEEP)
    del state
    gc.collect()
    assert alive[0]() is not None
    assert alive[2]() is not None
    go.set()
    engine.fence()
    gc.collect()
    assert [memory() for memory in alive] == [None] * 3  # and not longer
    engine.collect()
    assert load_and_compare(tmp_path / "1", ROWS) == 1


def test_a_tensor_larger_than_the_memory_makes_the_fence_wait_for_the_disk(tmp_path: Path, make: Make) -> None:
    """Fault 7: it ended the process."""
    engine, state = make(SMALL_RING), content(1)
    assert state["model"]["model.embed_tokens.weight"].nbytes > 4 * background.LEAST_BYTES
    save(engine, tmp_path, 0)
    with stopped(engine.writer):
        engine.save(tmp_path, 1, state, KEEP)
        time.sleep(0.2)
        assert engine.thread.is_alive()  # the ring is full, and nobody reads it
    engine.fence()
    spoil(state)
    assert engine.copier.ring.capacity == background.LEAST_BYTES
    engine.collect()
    assert load_and_compare(tmp_path / "1", ROWS) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from checkpoint.test_engines import KEEP, content, engine_of
engine, root = engine_of(sys.argv[1], Path(sys.argv[2])), Path(sys.argv[2]) / "root"
engine.save(root, 1, content(1), KEEP)
engine.collect()
os.kill(engine.writer.process.pid, signal.SIGSTOP)
engine.save(root, 2, content(2), KEEP)
engine.fence()
Path(sys.argv[2], "pid").write_text(str(engine.writer.process.pid))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("name", ["async", pytest.param("datastates", marks=pytest.mark.slow)])
def test_a_killed_process_leaves_no_half_checkpoint_and_no_writer(name: str, tmp_path: Path) -> None:
    """Fault 8: no rename, no checksum, no manifest."""
    env = environment(tmp_path, PYTHONPATH=os.pathsep.join(sys.path))
    killed = subprocess.run([sys.executable, "-c", KILLED, name, str(tmp_path)], env=env, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGCONT)
    wait_for_the_end(pid)
    root = tmp_path / "root"
    assert newest_complete(root) == root / "1"
    assert [path for path in root.iterdir() if ".tmp-" in path.name]
    tidy(root)
    assert {path.name for path in root.iterdir()} <= {"1", "latest.txt", ".lock"}
    assert load_and_compare(root / "1", ROWS) == 1


# Fault 9, a resume that does not work, is in tests/training/test_engine_runs.py.


# ---- failures ---------------------------------------------------------------------------------------------------


def test_a_full_disk_costs_one_checkpoint_and_the_next_is_complete(tmp_path: Path, make: Make) -> None:
    engine: BackgroundEngine = make(SMALL_RING)
    save(engine, tmp_path, 1)
    limit = (100_000, resource.RLIM_INFINITY)
    resource.prlimit(engine.writer.process.pid, resource.RLIMIT_FSIZE, limit)
    engine.save(tmp_path, 2, content(2), KEEP)
    engine.fence()  # although the ring is full and will not be emptied
    (outcome,) = engine.collect()
    assert isinstance(outcome, Unsaved)
    assert "File too large" in outcome.problem
    assert outcome.path == tmp_path / "2"
    assert newest_complete(tmp_path) == tmp_path / "1"
    assert not [path for path in tmp_path.iterdir() if ".tmp-" in path.name]
    resource.prlimit(engine.writer.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    saved = save(engine, tmp_path, 3)
    assert isinstance(saved, Saved)
    assert load_and_compare(saved.path, ROWS) == 3


def test_a_killed_writer_costs_one_checkpoint_and_is_started_again(tmp_path: Path, make: Make) -> None:
    engine: BackgroundEngine = make("datastates")
    save(engine, tmp_path, 1)
    os.kill(engine.writer.process.pid, signal.SIGSTOP)
    engine.save(tmp_path, 2, content(2), KEEP)
    os.kill(engine.writer.process.pid, signal.SIGKILL)
    (outcome,) = engine.collect()
    assert isinstance(outcome, Unsaved)
    assert "ended with exit code -9" in outcome.problem
    assert load_and_compare(save(engine, tmp_path, 3).path, ROWS) == 3


def test_signals_for_the_run_do_not_end_the_writer(tmp_path: Path, make: Make) -> None:
    engine: BackgroundEngine = make("async")
    save(engine, tmp_path, 1)
    engine.save(tmp_path, 2, content(2), KEEP)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(engine.writer.process.pid, number)
    (saved,) = engine.finish_alone(hurried=False)
    assert load_and_compare(saved.path, ROWS) == 2


def test_a_failed_read_back_is_a_failed_save(tmp_path: Path) -> None:
    """The writer of every rank compares its files with what it wrote before it says that they are there."""
    from kenotron.checkpoint.durable import FileRecord
    from kenotron.checkpoint.engines.writer import Server

    server = Server(None, 0, os.getpid())  # type: ignore[arg-type]
    said: list[tuple[str, object]] = []
    server._send = lambda kind, problem: said.append((kind, problem))  # type: ignore[method-assign,assignment]
    server._write_share = lambda folder, small: {"model/a": FileRecord(3, "0")}  # type: ignore[method-assign]
    (tmp_path / "10.tmp-00000000" / "model").mkdir(parents=True)
    (tmp_path / "10.tmp-00000000" / "model" / "a").write_bytes(b"abc")
    server._save({"temporary": tmp_path / "10.tmp-00000000", "rank": 1, "ranks": [0, 1], "small": {}, "verify": True})
    ((kind, problem),) = said
    assert kind == "failed"
    assert "model/a is damaged" in str(problem)


def test_a_rank_whose_process_has_ended_leaves_word_for_the_others(tmp_path: Path) -> None:
    """Else the first rank waits for its files; but those that are complete stay good."""
    from kenotron.checkpoint.engines.writer import Server

    job = {"temporary": tmp_path, "ranks": [0, 1], "small": {}, "verify": False}

    def gone(*_: object) -> Any:
        raise EOFError

    first, other = (Server(None, 0, os.getppid()) for _ in range(2))  # type: ignore[arg-type]
    other._write_share = gone  # type: ignore[method-assign]
    with pytest.raises(EOFError):
        other._save(job | {"rank": 1})
    with pytest.raises(CheckpointError, match="rank 1: its training process has ended"):
        first._share(tmp_path, 1)
    other._write_share, other._send = (lambda folder, small: {}), gone  # type: ignore[method-assign,assignment]
    (tmp_path / "share-1.json").unlink()
    with pytest.raises(EOFError):
        other._save(job | {"rank": 1})
    assert first._share(tmp_path, 1) == {}


# ---- several ranks ----------------------------------------------------------------------------------------------


def no_space_left(folder: Path) -> None:
    """Where the tokenizer's files are made, on the first rank."""
    raise OSError(28, "No space left on device")


def save_on_two_ranks(rank: int, folder: Path) -> list[Any]:
    """The same state by `torch` into a, by `datastates` into b; then two that one rank cannot write; then one more."""
    from checkpoint.test_checkpoint_ranks import LAYOUT, logical, moments, sharded

    def state() -> dict[str, Any]:
        return content(1) | {"model": sharded(logical(), LAYOUT), "optimizer": moments(rank)}

    reference, engine = engine_of("torch", folder), engine_of("datastates", folder)
    try:
        reference.save(folder / "a", 1, state(), KEEP)
        engine.save(folder / "b", 1, state(), KEEP)
        outcomes = [engine.collect()]
        engine.tokenizer = None
        outcomes.append(engine.save(folder / "b", 2, state() | {"save_tokenizer": no_space_left}, KEEP))
        os.kill(engine.writer.process.pid, signal.SIGSTOP)
        engine.save(folder / "b", 2, state(), KEEP)
        os.kill(engine.writer.process.pid, signal.SIGKILL if rank == 1 else signal.SIGCONT)
        outcomes.append(engine.collect())
        engine.save(folder / "b", 3, state(), KEEP)
        return [*outcomes, engine.collect()]
    finally:
        engine.close()


def test_two_ranks_write_the_synchronous_engines_files_and_fail_together(tmp_path: Path) -> None:
    first, second = run_ranks(2, save_on_two_ranks, tmp_path)
    no_tokenizer = [known.pop(1)[0].problem for known in (first, second)]
    assert no_tokenizer == [f"{rank}OSError: [Errno 28] No space left on device" for rank in ("", "rank 0: ")]
    assert first == second  # both know the same
    ((saved,), (lost,), (again,)) = first
    assert files_of(saved.path) == files_of(tmp_path / "a" / "1")
    assert isinstance(lost, Unsaved)
    assert lost.problem.startswith("rank 1: the process that writes checkpoints ended")
    assert verify(again.path) == []
    assert [entry.path.name for entry in list_checkpoints(tmp_path / "b")] == ["1", "3"]


class Registered(Engine):
    """As a package would have it."""


def test_engines_and_writers_of_installed_packages_go_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        EntryPoint("theirs", f"{__name__}:Registered", GROUP),
        EntryPoint("theirs", f"{__name__}:engine_of", "kenotron.checkpoint_writers"),
    ]
    known = lambda **wanted: EntryPoints(entries).select(**wanted)  # noqa: E731
    monkeypatch.setattr("kenotron.config.dotted.entry_points", known)
    assert find_engine("theirs") is Registered
    assert find_writer("theirs") is engine_of
