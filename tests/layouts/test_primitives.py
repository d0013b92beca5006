"""The script of docs/primitives.md does what the page says, on two ranks."""

import re
from pathlib import Path

from support.ranks import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "primitives.md"


def run_page(rank: int, text: str) -> int:
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {"__name__": "primitives"}
    for block in blocks:
        exec(block, names)
    return len(blocks)


def test_every_example_of_the_page_runs_and_proves_its_point() -> None:
    assert run_ranks(2, run_page, PAGE.read_text(encoding="utf-8")) == [6, 6]
