"""What a mutant is: one place in one file, its replacement, and the tests that have to fail on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = "src/kenotron"


class DoesNotApply(Exception):
    """The code that the mutant changes has moved on."""


@dataclass(frozen=True)
class Mutant:
    """A bug as a patch.

    `file` is below ``src/kenotron``; `find` occurs in it exactly once and is replaced by `replace`. `why` is the bug in
    one line. `tests` are what pytest is given, below ``tests``: the narrowest files, or tests in them (``file::test``),
    that the quick tier holds against it.
    """

    name: str
    file: str
    find: str
    replace: str
    why: str
    tests: tuple[str, ...]

    def patched(self, root: Path = ROOT) -> str:
        """The whole text of the file with the bug in it.

        Errors (DoesNotApply): no such file, or `find` is not there exactly once.
        """
        path = root / SOURCE / self.file
        if not path.is_file():
            raise DoesNotApply(f"mutant {self.name} no longer applies: no file {SOURCE}/{self.file}")
        text = path.read_text()
        count = text.count(self.find)
        if count != 1:
            raise DoesNotApply(
                f"mutant {self.name} no longer applies: expected its text once in {SOURCE}/{self.file}, found it "
                f"{count} times: {self.find!r}"
            )
        return text.replace(self.find, self.replace)

    @property
    def targets(self) -> list[str]:
        """Its tests as pytest takes them at the root of the repository."""
        return [f"tests/{test}" for test in self.tests]


@dataclass(frozen=True)
class NotCounted:
    """A bug of the same kind that no test on a CPU can reach, and why that is so."""

    name: str
    file: str
    why: str
