"""docs/python.ipynb from docs/python.md: prose becomes markdown cells, python and bash blocks become code cells.

python tests/support/notebook.py          # writes the notebook anew
python tests/support/notebook.py --check  # exit code 1 unless it is the page's
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
FENCED = re.compile(r"^```(python|bash)\n(.*?)\n```$", re.DOTALL | re.MULTILINE)


def notebook_text() -> str:
    """The text of the notebook, as it should stand in docs/."""
    page = (DOCS / "python.md").read_text(encoding="utf-8")
    parts = FENCED.split(page)  # prose, language, code, prose, language, code, …, prose
    cells = [_cell("markdown", parts[0])]
    for language, code, prose in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        cells.append(_cell("code", code if language == "python" else f"!{code}"))
        if prose.strip():
            cells.append(_cell("markdown", prose))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _cell(kind: str, text: str) -> dict[str, Any]:
    source = text.strip().splitlines(keepends=True)
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": source, **code}


if __name__ == "__main__":
    notebook = DOCS / "python.ipynb"
    if sys.argv[1:] == ["--check"]:
        fresh = notebook.read_text(encoding="utf-8") == notebook_text()
        sys.exit(None if fresh else f"{notebook} is not docs/python.md")
    notebook.write_text(notebook_text(), encoding="utf-8")
