"""Engines whose saves continue while the run trains.

    AsyncEngine         save: copies, returns       │ writes …
    DataStatesEngine    save: returns               │ copies beside forward and backward │ fence │ writes …

Weights and optimizer change only in the update, so copies may be made at any time between the call and the next
`fence`, which waits for the remaining ones (DataStates-LLM, arXiv 2406.10707). A separate process (`engines.writer`)
writes the copies and commits without the training processes: no collective runs in the background, and nothing is
announced before it is on disk.

    engine.save(root, 10, content, keep)    # [] : step 10 is in flight
    engine.fence()                          # before the update
    engine.collect()                        # [Saved(…/10, …)] : waits, on all ranks, until it is complete
"""

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from kenotron.checkpoint.engine import Engine, Keep, Saved, Unsaved
from kenotron.checkpoint.engines.client import COMMITTED, FAILED, WRITING, WRITTEN, GivenUp, SaveStream, WriterProcess
from kenotron.checkpoint.engines.staging import Copier
from kenotron.checkpoint.engines.writer import leave_problem
from kenotron.checkpoint.manifest import plain
from kenotron.checkpoint.saving import OF_TENSORS, begin_folder, small_files, tokenizer_files
from kenotron.checkpoint.tensors import shards
from kenotron.checkpoint.write_plan import Parts, Planner, WritePlan
from kenotron.config import Config
from kenotron.config.errors import CheckpointError, PeerFailed
from kenotron.parallel.ranks import describe, gather, rank_and_size, ranks_with, run_on_first

PATIENCE_SECONDS, HURRIED_SECONDS = 60.0, 1.0
LEAST_BYTES = 1 << 16


