"""`checkpoints.local`: frequent checkpoints on the machines' own disks or in their memory, beside the durable ones.

    checkpoints/my_run/.run                              3f9c0a1b5d2e7788: the run's id
    checkpoints/my_run/1000/                             durable: in `checkpoints_path`
    /dev/shm/kenotron/run-3f9c0a1b5d2e7788/1050/         local: the same files, the newest alone
    /dev/shm/kenotron/run-3f9c0a1b5d2e7788/1of4/1050/    of several machines: the part that the ranks of machine 1 wrote

A run resumes from its local checkpoint if that is ahead of the newest durable one. It is found by the run's id, which
is new in a new folder and after --fresh; and the durable checkpoint that it follows must still exist: whoever removes
1000 to go back to 500 does not want 1050. Once a newer durable one is complete, and when the run ends normally, it is
removed.

A checkpoint in parts is complete if machines of the run hold all its parts, whichever machines those are now. Each
machine then puts together a folder that looks like the whole: links to the files of its parts, and of the other files
those that its ranks read, which other machines send it.

    run-3f9c0a1b5d2e7788/loading-0of4/1050/model/rank0.safetensors ─▶ ../../../0of4/1050/model/rank0.safetensors
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from kenotron.checkpoint import durable, leftovers
from kenotron.checkpoint.folders import Report, check_files, first_of, list_checkpoints, share_of
from kenotron.checkpoint.machines import Machines
from kenotron.checkpoint.manifest import MANIFEST, Manifest, render
from kenotron.config.errors import CheckpointError, InputError, counted
from kenotron.parallel.ranks import describe, gather, raise_on_any_rank, run_on_rank0
from kenotron.storage.files import remove_leftovers

if TYPE_CHECKING:
    from kenotron.config import Config

FOLLOWS, SAVE = "durable_step", "save"
"""In the state of a local checkpoint: the step of the newest durable one before it, 0 if there was none; and, in that
of each part, what the parts of one save have in common."""

PART = re.compile(r"(\d+)of(\d+)")


@dataclass(frozen=True)
class Part:
    """Part `number` of `of` of a local checkpoint, in `folder` of a machine. `problem`: why it does not count."""

    machine: int
    number: int
    of: int
    step: int
    folder: Path
    manifest: Manifest | None = field(compare=False)
    problem: str | None

    @property
    def save(self) -> tuple[int, int, str | float]:
        """What it has in common with the other parts of its checkpoint, and with no part of another."""
        if self.manifest is None:
            return self.step, self.of, ""
        return self.step, self.of, self.manifest.saved_at if self.of == 1 else self.manifest.state.get(SAVE, "")


@dataclass
class Loading:
    """A checkpoint in parts that is read: which machines hold each file, and which have it in their folder."""

    folder: Path
    records: dict[str, durable.FileRecord]
    holders: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))


class LocalTier:
    """The local checkpoints of a run. All ranks call every method at the same time, except `remove`.

    root: where this rank saves them; those of one machine have the same. Known after `newest`.
    """

    def __init__(self, config: Config, machines: Machines, warn: Report, say: Report) -> None:
        assert config.checkpoints.local is not None
        self.config, self.machines, self.warn, self.say = config, machines, warn, say
        self.copies = config.checkpoints.local.copy_to_next_machine and machines.count > 1
        self.run_folder = self.root = Path()
        self.loading: Loading | None = None
        self.newest_step: int | None = None
        self.copied_step: int | None = None
        self.removal, self.copy = Thread(), Thread()
        self.problem: str | None = None  # of the last copy

    # ---- before the first step ---------------------------------------------------------------------------------

    def newest(self, durable_one: Path | None) -> Path | None:
        """The run's local checkpoint if it is complete and ahead of `durable_one`, the newest durable one.

        Any other local one is removed. Raises InputError if the folder cannot be made.
        """
        self._open()
        chosen = self._newest_complete()
        if chosen and not run_on_rank0(lambda: self._counts(chosen[0], durable_one)):
            chosen = []
        kept = {part.folder for part in chosen if part.machine == self.machines.number}
        self._on_each_machine(lambda: self._remove([folder for folder in self._folders() if folder not in kept]))
        if not chosen:
            return None
        self.newest_step = chosen[0].step
        if chosen[0].of == self.machines.count == 1:
            return chosen[0].folder
        return self._put_together(chosen)

    def forget(self) -> None:
        """Remove the run's local checkpoints and give it a new id, so that none elsewhere counts."""
        self._open()
        found = any(gather(bool(self._folders())))
        self.remove()
        self._wait(self.removal)
        if found:
            self.warn(f"--fresh: the local checkpoints in {self.run_folder} were removed")
        run_on_rank0(lambda: durable.new_run_id(self.config.checkpoint_folder))

    def fetch(self, names: set[str]) -> None:
        """If `newest` found parts, get those of the files `names`, which this rank reads, that its machine lacks."""
        if (loading := self.loading) is None:
            return
        wanted: dict[str, set[int]] = defaultdict(set)
        for rank, of_rank in enumerate(gather(names)):
            for name in of_rank:
                wanted[name].add(self.machines.of_rank[rank])
        missing = {name: to - loading.holders[name] for name, to in wanted.items()}
        missing = {name: missing[name] for name in sorted(missing) if missing[name]}
        if missing:
            size = sum(loading.records[name].bytes for name in missing) / 2**20
            self.say(f"Fetching {counted(len(missing), 'file')} of {loading.folder}, {size:.1f} MiB, between machines")
        for name, to in missing.items():
            self.machines.send(loading.folder / name, loading.records[name], min(loading.holders[name]), to)
            loading.holders[name] |= to

    def loaded(self) -> None:
        """The checkpoint that `newest` returned has been read."""
        if (loading := self.loading) is not None:
            gather(None)  # by all ranks
            self._on_each_machine(lambda: shutil.rmtree(loading.folder.parent))
            self.loading = None

    # ---- while the run trains ----------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether a save may begin; not while a machine copies the last one."""
        if not self.copies:
            return True
        copying, problems = zip(*gather((self.copy.is_alive(), self.problem)), strict=True)
        if any(copying):
            return False
        for problem in sorted({*filter(None, problems)}):
            self.warn(f"local checkpoint {self.newest_step} has no copy on the next machine: {problem}")
        if not any(problems):
            self.copied_step = self.newest_step
        self.problem = None
        self._keep_newest()
        return True

    def state(self, durable_step: int) -> dict[str, int | str]:
        """What the manifest of a local checkpoint says in addition to a durable one's."""
        token = run_on_rank0(lambda: secrets.token_hex(8)) if self.machines.count > 1 else ""
        return {FOLLOWS: durable_step} | ({SAVE: token} if token else {})

    def saved(self, step: int) -> None:
        """A save is complete on all machines: those before it go, or the machines copy it first."""
        self.newest_step = step
        if not self.copies:
            self._keep_newest()
            return
        folder = self.root / str(step)
        first, _ = self.machines.is_first, self.machines.group
        try:
            text = raise_on_any_rank(lambda: (folder / MANIFEST).read_bytes() if first else b"")
        except (CheckpointError, OSError) as error:  # on all ranks
            self.problem = describe(error)
            return
        if first:  # no daemon: the interpreter's end would abort a thread that is in gloo, and the exit code be lost
            self.copy = Thread(target=self._copy, args=(folder, text))
            self.copy.start()

    def remove(self) -> None:
        """Remove the run's local checkpoints: they are gone at once, their bytes soon after."""
        self.newest_step = self.copied_step = None
        if self.machines.is_first:
            self._remove([self.run_folder])

    def close(self) -> None:
        """The run has ended normally: wait for background work, and remove everything."""
        self._wait(self.copy)
        self.remove()
        self._wait(self.removal)

    # ---- what the machines hold --------------------------------------------------------------------------------

    def _open(self) -> None:
        """Find the folders' names; on each machine make the run's, and clear what killed processes left there."""
        name = run_on_rank0(lambda: durable.run_id(self.config.checkpoint_folder))
        assert name is not None, "the run has no id: choose_start is called in own_folder"
        self.run_folder = _run_folder(self.config, name)
        self.root = self._part_folder(self.machines.number)

        def tidy() -> None:
            try:  # now, not after the first steps
                self.run_folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(
                    f"checkpoints.local.path: cannot create {self.run_folder}: {error.strerror}"
                ) from error
            remove_leftovers(self.run_folder)
            for left in self.run_folder.glob("loading-*"):
                shutil.rmtree(left, ignore_errors=True)
            for root, _, _ in self._roots():
                leftovers.tidy(root, self.warn)

        self._on_each_machine(tidy)

    def _part_folder(self, machine: int) -> Path:
        count = self.machines.count
        return self.run_folder if count == 1 else self.run_folder / f"{machine}of{count}"

    def _roots(self) -> Iterator[tuple[Path, int, int]]:
        """The folders on this machine that have checkpoints or parts, with the part's number and of how many."""
        yield self.run_folder, 0, 1
        for path in sorted(self.run_folder.iterdir()) if self.run_folder.is_dir() else ():
            if match := PART.fullmatch(path.name):
                yield path, int(match[1]), int(match[2])

    def _folders(self) -> list[Path]:
        return [entry.path for root, _, _ in self._roots() for entry in list_checkpoints(root)]

    def _newest_complete(self) -> list[Part]:
        """The parts, intact to the last byte, of the checkpoint that was saved last; empty: there is none."""
        machine = self.machines.number
        here = [
            Part(machine, number, of, entry.step, entry.path, entry.manifest, entry.problem)
            for root, number, of in (self._roots() if self.machines.is_first else ())
            for entry in list_checkpoints(root)
        ]
        saves = defaultdict(list)
        for part in (part for parts in gather(here) for part in parts):
            saves[part.save].append(part)
        for parts in sorted(saves.values(), key=_order, reverse=True):
            problems = self._problems(parts)
            intact = {part.number: part for part in parts if part not in problems}
            if len(intact) == parts[0].of:
                return [part for part in parts if part not in problems]
            lost = next(number for number in range(parts[0].of) if number not in intact)
            told = [line for part in parts if part.number == lost for line in problems.get(part, ())]
            why = first_of(told) if told else f"no machine has its part {lost} of {parts[0].of}"
            self.warn(f"skipping checkpoint {parts[0].step}: {why}")
        return []

    def _problems(self, parts: list[Part]) -> dict[Part, list[str]]:
        """What is wrong with those of `parts` that are not intact; the ranks of a machine share the reading."""
        ranks = self.machines.ranks(self.machines.number)

        def check(part: Part) -> list[str]:
            if part.machine != self.machines.number:
                return []
            if part.manifest is None:
                return [str(part.problem)]
            return check_files(part.folder, share_of(part.manifest.files, ranks))

        of_ranks = gather(raise_on_any_rank(lambda: [check(part) for part in parts]))
        found = {part: list(dict.fromkeys(chain(*lines))) for part, *lines in zip(parts, *of_ranks, strict=True)}
        return {part: lines for part, lines in found.items() if lines}

    def _counts(self, part: Part, durable_one: Path | None) -> bool:
        """Whether the run continues from the checkpoint of `part`."""
        assert part.manifest is not None
        state, root = part.manifest.state, self.config.checkpoint_folder
        if durable_one is not None and part.step <= int(durable_one.name):
            return False
        follows, end = state.get(FOLLOWS, 0), state.get("schedule_start", 0) + self.config.tokens.train_steps
        if follows and not (root / str(follows)).exists():
            self.warn(
                f"skipping local checkpoint {part.folder}: it follows checkpoint {follows}, which is not in {root}"
            )
            return False
        if part.step >= end:  # tokens.train_steps is lower than it was
            self.warn(f"skipping local checkpoint {part.folder}: the run ends at step {end}")
            return False
        return True

    def _put_together(self, parts: list[Part]) -> Path:
        """This machine's folder of the checkpoint: with all its files but those of tensors, which `fetch` adds."""
        step, of, _ = parts[0].save
        folder = self.run_folder / f"loading-{self.machines.number}of{self.machines.count}" / str(step)
        manifests = {part.number: part.manifest for part in parts if part.manifest}
        records = {name: record for number in range(of) for name, record in manifests[number].files.items()}
        self.loading = Loading(folder, records)
        for part in parts:
            for name in manifests[part.number].files:
                self.loading.holders[name].add(part.machine)

        def link() -> None:
            shutil.rmtree(folder.parent, ignore_errors=True)
            for part in (part for part in parts if part.machine == self.machines.number):
                for name in manifests[part.number].files:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    with suppress(FileExistsError):  # two copies of one part, in a folder that machines share
                        os.symlink((part.folder / name).absolute(), folder / name)
            folder.mkdir(parents=True, exist_ok=True)
            whole = Manifest(step, manifests[0].saved_at, manifests[0].state, records)
            durable.write_file(folder / MANIFEST, render(whole))

        self._on_each_machine(link)
        self.fetch({name for name in records if not name.endswith(".safetensors")})
        return folder

    # ---- removal and copies ------------------------------------------------------------------------------------

    def _on_each_machine(self, work: Callable[[], None]) -> None:
        """Run `work` on the first rank of every machine."""
        raise_on_any_rank(lambda: work() if self.machines.is_first else None)

    def _keep_newest(self) -> None:
        if not self.machines.is_first:
            return
        kept = {str(self.newest_step), str(self.copied_step)}
        try:
            self._remove([folder for folder in self._folders() if folder.name not in kept])
        except OSError as error:  # others go on
            self.warn(f"checkpoints.local.path: {describe(error)}")

    def _remove(self, folders: list[Path]) -> None:
        """Rename `folders`, which takes no time, and remove their files while training continues."""
        self._wait(self.removal)
        trash = [folder.with_name(f".trash-{folder.name}-{secrets.token_hex(4)}") for folder in folders]
        for folder, aside in zip(folders, trash, strict=True):
            with suppress(OSError):  # there is none, or another machine that shares the folder was faster
                os.rename(folder, aside)
        self.removal = Thread(target=_remove_trees, args=(trash,))
        self.removal.start()

    def _copy(self, folder: Path, text: bytes) -> None:
        """In a thread: send this machine's part to the next machine, and receive that of the one before."""
        before = (self.machines.number - 1) % self.machines.count
        target = self._part_folder(before) / folder.name
        try:
            problem = self.machines.pass_on(folder, text, target)
        except (RuntimeError, CheckpointError, OSError) as error:  # of gloo: another machine is lost
            problem = describe(error)
        self.problem = problem if self.newest_step == int(folder.name) else None  # it was removed meanwhile

    @staticmethod
    def _wait(thread: Thread) -> None:
        if thread.ident:  # it was started
            thread.join()


def run_folders(config: Config) -> list[Path]:
    """The folders in which a run on one machine has checkpoints."""
    name = durable.run_id(config.checkpoint_folder)
    more = [] if config.checkpoints.local is None or name is None else [_run_folder(config, name)]
    return [config.checkpoint_folder, *more]


def _run_folder(config: Config, name: str) -> Path:
    assert config.checkpoints.local is not None
    return Path(config.checkpoints.local.path) / f"run-{name}"


def _remove_trees(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _order(parts: list[Part]) -> tuple[int, int, float]:
    """Of two saves, the later one's is greater; the clocks of machines differ."""
    found = (part.manifest for part in parts if part.manifest)
    return max(((each.state.get(FOLLOWS, 0), each.step, each.saved_at) for each in found), default=(0, 0, 0.0))
