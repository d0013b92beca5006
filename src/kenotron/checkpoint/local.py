"""`checkpoints.local`: frequent checkpoints on the machines' own disks or in their memory, beside the durable ones.

    checkpoints/my_run/.run                              3f9c0a1b5d2e7788: the run's id
    checkpoints/my_run/1000/                             durable: in `checkpoints_path`
    /dev/shm/kenotron/run-3f9c0a1b5d2e7788/1050/         local: the same files, only of the newest
    /dev/shm/kenotron/run-3f9c0a1b5d2e7788/1of4/1050/    on several machines: the part that the ranks of machine 1 wrote

A run resumes from its local checkpoint if that is ahead of the newest durable one. It is found by the run's id, which
is new in a new folder and after --fresh. The durable checkpoint that it follows must still exist: a user who removes
1000 to go back to 500 does not want 1050. It is removed once a newer durable one is complete, and when the run ends
normally.

A checkpoint in parts is complete if machines of the run hold all its parts; they may be other machines than before.
They then copy the parts into `checkpoints_path`, which all machines share, and the run resumes from the durable
checkpoint 1050. If a machine is lost, so is its part, and the run resumes from 1000.
"""

import os
import re
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from kenotron.checkpoint import durable, leftovers
from kenotron.checkpoint.durable import FileRecord, hash_file, refusing
from kenotron.checkpoint.folders import CheckpointFolder, Report, check_files, list_checkpoints, share_of
from kenotron.checkpoint.saving import commit, in_order
from kenotron.config import Config
from kenotron.config.errors import CheckpointError, first_of, os_errors
from kenotron.parallel.ranks import describe, gather, raise_on_any_rank, rank_and_size, run_on_rank0
from kenotron.storage.files import remove_leftovers, temporary_beside

FOLLOWS, SAVE = "durable_step", "save"
"""Keys in the state of a local checkpoint: the step of the newest durable one before it, 0 if there was none; and for
parts, a value that the parts of one save share."""

PART = re.compile(r"(\d+)of(\d+)")


