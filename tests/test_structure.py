"""No file grows beyond what can be read in one go, and files import downward."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from support.tiny_run import REPOSITORY

LINES = 600
PAGE_LINES = 250
REFERENCES = {"benchmarks.md", "commands.md", "config-reference.md"}  # looked up, not read through


def dotted(path: Path) -> str:
    """The module of a file in src."""
    return ".".join(path.relative_to(REPOSITORY / "src").with_suffix("").parts).removesuffix(".__init__")


MODULES = {dotted(path): path for path in (REPOSITORY / "src" / "kenotron").rglob("*.py")}


@pytest.mark.parametrize("folder", ["src", "tests"])
def test_no_file_is_longer_than_six_hundred_lines(folder: str) -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (REPOSITORY / folder).rglob("*.py")}
    assert lengths
    assert {str(path): length for path, length in lengths.items() if length > LINES} == {}


def test_no_page_is_longer_than_it_may_be() -> None:
    """README, the changelog, and the pages of docs/ that one reads from top to bottom."""
    limits = {"README.md": 130, "CHANGELOG.md": 80}
    pages = [path.name for path in (REPOSITORY / "docs").glob("*.md")]
    assert set(pages) > REFERENCES
    limits |= {f"docs/{name}": PAGE_LINES for name in pages if name not in REFERENCES}
    lengths = {name: len((REPOSITORY / name).read_text(encoding="utf-8").splitlines()) for name in limits}
    assert {name: length for name, length in lengths.items() if length > limits[name]} == {}


def test_a_model_family_is_a_short_file() -> None:
    """At most 150 lines, without blank ones, comments and docstrings."""
    families = list((REPOSITORY / "src" / "kenotron" / "models" / "families").glob("*.py"))
    assert len(families) > 16
    assert {path.name: lines for path in families if (lines := lines_of_code(path.read_text())) > 150} == {}


def test_a_package_that_lists_its_modules_lists_all_of_them() -> None:
    unlisted = []
    for package in sorted((REPOSITORY / "src" / "kenotron").rglob("__init__.py")):
        listed = ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) or ""
        modules = [path.stem for path in package.parent.glob("*.py") if path != package]
        named = [module for module in modules if re.search(rf"\b{module}\.py", listed)]
        if len(named) > len(modules) / 2:
            unlisted += [f"{package.parent.name}/{module}.py" for module in modules if module not in named]
    assert not unlisted


@pytest.mark.parametrize(("folder", "bound"), [("src", 36_000), ("tests", 42_000)])
def test_the_package_and_its_tests_stay_small(folder: str, bound: int) -> None:
    """Lines of code, without blank ones, comments and docstrings: what enters pays for itself by what goes."""
    assert sum(lines_of_code(path.read_text()) for path in (REPOSITORY / folder).rglob("*.py")) <= bound


def lines_of_code(source: str) -> int:
    stripped = enumerate(map(str.strip, source.split("\n")), start=1)
    lines = {number for number, line in stripped if line and not line.startswith("#")}
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno != node.lineno:
            lines |= {*range(node.lineno, (node.end_lineno or 0) + 1)}  # of a text every line counts
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            docstrings |= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return len(lines - docstrings)


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count; those under TYPE_CHECKING do not."""
    imports = {module: imported_by(module) for module in MODULES}
    try:
        list(TopologicalSorter(imports).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_imports_leave_heavy_libraries_and_drivers_alone_until_they_are_needed() -> None:
    a_path = "from kenotron.storage.paths import as_path; as_path('here')"
    drivers = {f"kenotron.storage.{name}" for name in ("fsspec_storage", "fetching", "blocks", "drivers")}
    steps = {
        "import sys, kenotron": {"torch", "pydantic", "numpy", "transformers"},
        "import kenotron.data, kenotron.text.documents": {"torch", "datasets", "transformers"},
        f"import kenotron.training; {a_path}": drivers,
    }
    code = "\n".join(f"{step}; print({absent} & sys.modules.keys())" for step, absent in steps.items())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["set()"] * 3


def test_what_has_to_be_read_to_understand_a_training_run_stays_small() -> None:
    """The measure of docs/architecture.md: the lines of what `kenotron.training` imports, `__init__` files included."""
    found, pending = {"kenotron"}, {"kenotron.training"}  # the front door counts; it imports everything
    while pending:
        module = pending.pop()
        found.add(module)
        packages = {package for package in MODULES if module.startswith(f"{package}.")}
        pending |= (imported_by(module) | packages) - found
    assert sum(len(MODULES[module].read_text().splitlines()) for module in found) <= 17_000


@cache
def imported_by(module: str) -> set[str]:
    """The modules of the package that the file of `module` imports."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(MODULES[module].read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & MODULES.keys()
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & MODULES.keys() if names <= MODULES.keys() else {node.module}
        pending += ast.iter_child_nodes(node)
    return found - {module}
