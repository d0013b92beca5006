"""Questions and texts made of the source files of Python's standard library, so that they need no download."""

import ast
import random
import sysconfig
from functools import cache
from itertools import islice
from pathlib import Path

from datasets import Dataset

COUNT = 200


def functions():
    """The first function of at least four lines in each file, in the order of the files' names."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="ignore")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                lines = text.split("\n")[node.lineno - 1 : node.end_lineno]
                if len(lines) >= 4:
                    yield "\n".join(lines)
                    break


@cache
def texts():
    """The first of them."""
    return list(islice(functions(), COUNT))


def next_line(**_):
    """Which line follows the first three of a function: its own, or one of three other functions?"""
    functions = [text.split("\n") for text in texts()]
    fourth = [lines[3].strip() or "pass" for lines in functions]
    rows = []
    for number, lines in enumerate(functions):
        draw = random.Random(number)
        choices = [fourth[number], *draw.sample([line for line in fourth if line != fourth[number]], 3)]
        draw.shuffle(choices)
        indent = lines[3][: len(lines[3]) - len(lines[3].lstrip())]
        question = "\n".join([*lines[:3], indent])
        rows.append({"question": question, "choices": choices, "answer": choices.index(fourth[number])})
    return {"test": Dataset.from_list(rows)}


def whole(**_):
    """Whole functions."""
    return {"test": Dataset.from_list([{"text": text} for text in texts()])}
