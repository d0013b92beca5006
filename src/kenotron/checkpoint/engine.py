"""Checkpoint engines write a state from memory to disk; they differ in how long training waits.

    checkpoints.checkpointing_engine: torch          written in the call
                                      async          copied in the call, written in the background
                                      datastates     copied and written in the background
                                      my.Engine      a subclass of `Engine`; also an entry point of `GROUP`

    save ──▶ forward, backward ──▶ fence ──▶ update ──▶ …          a background engine copies between save and fence

All engines write the same files, byte for byte.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kenotron.checkpoint.file_writer import OpenFile
from kenotron.config import Config
from kenotron.config.dotted import import_registered
from kenotron.config.errors import InputError

KEY = "checkpoints.checkpointing_engine"
GROUP = "kenotron.checkpoint_engines"
BUILT_IN = {
    "torch": "kenotron.checkpoint.engines.synchronous.SynchronousEngine",
    "async": "kenotron.checkpoint.engines.background.AsyncEngine",
    "datastates": "kenotron.checkpoint.engines.background.DataStatesEngine",
}


WRITERS = {"python": "kenotron.checkpoint.durable.HashedFile", "native": "kenotron.checkpoint.native.NativeFile"}


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on the disk: its folder, its size, and the seconds that the save took.

    `waited`: the seconds in which training waited; None if it waited for the whole save. `notes`: problems that
    occurred afterwards.
    """

    path: Path
    bytes: int
    seconds: float
    waited: float | None = None
    notes: tuple[str, ...] = ()


class Keep(NamedTuple):
    """The checkpoints that retention keeps: the `last` saved ones (None: all), and some others.

    The others are steps that are multiples of `every`, steps in `protected`, and with `best` the step with the lowest
    validation loss.
    """

    last: int | None = None
    every: int | None = None
    protected: frozenset[int] = frozenset()
    best: bool = False


KEEP_ALL = Keep()


@dataclass(frozen=True)
class Unsaved:
    """A checkpoint that could not be written in the background, and why. Earlier ones are unchanged."""

    path: Path
    problem: str


class Engine:
    """The base class; it saves in the call. All ranks call methods together, except `settled` and `close`."""

    in_flight = False
    """Whether a save has begun whose outcome has not been returned yet; the same on all ranks."""

    in_background = False
    """Whether saves continue while the run trains; work that follows a save should then, too."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.open_file = find_writer(config.checkpoints.writer)

    def save(self, root: Path, step: int, content: dict[str, Any], keep: Keep | None) -> list[Saved | Unsaved]:
        """Save `content`, the keyword arguments of `checkpoint.save`, as step `step` in `root`; prune to `keep`.

        `root` may differ between ranks, as in `checkpoint.save`; `keep` is None then.

        Returns the saves that have completed or failed since the last call. Raises CheckpointError.
        """
        raise NotImplementedError

    def fence(self) -> None:
        """Wait until the state of the last save has been copied, so that weights and optimizer may change."""

    def settled(self) -> bool:
        """Return whether this rank's share of the save in flight is finished; once all are, `collect` does not wait."""
        return True

    def collect(self) -> list[Saved | Unsaved]:
        """Wait for the save in flight, and return its outcome."""
        return []

    def finish_alone(self, hurried: bool) -> list[Saved | Unsaved]:
        """Finish the save in flight as far as this rank can without the others, because the run fails.

        `hurried`: another rank has failed, and this process will be ended within seconds.
        """
        return []

    def close(self) -> None:
        """Release processes and memory; a save in flight is aborted."""

    @property
    def verifies(self) -> bool:
        """Whether a checkpoint is read back before earlier ones are pruned."""
        return not self.config.general.ignore_sanity_checks


def find_writer(name: str) -> OpenFile:
    """Return the writer that `checkpoints.writer: name` names. Raises InputError if there is none."""
    found = import_registered(WRITERS.get(name, name), "checkpoints.writer", "kenotron.checkpoint_writers", WRITERS)
    if not callable(found):
        raise InputError(f"checkpoints.writer: expected a function of path and size, found '{name}'")
    return found


def find_engine(name: str) -> type[Engine]:
    """Return the class that `checkpoints.checkpointing_engine: name` names. Raises InputError if there is none."""
    found = import_registered(BUILT_IN.get(name, name), KEY, GROUP, BUILT_IN)
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise InputError(f"{KEY}: expected a subclass of kenotron.checkpoint.engine.Engine, found '{name}'")
    return found
