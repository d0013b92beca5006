"""The checkpoints of one run on all tiers, behind the one interface that training uses.

    checkpoints = Checkpoints(config)                    # created by `launch`, with the tiers of the config
    with checkpoints.held():                             # no other run writes into checkpoints_path
        start = checkpoints.start()                      # its own newest intact one, or another run's
        loaded = checkpoints.load(start, model, optimizer)
        outcomes = checkpoints.save(10, content)         # the saves that are complete by now
        checkpoints.fence()                              # before weights change: waits for the last save's copies
        outcomes = checkpoints.poll(device)              # the saves that have become complete since

Three tiers hold them: `checkpoints_path`, which all machines share; the machines' own disks (`local.py`); and a store
(`remote.py`), from which `launch` fetches before a start, and to which an observer uploads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kenotron.checkpoint import durable, folders, leftovers, loading, manifest
from kenotron.checkpoint.engine import Engine, Keep, Saved, Unsaved, find_engine
from kenotron.checkpoint.start import Start, StartElsewhere, logger, refuse_unusable, run_name, start_of_run
from kenotron.checkpoint.tensors import Tensors, torch_dtype
from kenotron.config import Config, dump
from kenotron.config.dotted import USER_MODULES
from kenotron.config.errors import os_errors
from kenotron.config.resolved import CODE
from kenotron.parallel.collectives import any_rank
from kenotron.parallel.ranks import raise_on_any_rank, rank_and_size, run_on_rank0
from kenotron.storage.files import move_aside

if TYPE_CHECKING:
    from kenotron.checkpoint.local import LocalTier

Outcomes = list[Saved | Unsaved]
STEP, SAMPLES = 10**18 + 7, 10**18 + 9  # placeholders for the counters in the text of a config


class Loaded(NamedTuple):
    """The content of a checkpoint besides model and optimizer: step, state in the manifest, and tensors of hooks."""

    step: int
    state: dict[str, Any]
    hooks: dict[str, Tensor]


@dataclass
class Checkpoints:
    """See the module. All ranks call every method together, except `finish_alone` and `close`.

    With `fresh` the run begins at step 0, and its earlier checkpoints are set aside. `start_elsewhere` reads the
    checkpoint that `resume_checkpoint_path` names (`restart.py`).
    """

    config: Config
    _: KW_ONLY
    fresh: bool = False
    local: LocalTier | None = None
    start_elsewhere: StartElsewhere | None = None

    def __post_init__(self) -> None:
        self.root = self.config.checkpoint_folder
        self.engine_class = find_engine(self.config.checkpoints.checkpointing_engine)
        self.engine: Engine = Engine(self.config)  # until `open`
        self.durable_step = 0  # step of the newest checkpoint in checkpoints_path
        self.problem: str | None = None  # why the last save there failed
        self.protected: set[tuple[str, int]] = set()  # on rank 0: (reader, step), which retention keeps
        self._text: tuple[Config, str] | None = None

    # ---- before the first step ---------------------------------------------------------------------------------

    @contextmanager
    def held(self) -> Iterator[ExitStack]:
        """Create and lock `checkpoints_path` until the run ends: two runs would overwrite each other's steps.

        Yields a stack for further locks of the run. Raises InputError if the folder cannot be made or another run uses
        it.
        """

        def take() -> None:
            with os_errors(f"checkpoints.checkpoints_path: cannot create {self.root}"):  # now, not after many steps
                self.root.mkdir(parents=True, exist_ok=True)
            until_then.enter_context(durable.in_use(self.root))

        with ExitStack() as until_then:
            run_on_rank0(take)
            yield until_then

    def start(self) -> Start:
        """Choose the checkpoint to start from: rank 0 decides, and the ranks share the verification of checksums.

        The run's own checkpoint comes first: the newest complete one in `checkpoints_path`, or a local one that is
        ahead of it; then `resume_checkpoint_path`. With `fresh` only the latter counts. Raises InputError if the
        checkpoint belongs to a run that the config does not continue.
        """
        run_on_rank0(lambda: leftovers.tidy(self.root, logger.warning))
        newest = None if self.fresh else folders.newest_complete(self.root, logger.warning)
        if self.local is not None and not self.fresh:
            newest = self.local.newest(newest) or newest

        def decide() -> Start:
            if newest is None and not self.fresh:
                refuse_unusable(self.root)
            start = start_of_run(self.config, newest, self.start_elsewhere)
            return replace(start, name=run_name(self.config, start.path if start.continues else None))

        start = run_on_rank0(decide)
        self.durable_step = start.durable_step if start.continues else 0
        return start

    def set_aside(self) -> None:
        """Move earlier checkpoints to a separate folder, and remove local ones, the only ones that --fresh deletes."""
        run_on_rank0(self._move_aside)
        if self.local is not None:
            self.local.forget()

    def _move_aside(self) -> None:
        leftovers.tidy(self.root, logger.warning)  # may finish a save that was killed at its rename
        steps = [entry.path for entry in folders.list_checkpoints(self.root)]
        if steps:
            found = [path for path in (*steps, self.root / folders.LATEST) if path.exists()]
            logger.warning("--fresh: earlier checkpoints were moved to %s", move_aside(found, self.root))

    def load(self, start: Start, model: Tensors, optimizer: Tensors | None) -> Loaded:
        """Fill `model`, `optimizer` and the tensors of hooks from the checkpoint of `start`.

        Raises CheckpointError, before any tensor is changed, if a file is damaged or does not fit.
        """
        path = start.path
        assert path is not None
        hooks = raise_on_any_rank(lambda: _hook_tensors(path)) if "step" in start.loads else {}
        state = loading.load(
            path,
            model=model if "model" in start.loads else None,
            optimizer=optimizer,
            hooks=hooks or None,
            verify=not start.continues,  # the run's own newest checkpoint was verified when it was chosen
        )
        return Loaded(manifest.read_manifest(path).step, state, hooks)

    # ---- while the run trains ----------------------------------------------------------------------------------

    def open(self) -> None:
        """Create the engine with the resources that saving needs; called when the run is built."""
        self.engine = self.engine_class(self.config)

    def save(self, step: int, content: dict[str, Any], keep_all: bool = False) -> Outcomes:
        """Save `content`, the keyword arguments of `saving.save`, and return the saves that are complete by now.

        Once it is complete, checkpoints beyond `keep_last` are removed, unless `keep_all`. Raises CheckpointError.
        """
        settings, keep = self.config.checkpoints, None
        if settings.keep_last is not None and not keep_all:
            protected = frozenset(step for _, step in tuple(self.protected))  # copied first: a thread may change it
            keep = Keep(settings.keep_last, settings.keep_every, protected, settings.keep_best)
        return self._noted(self.engine.save(self.root, step, content, keep))

    def save_local(self, step: int, content: dict[str, Any]) -> Outcomes:
        """Save `content` on the machines' own disks. Raises CheckpointError."""
        assert self.local is not None
        state = content["state"] | self.local.state(self.durable_step)
        return self._noted(self.engine.save(self.local.root, step, content | {"state": state}, None))

    def config_text(self, config: Config, step: int, samples: int) -> str:
        """Return the YAML of `config` with the counters of a step, in nanotron's format."""
        if self._text is None or self._text[0] is not config:  # rendering takes 5 ms, during which training waits
            marks = {"step": STEP, "consumed_train_samples": SAMPLES}
            marked = config.model_copy(update={"general": config.general.model_copy(update=marks)})
            code = "".join(f"{CODE} {name} from {file}\n" for name, file in sorted(USER_MODULES.items()))
            self._text = config, dump(marked) + code
        return self._text[1].replace(str(STEP), str(step)).replace(str(SAMPLES), str(samples))

    def fence(self) -> None:
        """Wait until the state of the last save has been copied, so that weights and optimizer may change."""
        self.engine.fence()

    def poll(self, device: torch.device) -> Outcomes:
        """Return the outcome of the save in flight if all ranks have finished their shares."""
        if not self.engine.in_flight or any_rank(not self.engine.settled(), rank_and_size()[1], device):
            return []
        return self.collect()

    def collect(self) -> Outcomes:
        """Wait for the save in flight, and return its outcome."""
        return self._noted(self.engine.collect())

    def finish_alone(self, hurried: bool) -> Outcomes:
        """Finish a save in flight without the other ranks, as `Engine.finish_alone`, because the run fails."""
        return self._noted(self.engine.finish_alone(hurried), alone=True)

    def end(self) -> None:
        """Remove local checkpoints, after a run has ended normally and its last checkpoint is complete."""
        if self.local is not None:
            self.local.close()

    def close(self) -> None:
        """Release the engine's resources."""
        self.engine.close()

    def is_local(self, outcome: Saved | Unsaved) -> bool:
        """Return whether a save went to the local tier, not to `checkpoints_path`."""
        return outcome.path.parent != self.root

    def _noted(self, outcomes: Outcomes, alone: bool = False) -> Outcomes:
        """Record outcomes of saves, and remove local checkpoints that a newer one supersedes."""
        for outcome in outcomes:
            if self.is_local(outcome):
                if isinstance(outcome, Saved) and self.local is not None and not alone:
                    self.local.saved(int(outcome.path.name))
            elif isinstance(outcome, Unsaved):
                self.problem = outcome.problem
            else:
                self.durable_step, self.problem = int(outcome.path.name), None
                if self.local is not None:
                    self.local.remove()
        return outcomes


def _hook_tensors(path: Path) -> dict[str, Tensor]:
    """Return an empty tensor for each that hooks saved, whole on every rank."""
    saved = manifest.read_manifest(path)
    entries = loading.open_index(path / "hooks", saved) if saved.below("hooks") else {}
    return {name: torch.empty(entry.shape, dtype=torch_dtype(entry.dtype)) for name, entry in entries.items()}
