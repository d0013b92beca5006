"""What a mutant is: one place in one file, its replacement, and the tests that have to fail on it."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

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

        Raises DoesNotApply: no such file, or `find` is not there exactly once.
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

    @contextmanager
    def in_this_process(self, root: Path = ROOT) -> Iterator[None]:
        """The bug in the functions of the loaded module, wherever they have been imported to, until the end.

        Raises DoesNotApply: besides those of `patched`, the bug is outside of the functions and methods of the file.
        """
        module = importlib.import_module("kenotron." + self.file.removesuffix(".py").replace("/", "."))
        before, after = (_functions(text) for text in ((root / SOURCE / self.file).read_text(), self.patched(root)))
        changed = [name for name in before if after.get(name) != before[name]]
        if not changed:
            raise DoesNotApply(f"mutant {self.name} changes no function of {SOURCE}/{self.file}")
        codes = _codes(compile(self.patched(root), f"<{self.name}>", "exec"))
        kept = []
        try:
            for name in changed:
                function = _resolve(module, name)
                kept.append((function, function.__code__))
                function.__code__ = codes[name]
            yield
        finally:
            for function, code in kept:
                function.__code__ = code

    @property
    def targets(self) -> list[str]:
        """Its tests as pytest takes them at the root of the repository."""
        return [f"tests/{test}" for test in self.tests]


def _functions(text: str) -> dict[str, str]:
    """Qualified name → syntax of every function of a module and method of its classes."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                yield prefix + node.name, ast.dump(node)
            elif isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")

    return dict(walk(ast.parse(text).body, ""))


def _codes(code: CodeType) -> dict[str, CodeType]:
    """Qualified name → code of everything that is defined in `code`."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return {each.co_qualname: each for each in inner} | {k: v for each in inner for k, v in _codes(each).items()}


def _resolve(module: Any, name: str) -> Any:
    """The function of a qualified name, without decorators."""
    *classes, last = name.split(".")
    for each in classes:
        module = getattr(module, each)
    found = inspect.getattr_static(module, last)
    if isinstance(found, property):
        found = found.fget
    return inspect.unwrap(getattr(found, "__func__", found))


@dataclass(frozen=True)
class NotCounted:
    """A bug of the same kind that no test on a CPU can reach, and why that is so."""

    name: str
    file: str
    why: str
