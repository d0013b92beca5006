"""The code blocks of a page of docs/, as they stand there.

page = read_page("extend.md")
blocks(page, "yaml")              # the text of every yaml block
files(page)                       # {"my_hook.py": "import kenotron as kn…"}: blocks with a title
sections(page)["Hook"]            # the text below a heading of the second level
"""

import ast
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.tiny_run import REPOSITORY


def read_page(name: str) -> str:
    """The text of docs/`name`."""
    return (REPOSITORY / "docs" / name).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """All blocks of a language, in order."""
    return re.findall(rf"^```{language}\b[^\n]*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def files(page: str) -> dict[str, str]:
    """The blocks with a title, by it."""
    return dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', page, re.DOTALL | re.MULTILINE))


def sections(page: str) -> dict[str, str]:
    """The text below each heading of the second level, by heading."""
    parts = re.split(r"^## (.+)\n", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def is_a_test(name: str) -> bool:
    """Whether ``tests/file.py``, a folder of tests, or ``tests/file.py::function`` exists."""
    file, _, function = name.partition("::")
    if not function or not (REPOSITORY / file).is_file():
        return not function and (REPOSITORY / file).exists()
    body = ast.parse((REPOSITORY / file).read_text(encoding="utf-8")).body
    return function in {node.name for node in body if isinstance(node, ast.FunctionDef)}


@contextmanager
def in_a_users_folder(page: str, folder: Path) -> Iterator[None]:
    """Within, `folder` is the working directory, and has the files of the page."""
    before = Path.cwd()
    folder.mkdir(exist_ok=True)
    for name, text in files(page).items():
        (folder / name).write_text(text)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        for name in files(page):
            sys.modules.pop(name.removesuffix(".py"), None)
