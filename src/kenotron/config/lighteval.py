"""Rewrite nanotron's section `lighteval` as `evaluation`, with lm-evaluation-harness's names of the tasks.

lighteval:                                                          evaluation:
  batch_size: 16                                              →       batch_size: 16
  tasks:
    tasks: lighteval|hellaswag|0|0,lighteval|arc:easy|0|0     →       tasks: [hellaswag, arc_easy], num_fewshot: 0
    max_samples: 1000                                         →       limit: 1000
"""

from collections.abc import Iterator
from typing import Any

from kenotron.config.document import Document, Keys

# lighteval's name of a task or suite → lm-evaluation-harness's names of its tasks.
_NAMES = {
    "siqa": ["social_iqa"],
    "early-signal": [
        *("hellaswag", "winogrande", "piqa", "social_iqa", "openbookqa", "arc_easy", "arc_challenge"),
        *("commonsense_qa", "mmlu"),
    ],
}


def translate(document: Document) -> Iterator[str]:
    """Rewrite a `lighteval` that names tasks, and yield a message. Raises InputError."""
    section, at = document.get("lighteval"), ("lighteval",)
    listed = document.get("lighteval", "tasks", "tasks")
    if not isinstance(listed, str):
        return
    if document.get("evaluation") is not None:
        raise document.error(at, "lighteval and evaluation are both set; remove one of them")
    if custom := document.get("lighteval", "tasks", "custom_tasks"):
        keys: Keys = ("lighteval", "tasks", "custom_tasks")
        raise document.error(keys, f"lighteval.tasks.custom_tasks {custom}: expected evaluation.include_path instead")
    tasks, shots = _tasks(document, listed)
    new: dict[str, Any] = {"tasks": tasks, "num_fewshot": shots, "limit": section["tasks"].get("max_samples")}
    new |= {name: section.get(name) for name in ("eval_interval", "batch_size")}
    used = ("tasks", "batch_size", "eval_interval")
    unused = ", ".join(name for name, value in section.items() if value and name not in used)
    left_out = f"; left out: {unused}" if unused else ""
    yield document.at(at, f"lighteval is now evaluation, by lm-evaluation-harness in a process of its own{left_out}")
    document.put(("evaluation",), {name: value for name, value in new.items() if value is not None}, document.place(at))
    del document.data["lighteval"]


def _tasks(document: Document, listed: str) -> tuple[list[str], int | None]:
    """Return the names of the tasks, and the number of examples before a question, or None if it is not specified."""
    names: list[str] = []
    shots: set[str] = set()
    for task in listed.split(","):
        suite, *fields = task.strip().split("|")
        name = fields[0] if fields else suite
        names += _NAMES.get(name, [name.replace(":", "_")])
        shots |= set(fields[1:2])
    if len(shots) > 1 or not all(number.isdigit() for number in shots):
        message = f"lighteval.tasks.tasks: expected one number for all tasks, found {', '.join(sorted(shots))} examples"
        raise document.error(("lighteval", "tasks", "tasks"), message)
    return names, int(shots.pop()) if shots else None