def machine_of_each(ranks: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    """Return each rank's machine, from (host name, local rank); one host may stand for several machines.

    >>> machine_of_each([("a", 0), ("a", 1), ("b", 0), ("b", 1)])      # torchrun
    (0, 0, 1, 1)
    >>> machine_of_each([("a", 0), ("b", 0), ("a", 1), ("b", 1)])      # srun --distribution=cyclic
    (0, 1, 0, 1)
    >>> machine_of_each([("a", 0), ("a", 0)])                          # two of torchrun on one host
    (0, 1)
    """
    newest: dict[str, int] = {}
    numbers = []
    for host, local_rank in ranks:
        if local_rank == 0 or host not in newest:
            newest[host] = max(newest.values(), default=-1) + 1
        numbers.append(newest[host])
    return tuple(numbers)


class Part(NamedTuple):
    """Part `number` of `of` parts of a local checkpoint, in a folder of a machine."""

    machine: int
    number: int
    of: int
    entry: CheckpointFolder

    @property
    def save(self) -> tuple[int, int, str | float]:
        """Return a key that the parts of one checkpoint share, and no part of another has."""
        manifest = self.entry.manifest
        if manifest is None:
            return self.entry.step, self.of, ""
        return self.entry.step, self.of, manifest.saved_at if self.of == 1 else manifest.state.get(SAVE, "")


class LocalTier:
    """The local checkpoints of a run. All ranks call every method at the same time, except `remove`.

    `machine_of_rank` has the number of each rank's machine. The first rank of a machine manages its folder. `root`, set
    by `newest`, is the folder that this rank saves them in, the same for all ranks of a machine.
    """

    def __init__(self, config: Config, machine_of_rank: Sequence[int], warn: Report, say: Report) -> None:
        self.config, self.warn, self.say = config, warn, say
        rank = rank_and_size()[0]
        self.machine, self.machines = machine_of_rank[rank], max(machine_of_rank) + 1
        self.ranks = [other for other, machine in enumerate(machine_of_rank) if machine == self.machine]
        self.is_first = rank == self.ranks[0]
        self.run_folder = self.root = Path()
        self.removal = Thread()

    # ---- before the first step ---------------------------------------------------------------------------------

    def newest(self, durable_one: Path | None) -> Path | None:
        """Return the run's local checkpoint if it is complete and ahead of `durable_one`, the newest durable one.

        If it is in parts, it is first copied into a durable one. Other local ones are removed. Raises InputError if the
        folder cannot be created, and CheckpointError if the parts cannot be copied.
        """
        self._open()
        chosen = self._newest_complete()
        if chosen and not run_on_rank0(lambda: self._counts(chosen[0].entry, durable_one)):
            chosen = []
        newest = None
        if chosen:
            newest = chosen[0].entry.path if chosen[0].of == self.machines == 1 else self._make_durable(chosen)
        self._on_each_machine(lambda: self._remove([folder for folder in self._folders() if folder != newest]))
        return newest

    def forget(self) -> None:
        """Remove the run's local checkpoints and give it a new id, so that those on other machines do not count."""
        self._open()
        found = any(gather(bool(self._folders())))
        self.close()
        if found:
            self.warn(f"--fresh: the local checkpoints in {self.run_folder} were removed")
        run_on_rank0(lambda: durable.new_run_id(self.config.checkpoint_folder))

    # ---- while the run trains ----------------------------------------------------------------------------------

    def state(self, durable_step: int) -> dict[str, int | str]:
        """Return the state that a local checkpoint has in addition to a durable one's."""
        token = run_on_rank0(lambda: secrets.token_hex(8)) if self.machines > 1 else ""
        return {FOLLOWS: durable_step} | ({SAVE: token} if token else {})

    def saved(self, step: int) -> None:
        """Remove earlier local checkpoints, after the save of `step` is complete on all machines."""
        if not self.is_first:
            return
        try:
            self._remove([folder for folder in self._folders() if folder.name != str(step)])
        except OSError as error:  # others go on
            self.warn(f"checkpoints.local.path: {describe(error)}")

    def remove(self) -> None:
        """Remove the run's local checkpoints; their names vanish at once, their bytes soon after."""
        if self.is_first:
            self._remove([self.run_folder])

    def close(self) -> None:
        """As `remove`, but wait until all bytes are removed; called when the run has ended or begins afresh."""
        self.remove()
        self._wait()

    # ---- local checkpoints on the machines ---------------------------------------------------------------------

    def _open(self) -> None:
        """Set the folders' names; on each machine create the run's, and clear what killed processes left there."""
        name = run_on_rank0(lambda: durable.run_id(self.config.checkpoint_folder))
        assert name is not None, "the run has no id: Checkpoints.start is called while its folder is held"
        self.run_folder = _run_folder(self.config, name)
        one = self.machines == 1
        self.root = self.run_folder if one else self.run_folder / f"{self.machine}of{self.machines}"

        def tidy() -> None:
            with os_errors(f"checkpoints.local.path: cannot create {self.run_folder}"):  # now, not later
                self.run_folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.run_folder)
            for root, _, _ in self._roots():
                leftovers.tidy(root, self.warn)

        self._on_each_machine(tidy)

    def _roots(self) -> Iterator[tuple[Path, int, int]]:
        """Yield (folder, number of the part, number of parts) for this machine's folders of checkpoints or parts."""
        yield self.run_folder, 0, 1
        for path in sorted(self.run_folder.iterdir()) if self.run_folder.is_dir() else ():
            if match := PART.fullmatch(path.name):
                yield path, int(match[1]), int(match[2])

    def _folders(self) -> list[Path]:
        return [entry.path for root, _, _ in self._roots() for entry in list_checkpoints(root)]

    def _newest_complete(self) -> list[Part]:
        """Return the parts of the intact checkpoint that was saved last; empty if there is none."""
        here = [
            Part(self.machine, number, of, entry)
            for root, number, of in (self._roots() if self.is_first else ())
            for entry in list_checkpoints(root)
        ]
        saves = defaultdict(list)
        for part in (part for parts in gather(here) for part in parts):
            saves[part.save].append(part)
        for parts in sorted(saves.values(), key=_order, reverse=True):
            problems = list(zip(parts, self._problems(parts), strict=True))
            intact = {part.number: part for part, lines in problems if not lines}
            if len(intact) == parts[0].of:
                return [intact[number] for number in range(parts[0].of)]
            lost = next(number for number in range(parts[0].of) if number not in intact)
            found = [line for part, lines in problems if part.number == lost for line in lines]
            why = first_of(found) if found else f"no machine has its part {lost} of {parts[0].of}"
            self.warn(f"skipping checkpoint {parts[0].entry.step}: {why}")
        return []

    def _problems(self, parts: list[Part]) -> list[list[str]]:
        """Return the problems of each of `parts`; the ranks of a machine share the reading."""

        def check(part: Part) -> list[str]:
            if part.machine != self.machine:
                return []
            if part.entry.manifest is None:
                return [str(part.entry.problem)]
            return check_files(part.entry.path, share_of(part.entry.manifest.files, self.ranks))

        of_ranks = gather(raise_on_any_rank(lambda: [check(part) for part in parts]))
        return [list(dict.fromkeys(chain(*lines))) for lines in zip(*of_ranks, strict=True)]

    def _counts(self, entry: CheckpointFolder, durable_one: Path | None) -> bool:
        """Return whether the run may continue from the checkpoint that `entry` is, or is a part of."""
        assert entry.manifest is not None
        state, root = entry.manifest.state, self.config.checkpoint_folder
        if durable_one is not None and entry.step <= int(durable_one.name):
            return False
        skipping = f"skipping local checkpoint {entry.path}"
        follows, end = state.get(FOLLOWS, 0), state.get("schedule_start", 0) + self.config.tokens.train_steps
        if follows and not (root / str(follows)).exists():
            self.warn(f"{skipping}: it follows checkpoint {follows}, which is not in {root}")
            return False
        if entry.step >= end:  # tokens.train_steps is lower than it was
            self.warn(f"{skipping}: the run ends at step {end}")
            return False
        return True

    def _make_durable(self, parts: list[Part]) -> Path:
        """Copy `parts` into checkpoints_path as one checkpoint, and return it when all ranks see it."""
        final = self.config.checkpoint_folder / str(parts[0].entry.step)
        manifests = [part.entry.manifest for part in parts if part.entry.manifest]
        files = in_order([manifest.files for manifest in manifests])
        state = {key: value for key, value in manifests[0].state.items() if key not in (FOLLOWS, SAVE)}
        self.say(f"Copying the parts of the local checkpoint of step {final.name} to {final}")
        temporary = run_on_rank0(lambda: temporary_beside(final))

        def copy() -> None:
            for part, manifest in zip(parts, manifests, strict=True):
                if part.machine == self.machine:
                    _copy(part.entry.path, temporary, share_of(manifest.files, self.ranks))

        raise_on_any_rank(copy)
        run_on_rank0(lambda: commit(temporary, final, state, files))
        return final

    # ---- removal -----------------------------------------------------------------------------------------------

    def _on_each_machine(self, work: Callable[[], None]) -> None:
        """Run `work` on the first rank of every machine."""
        raise_on_any_rank(lambda: work() if self.is_first else None)

    def _remove(self, folders: list[Path]) -> None:
        """Rename `folders`, which is quick, and remove their files while training continues."""
        self._wait()
        trash = [folder.with_name(f".trash-{folder.name}-{secrets.token_hex(4)}") for folder in folders]
        for folder, aside in zip(folders, trash, strict=True):
            with suppress(OSError):  # it is gone, or another machine that shares the folder was faster
                os.rename(folder, aside)
        self.removal = Thread(target=_remove_trees, args=(trash,))
        self.removal.start()

    def _wait(self) -> None:
        if self.removal.ident:  # it was started
            self.removal.join()


def run_folders(config: Config) -> list[Path]:
    """Return the folders in which a run on one machine has checkpoints."""
    name = durable.run_id(config.checkpoint_folder)
    more = [] if config.checkpoints.local is None or name is None else [_run_folder(config, name)]
    return [config.checkpoint_folder, *more]


def _run_folder(config: Config, name: str) -> Path:
    assert config.checkpoints.local is not None
    return Path(config.checkpoints.local.path) / f"run-{name}"


def _copy(source: Path, target: Path, files: dict[str, FileRecord]) -> None:
    """Copy and sync `files` from one folder to another. Raises CheckpointError if they differ from their records."""
    with refusing("save", target):
        for name, record in files.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
            if hash_file(target / name, sync=True) != record:
                raise CheckpointError(f"{target / name} is not what {source / name} was when it was written")


def _remove_trees(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _order(parts: list[Part]) -> tuple[int, int, float]:
    """Return a sort key that is greater for later saves, although the clocks of machines differ."""
    found = (part.entry.manifest for part in parts if part.entry.manifest)
    return max(((each.state.get(FOLLOWS, 0), each.step, each.saved_at) for each in found), default=(0, 0, 0.0))
