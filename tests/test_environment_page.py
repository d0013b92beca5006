"""docs/environment-variables.md has every environment variable that the sources name."""

import re

from support.tiny_run import REPOSITORY

PAGE = REPOSITORY / "docs/environment-variables.md"
NAME = r"\"([A-Z][A-Z0-9_]*)\""
READ = re.compile(
    rf"environ(?:ment)?(?:\.get|\.setdefault|\.pop)?[\[(]\s*{NAME}"  # os.environ["X"], environment.get("X")
    rf"|getenv\(\s*{NAME}"
    rf"|{NAME} (?:not )?in (?:os\.)?environ"
)
OURS = re.compile(r"\bKENOTRON_[A-Z_]+")


def sources(*folders: str) -> str:
    return "\n".join(
        path.read_text(encoding="utf-8") for folder in folders for path in sorted((REPOSITORY / folder).rglob("*.py"))
    )


def names_read(text: str) -> set[str]:
    """The variables that Python code reads or sets by a literal name."""
    return {name for found in READ.findall(text) for name in found if name}


def names_on_the_page() -> set[str]:
    return set(re.findall(r"`_?([A-Z][A-Z0-9_]+)(?:=[^`]*)?`", PAGE.read_text(encoding="utf-8")))


def test_every_variable_that_the_package_names_is_on_the_page() -> None:
    package = sources("src/kenotron")
    assert sorted((names_read(package) | set(OURS.findall(package))) - names_on_the_page()) == []


def test_every_variable_of_ours_on_the_page_is_in_the_sources() -> None:
    ours = {name for name in names_on_the_page() if OURS.fullmatch(name)}
    assert ours
    assert sorted(ours - set(OURS.findall(sources("src/kenotron", "benchmarks", "tests/gpu")))) == []


def test_the_ways_to_name_a_variable_are_found() -> None:
    code = """
    os.environ["A"]; os.environ.get("B", "0"); os.environ.setdefault("C", ""); os.getenv("D"); "E_1" in os.environ
    int(environment["F"]); "G" not in os.environ; os.environ.get(name); found["H"]; environment.get(
        "I"
    )
    """
    assert names_read(code) == set("ABCDFGI") | {"E_1"}
