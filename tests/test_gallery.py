"""Every command of docs/what-broke-elsewhere.md names a test or a mutant that exists."""

import re

import pytest

from mutants.tables import MUTANTS
from support.pages import is_a_test
from support.tiny_run import REPOSITORY

PAGE = (REPOSITORY / "docs" / "what-broke-elsewhere.md").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^\d+\. .+\n(?: +.+\n)+", PAGE, re.MULTILINE)
COMMAND = re.compile(r"`((?:pytest tests/|make mutants ONLY=(?!name`))[^`]+)`")


def names_nothing(command: str) -> bool:
    """Whether the test function of a `pytest` command, or the mutant of a `make mutants` command, does not exist."""
    if mutant := re.fullmatch(r"make mutants ONLY=([\w-]+)", command):
        return mutant[1] not in {entry.name for entry in MUTANTS}
    test = re.fullmatch(r"pytest (tests/[\w/]+\.py::\w+)(?: -[km] .+)?", command)
    return test is None or not is_a_test(test[1])


@pytest.mark.parametrize("command", COMMAND.findall(PAGE))
def test_a_command_of_the_page_names_what_exists(command: str) -> None:
    assert not names_nothing(command)


def test_there_are_at_least_twenty_entries_with_one_command_each() -> None:
    assert len(ENTRIES) >= 20
    assert [int(entry.split(".")[0]) for entry in ENTRIES] == list(range(1, len(ENTRIES) + 1))
    assert [len(COMMAND.findall(entry)) for entry in ENTRIES] == [1] * len(ENTRIES)
    assert len(COMMAND.findall(PAGE)) == len(ENTRIES)


@pytest.mark.parametrize(
    "command",
    [
        "pytest tests/test_gallery.py::test_that_is_not_there",
        "pytest tests/test_that_is_not_there.py::test_at_all",
        "pytest tests/test_gallery.py",
        "make mutants ONLY=a-bug-that-is-not-there",
    ],
)
def test_a_name_of_nothing_is_found(command: str) -> None:
    assert names_nothing(command)