class BackgroundEngine(Engine):
    """The base of both engines: one writer process, one plan, and the order of a save.

    `lazy`: copy after the call. `most_bytes`: limit of host memory for this rank; None: as much as it writes.
    """

    in_background = True

    def __init__(self, config: Config, lazy: bool, most_bytes: int | None, threads: int = 1, pin: bool = True) -> None:
        super().__init__(config)
        self.lazy, self.most_bytes, self.threads, self.pin = lazy, most_bytes, threads, pin
        self.writer = WriterProcess()
        self.planner = Planner()
        self.plan: WritePlan | None = None  # the plan that the writer has
        self.copier: Copier | None = None
        self.tokenizer: dict[str, bytes] | None = None
        self.thread: threading.Thread | None = None
        self.stream: SaveStream | None = None
        self.problem: str | None = None  # why copies have failed
        self.ranks = [0]  # the ranks that save into the same folder as this one
        self.held = ExitStack()  # on the first of them: the folder's lock, and the temporary folder until it is renamed
        self.folder = Path()
        self.temporary = Path()
        self.started = self.waited = 0.0

    # ---- what training calls -----------------------------------------------------------------------------------

    def save(self, root: Path, step: int, content: dict[str, Any], keep: Keep | None) -> list[Saved | Unsaved]:
        """Begin a save, after waiting for the one in flight."""
        outcomes = self.collect()
        self.started, self.waited, self.problem = time.monotonic(), 0.0, None
        self.folder = root / str(step)
        parts = {folder: shards(part) for folder in OF_TENSORS if (part := content.get(folder)) is not None}
        plan = self._planned(parts)
        try:
            small = self._small_files(content)
            self.ranks = ranks_with(str(root))
            self.temporary = run_on_first(self.ranks, lambda: self._begin(content, list(parts)))
        except (CheckpointError, PeerFailed, OSError) as error:
            self.held.close()
            return [*outcomes, Unsaved(self.folder, describe(error))]
        job = {
            "temporary": self.temporary,
            "final": self.folder,
            "rank": rank_and_size()[0],
            "ranks": self.ranks,
            "small": small,
            "state": plain(content["state"], "state") if self._is_first else {},
            "verify": self.verifies,
            "keep": keep,
        }
        self.writer.begin(job)
        self.in_flight = True
        blocks = [block for file in plan.files for block in file.blocks]
        self._copy([parts[block.folder][block.name].elements() for block in blocks], plan.bytes)
        self.waited += time.monotonic() - self.started
        return outcomes

    def fence(self) -> None:
        """Wait for the remaining copies."""
        if self.thread is not None:
            started = time.monotonic()
            self.thread.join()
            self.thread = None
            self.waited += time.monotonic() - started

    def settled(self) -> bool:
        """Return whether this rank's files (on a folder's first rank, the checkpoint) are written or have failed."""
        if not self.in_flight:
            return True
        if self.thread is not None and self.thread.is_alive():
            return False  # after reading the writer's messages
        self.writer.receive()
        self._report_lost_writer()
        return self.writer.state in (COMMITTED if self._is_first else WRITTEN, FAILED) or self.problem is not None

    def collect(self) -> list[Saved | Unsaved]:
        """Wait for the save in flight; a failure on any rank is the outcome on all."""
        if not self.in_flight:
            return []
        started = time.monotonic()
        self._finish_share()
        problems = [f"rank {rank}: {p}" if rank else p for rank, p in enumerate(gather(self._problem())) if p]
        if problems:
            self.writer.send("give up", problems[0])
        if self._is_first:
            self.writer.wait(lambda: self.writer.state in (COMMITTED, FAILED))
        self.waited += time.monotonic() - started
        outcomes = [outcome for first, outcome in gather((self._is_first, self._outcome())) if first]
        return [next((outcome for outcome in outcomes if isinstance(outcome, Unsaved)), outcomes[0])]

    def finish_alone(self, hurried: bool) -> list[Saved | Unsaved]:
        """Wait for this rank's files, and on a folder's first rank for those of the others, if they come."""
        if not self.in_flight:
            return []
        if not hurried:
            self._finish_share()
        until = time.monotonic() + (HURRIED_SECONDS if hurried else PATIENCE_SECONDS)
        self.writer.wait(lambda: self.settled() or time.monotonic() > until)
        return [self._outcome()] if rank_and_size()[0] == 0 else []

    def close(self) -> None:
        """End the writer process and the copying threads."""
        if self.stream is not None:
            self.stream.stopped = True
        self.fence()
        self.writer.close()
        self.held.close()
        self.in_flight = False
        if self.copier is not None:
            self.copier.close()
            self.copier = None

    # ---- before a save -----------------------------------------------------------------------------------------

    def _planned(self, parts: Parts) -> WritePlan:
        """Return the plan for `parts`, after sending it to the writer and allocating memory for it."""
        plan = self.planner.plan(parts)
        if not self.writer.alive:
            self.writer.close()
            self.writer, self.plan, self.copier = WriterProcess(), None, None
        if self.plan is not plan:
            self.plan = plan
            self._resize(plan.bytes)
            files = [(file.name, file.header, file.bytes) for file in plan.files]
            self.writer.send("plan", (files, plan.indexes, self.config.checkpoints.writer))
        return plan

    def _resize(self, needed: int) -> None:
        capacity = max(LEAST_BYTES, needed if self.most_bytes is None else min(needed, self.most_bytes))
        if self.copier is not None and self.copier.ring.capacity == capacity:
            return
        if self.copier is not None:
            self.copier.close()
        self.copier = Copier(self.writer.resize(capacity), self.threads, self.pin)

    def _begin(self, content: dict[str, Any], folders: list[str]) -> Path:
        """Refuse state that JSON cannot hold, and create the temporary folder; on a folder's first rank."""
        plain(content["state"], "state")
        with ExitStack() as cleanup:
            temporary = begin_folder(self.folder, folders, cleanup)
            self.held = cleanup.pop_all()
        return temporary

    def _small_files(self, content: dict[str, Any]) -> dict[str, bytes]:
        """Return the files besides tensors that this rank writes. The tokenizer does not change in a run."""

        def tokenizer() -> dict[str, bytes]:
            if self.tokenizer is None:
                self.tokenizer = tokenizer_files(content["save_tokenizer"])
            return self.tokenizer

        return small_files(content["config_yaml"], content["model_config"], tokenizer, content["data"])

    # ---- copies ------------------------------------------------------------------------------------------------

    def _copy(self, tensors: list[Tensor], size: int) -> None:
        assert self.copier is not None
        self.copier.mark(tensors)
        self.stream = SaveStream(self.writer, self.copier.ring, size)
        if not self.lazy:
            self._copy_all(tensors, self.stream)
        else:
            self.thread = threading.Thread(target=self._copy_all, args=(tensors, self.stream), daemon=True)
            self.thread.start()

    def _copy_all(self, tensors: list[Tensor], stream: SaveStream) -> None:
        assert self.copier is not None
        try:
            self.copier.copy(tensors, stream)
        except GivenUp:
            pass
        except Exception as error:
            self.problem = f"copying to host memory: {describe(error)}"
            self.writer.send("give up", self.problem)

    # ---- the end of a save -------------------------------------------------------------------------------------

    def _finish_share(self) -> None:
        """Wait until this rank's files are written or have failed."""
        self.fence()
        self.writer.wait(lambda: self.writer.state != WRITING)
        self._report_lost_writer()

    def _report_lost_writer(self) -> None:
        """Tell the folder's first rank, which waits for this rank's files, that this rank's writer has died."""
        if not self.writer.alive:
            leave_problem(self.temporary, rank_and_size()[0], self._problem() or "")

    def _problem(self) -> str | None:
        return self.problem or self.writer.problem

    @property
    def _is_first(self) -> bool:
        """Whether this rank commits its folder."""
        return rank_and_size()[0] == self.ranks[0]

    def _outcome(self) -> Saved | Unsaved:
        """Return this rank's outcome of the save, which is then no longer in flight."""
        self.in_flight = False
        self.held.close()
        if self.writer.state != COMMITTED or self._problem():
            written = self.writer.state == WRITTEN
            late = "the files of other ranks did not arrive" if written else "it was still being written"
            return Unsaved(self.folder, self._problem() or late)
        size, at, notes = self.writer.committed
        seconds = at - self.started  # until the save was complete
        return Saved(self.folder, size, seconds, min(self.waited, seconds), notes)


class AsyncEngine(BackgroundEngine):
    """`async`: a save copies this rank's share into host memory and returns."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, lazy=False, most_bytes=None)


class DataStatesEngine(BackgroundEngine):
    """`datastates`: a save returns at once; the copies run until the fence, through `host_cache_size` of memory."""

    def __init__(self, config: Config) -> None:
        settings = config.checkpoints.datastates
        most = int(settings.host_cache_size * 2**30)
        super().__init__(config, True, most, settings.parser_threads, settings.pin_host_cache)
