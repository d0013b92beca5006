"""Every command that README, docs and examples show can be typed: subcommand, options, keys, targets, tests, scripts.

What the commands do is tested where a page is tried as a whole (`grep -l read_page tests -r`).
"""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from kenotron.cli.app import all_commands
from kenotron.config import load
from kenotron.config.errors import InputError
from support.pages import is_a_test
from support.tiny_run import REPOSITORY

PAGES = sorted(
    page
    for pattern in (
        *("README.md", "CONTRIBUTING.md", "AGENTS.md", "docs/*.md"),
        *("examples/**/*.md", "benchmarks/*.md", "experiments/*.md", "tests/README.md"),
    )
    for page in REPOSITORY.glob(pattern)
    if page.name not in ("commands.md", "config-reference.md")  # generated from the commands and keys themselves
)
BEGINNING = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(kenotron|make|pytest|python (?:benchmarks|experiments|tests)/\S+) (.*)"
)
MEANT_TO_FAIL = "kenotron config check my.yaml tokens.train_stps=100"  # shows how a typo is answered
TARGETS = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def commands_of(text: str) -> list[str]:
    """The lines of shell blocks, and the spans in backticks, that begin with one of our commands."""
    blocks = re.findall(r"^ *```(?:bash|console|sh)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`]+)`", prose)
    stripped = (re.sub(r"^\s*\$ ", "", each.replace("\n", " ")).strip() for each in (*lines, *spans))
    return [each for each in stripped if BEGINNING.match(each)]


def arguments_of(command: str) -> list[str]:
    """The words of the first command of a line, without its comment and what it is piped or redirected to."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|;&>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    for word in lexer:
        if word in ("|", ";", "&&", ">", ">>", "&"):
            break
        words.append(word)
    return [word for word in words if word not in ("…", "...")]


@cache
def root() -> Any:
    return typer.main.get_command(all_commands())


def problems(command: str) -> Iterator[str]:
    """What is wrong with a command; nothing if it can be typed."""
    beginning, rest = BEGINNING.match(command).groups()  # type: ignore[union-attr]
    try:
        words = arguments_of(rest)
    except ValueError as error:
        yield f"not a shell's command: {error}"
        return
    if beginning == "kenotron":
        yield from problems_of_kenotron(words)
    elif beginning == "make":
        yield from (f"no target {word}" for word in words if re.fullmatch(r"[a-z-]+", word) and word not in TARGETS)
    elif beginning == "pytest":
        yield from (f"no {word}" for word in words if word.startswith("tests/") and not is_a_test(word))
    elif not (REPOSITORY / beginning.removeprefix("python ")).is_file():
        yield f"no script {beginning}"


def problems_of_kenotron(words: list[str]) -> Iterator[str]:
    """An unknown subcommand or option, or an unknown key of an override. Missing arguments are prose's right."""
    command, name = root(), "kenotron"
    while words and hasattr(command, "commands") and words[0] in command.commands:
        command, name, words = command.commands[words[0]], f"{name} {words[0]}", words[1:]
    if hasattr(command, "commands"):
        if words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
            yield f"{name} has no command {words[0]}"
        return
    flags = {option: is_flag(each) for each in command.params for option in (*each.opts, *each.secondary_opts)}
    flags |= {"--help": True, "--debug": True}
    for before, word in zip(["", *words], words):
        option = word.partition("=")[0]
        if re.match(r"--?[a-z]", word) and option not in flags:
            yield f"{name} has no option {option}"
        elif re.match(r"[a-z_]+(\.[a-z_0-9]+)*=", word) and flags.get(before, True):
            yield from unknown_key(word)


def is_flag(parameter: Any) -> bool:
    return getattr(parameter, "is_flag", False)


def unknown_key(override: str) -> list[str]:
    """The error about an override's key; values may fit another file than the quickstart."""
    try:
        load(REPOSITORY / "examples" / "quickstart.yaml", [override], report=lambda line: None)
    except InputError as error:
        return [str(error)] if "unknown key" in str(error) else []
    return []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_command_of_a_page_can_be_typed(page: Path) -> None:
    found = {command: [*problems(command)] for command in commands_of(page.read_text(encoding="utf-8"))}
    assert {command: wrong for command, wrong in found.items() if wrong and command != MEANT_TO_FAIL} == {}


def test_there_are_hundreds_of_commands() -> None:
    counts = {page: len(commands_of(page.read_text(encoding="utf-8"))) for page in PAGES}
    assert sum(counts.values()) > 300
    assert counts[REPOSITORY / "README.md"] > 15


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("kenotron chekpoint list x", "kenotron has no command chekpoint"),
        ("kenotron data tokenise x", "kenotron data has no command tokenise"),
        ("kenotron data tokenize x --out y", "kenotron data tokenize has no option --out"),
        (MEANT_TO_FAIL, "override tokens.train_stps=100: unknown key 'tokens.train_stps'; did you mean 'train_steps'?"),
        ("make slwo ONLY=x", "no target slwo"),
        ("pytest tests/test_links.py::test_that_is_not_there", "no tests/test_links.py::test_that_is_not_there"),
        ("python benchmarks/nothing.py --out x", "no script python benchmarks/nothing.py"),
    ],
)
def test_what_cannot_be_typed_is_found(command: str, problem: str) -> None:
    assert [*problems(command)] == [problem]
