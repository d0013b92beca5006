"""docs/commands.md, from the commands themselves: what `--help` says of each.

python tests/support/commands_page.py            writes the page
python tests/support/commands_page.py --check    exit code 1 if it would change
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from kenotron.cli.app import all_commands

PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"
HEAD = """# Commands

Look up what a command takes, without running it. This page is generated (`make reference`) from what
`kenotron COMMAND --help` prints.

Overrides such as `tokens.train_steps=100` follow the YAML file, of any command that takes one. Exit codes: 0 done, 1
the run failed, 2 the input was wrong; an error is one line, and `--debug` adds its traceback.
"""


def commands_page() -> str:
    """The text of the page."""
    root = typer.main.get_command(all_commands())
    found = list(_commands(root, "kenotron"))
    table = "".join(f"| [`{name}`](#{_anchor(name)}) | {_sentence(command)} |\n" for name, command in found)
    parts = (f"\n## {name}\n\n{_help(command)}\n{_parameters(command)}" for name, command in found)
    return f"{HEAD}\n| command | what it does |\n|---|---|\n{table}{''.join(parts)}"


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    for each, below in getattr(command, "commands", {}).items():
        full = f"{name} {each}"
        if hasattr(below, "commands"):
            yield from _commands(below, full)
        else:
            yield full, below


def _anchor(name: str) -> str:
    return re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-")


def _plain(text: str) -> str:
    """One line without the marks of the terminal."""
    return " ".join(re.sub(r"\[/?(dim|bold|italic)\]", "", text).replace("|", "\\|").split())


def _help(command: Any) -> str:
    paragraphs = (command.help or "").replace("\f", "").split("\n\n")
    return "\n\n".join(_plain(paragraph) for paragraph in paragraphs if paragraph.strip())


def _sentence(command: Any) -> str:
    return re.split(r"(?<=\.)\s", _help(command), maxsplit=1)[0]


def _parameters(command: Any) -> str:
    shown = [each for each in command.params if not getattr(each, "hidden", False) and each.name != "help"]
    rows = "".join(f"| {_name(each)} | {_default(each)} | {_plain(each.help or '')} |\n" for each in shown)
    return f"\n| | default | |\n|---|---|---|\n{rows}" if rows else ""


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        dots = "…" if parameter.nargs == -1 or getattr(parameter, "multiple", False) else ""
        return f"`{(parameter.metavar or parameter.name).upper()}{dots}`"
    names = [*parameter.opts, *parameter.secondary_opts]
    takes = "" if parameter.is_flag else " …"
    return ", ".join(f"`{name}{takes}`" for name in names)


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if callable(value) or value in (None, (), [], False, ""):
        return ""
    return f"`{value}`"


if __name__ == "__main__":
    text = commands_page()
    if sys.argv[1:] == ["--check"]:
        sys.exit(None if PAGE.read_text(encoding="utf-8") == text else f"{PAGE} is not what the commands say")
    PAGE.write_text(text, encoding="utf-8")
