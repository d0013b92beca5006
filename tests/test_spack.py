"""The recipes in spack/, loaded with a stand-in for Spack's packages: no Spack has built them here.

What is checked: they use directives that Spack has, in the layout of its package API 2.0; every requirement of
pyproject.toml is there with the same lower bound; the commands of docs/installing.md name packages and variants that
exist.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import yaml

from support.tiny_run import REPOSITORY

ROOT = REPOSITORY / "spack" / "spack_repo" / "kenotron"
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/package.py"))
DIRECTIVES = ("version", "variant", "depends_on", "conflicts", "license")


class Recipe:
    """What a recipe's directives said: (directive, positional arguments, keywords)."""

    def __init__(self) -> None:
        self.said: list[tuple[str, tuple[str, ...], dict[str, Any]]] = []
        self.defaults: dict[str, Any] = {}
        self.conditions: list[str] = []

    def of(self, directive: str) -> list[tuple[str, dict[str, Any]]]:
        return [(names[0], keywords) for name, names, keywords in self.said if name == directive]

    def needs(self, when: str | None = None) -> list[str]:
        """The specs of `depends_on` under a condition."""
        return [spec for spec, keywords in self.of("depends_on") if keywords.get("when") == when]

    @contextmanager
    def default_args(self, **keywords: Any) -> Iterator[None]:
        before, self.defaults = self.defaults, self.defaults | keywords
        yield
        self.defaults = before

    @contextmanager
    def when(self, condition: str) -> Iterator[None]:
        self.conditions.append(condition)
        yield
        self.conditions.pop()


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[type, Recipe]:
    """The class of a recipe, and what it said."""
    recipe = Recipe()
    spack = ModuleType("spack.package")
    for directive in DIRECTIVES:

        def say(*names: str, directive: str = directive, **keywords: Any) -> None:
            known = recipe.defaults if directive == "depends_on" else {}
            conditions = [*recipe.conditions, keywords["when"]] if "when" in keywords else recipe.conditions
            when = {"when": " ".join(conditions)} if conditions else {}
            recipe.said.append((directive, names, known | keywords | when))

        setattr(spack, directive, say)
    spack.default_args, spack.when = recipe.default_args, recipe.when  # type: ignore[attr-defined]
    modules = {"spack": ModuleType("spack"), "spack.package": spack}
    for system, base in (("python", "PythonPackage"), ("bundle", "BundlePackage")):
        module = ModuleType(f"spack_repo.builtin.build_systems.{system}")
        setattr(module, base, type(base, (), {}))
        modules[module.__name__] = module
    for parent in ("spack_repo", "spack_repo.builtin", "spack_repo.builtin.build_systems"):
        modules[parent] = ModuleType(parent)
    for module_name, module in modules.items():
        monkeypatch.setitem(sys.modules, module_name, module)
    found: dict[str, Any] = {}
    exec((ROOT / "packages" / name / "package.py").read_text(encoding="utf-8"), found)
    return found["".join(part.capitalize() for part in name.split("_"))], recipe


def test_the_repository_is_found_by_its_git_url() -> None:
    index = yaml.safe_load((REPOSITORY / "spack-repo-index.yaml").read_text())
    assert [REPOSITORY / path for path in index["repo_index"]["paths"]] == [ROOT]
    assert yaml.safe_load((ROOT / "repo.yaml").read_text()) == {"repo": {"namespace": "kenotron", "api": "v2.0"}}
    environment = yaml.safe_load((REPOSITORY / "spack" / "spack.yaml").read_text())["spack"]
    assert (REPOSITORY / "spack" / environment["repos"]["kenotron"]).samefile(ROOT)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_recipe_uses_what_spack_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, recipe = load(name, monkeypatch)
    assert kind.__doc__
    assert kind.homepage.startswith("https://github.com/")
    assert recipe.of("version")
    for _, keywords in recipe.of("version"):
        assert keywords.keys() <= {"branch", "tag", "commit", "sha256"}
        assert re.fullmatch(r"[0-9a-f]{64}", keywords.get("sha256", "0" * 64))
    for spec, keywords in recipe.of("depends_on"):
        assert re.fullmatch(r"[a-z0-9-]+(@[0-9.:]+|@main)?([+~][a-z0-9_-]+)*", spec)
        assert keywords["type"] in ("build", "run", ("build", "run"))


def requirements() -> dict[str, str]:
    """Requirement → its lower bound, also of the extras that have a variant."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["plots"]]
    listed += project["optional-dependencies"]["flash"]
    return {line.partition(">=")[0].lower(): line.partition(">=")[2] for line in listed}


def test_every_requirement_is_there_with_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    _, recipe = load("py_kenotron", monkeypatch)
    specs = [*recipe.needs("@main"), *recipe.needs("+flash"), *recipe.needs("@main +plots")]
    found = dict(match for spec in specs for match in re.findall(r"^py-([a-z0-9-]+)@([0-9.]+):$", spec))
    assert found == requirements()
    assert "py-torch+distributed+gloo" in recipe.needs()
    assert "python@3.11:" in recipe.needs()


def test_own_recipes_serve_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("py_typer", "py_datasets"):
        _, recipe = load(name, monkeypatch)
        newest = tuple(map(int, recipe.of("version")[0][0].split(".")))
        assert newest >= tuple(map(int, requirements()[name.removeprefix("py_")].split(".")))


def test_the_commands_of_the_docs_name_what_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (REPOSITORY / "docs" / "installing.md").read_text(encoding="utf-8")
    lines = re.findall(r"spack install (.*)", text)
    assert len(lines) >= 4
    for line in lines:
        spec, *rest = line.partition("#")[0].split()
        name, _, version = spec.partition("@")
        _, recipe = load(name.replace("-", "_"), monkeypatch)
        assert version in ("", *(each for each, _ in recipe.of("version")))
        variants = {each for each, _ in recipe.of("variant")}
        assert {each.lstrip("+") for each in rest if each.startswith("+")} <= variants
