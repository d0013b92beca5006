"""Runs behind the table of every_key.py, each config built or trained at most once.

    runs = Runs(shared, make_folder)
    runs.seen(tokens, TEXT)                # builds the run and opens its data: nothing is trained
    runs.seen(last_loss, TEXT)             # trains 3 steps, without checkpoints
    runs.seen(checkpoints, TEXT)           # trains, with the checkpoints of step 0 and of the end

The effect of a key is read from the cheapest of the three that shows it: `BUILT` and `SAVED` of every_key.py say which.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kenotron.parallel.mesh import Mesh
from support.every_key import BUILT, SAVED, Outcome
from support.layout_runs import prepared
from support.tiny_run import tiny_config, train_and_listen

Look = Callable[[Outcome], Any]


class Runs:
    """`shared` holds the files that overrides name as {folder}; {here} is a run's folder, made by `make_folder`."""

    def __init__(self, shared: Path, make_folder: Callable[[], Path]) -> None:
        self.shared, self.make_folder = shared, make_folder
        self._trained: dict[tuple[bool, tuple[str, ...]], Outcome] = {}
        self._built: dict[tuple[Look, tuple[str, ...]], Any] = {}

    def seen(self, look: Look, overrides: tuple[str, ...] = ()) -> Any:
        """What `look` finds in the run of these overrides."""
        if look not in BUILT:
            return look(self.trained(overrides, saved=look in SAVED))
        if (look, overrides) not in self._built:
            self._built[look, overrides] = self._build(look, overrides)
        return self._built[look, overrides]

    def trained(self, overrides: tuple[str, ...] = (), saved: bool = False) -> Outcome:
        """A run to its end; with `saved`, the checkpoints of step 0 and of the last step are on the disk."""
        if (saved, overrides) not in self._trained:
            folder = self.make_folder()
            checkpoints = "checkpoints.save_initial_state=true" if saved else "checkpoints.save_final_state=false"
            config = tiny_config(folder, checkpoints, *self._filled(overrides, folder))
            run, said = train_and_listen(config)
            self._trained[saved, overrides] = Outcome(folder, config, run, said)
        return self._trained[saved, overrides]

    def _build(self, look: Look, overrides: tuple[str, ...]) -> Any:
        folder = self.make_folder()
        config = tiny_config(folder, *self._filled(overrides, folder))
        with prepared(config, Mesh()) as run:
            return look(Outcome(folder, config, run, ""))

    def _filled(self, overrides: tuple[str, ...], here: Path) -> list[str]:
        return [text.replace("{folder}", str(self.shared)).replace("{here}", str(here)) for text in overrides]
