"""nanotron's section `lighteval`, rewritten as `evaluation`: its tasks, by the names that lm-evaluation-harness has.

lighteval:                                                          evaluation:
  batch_size: 16                                              →       batch_size: 16
  tasks:
    tasks: lighteval|hellaswag|0|0,lighteval|arc:easy|0|0     →       tasks: [hellaswag, arc_easy], num_fewshot: 0
    max_samples: 1000                                         →       limit: 1000
"""

from collections.abc import Iterator
from typing import Any

from kenotron.config.document import Document, Keys

# lighteval's name → those of lm-evaluation-harness.
_NAMES = {
    "siqa": ["social_iqa"],
    "early-signal": [
        *("hellaswag", "winogrande", "piqa", "social_iqa", "openbookqa", "arc_easy", "arc_challenge"),
        *("commonsense_qa", "mmlu"),
    ],
}


def translate(document: Document) -> Iterator[str]:
    """Rewrite a `lighteval` that names tasks; yields what became of it. Raises InputError."""
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
    new: dict[str, Any] = {"tasks": tasks, "num_fewshot": shots}
    new |= {"limit": section["tasks"].get("max_samples"), "eval_interval": section.get("eval_interval")}
    new |= {"batch_size": section.get("batch_size")}
    left = [name for name, value in section.items() if value and name not in ("tasks", "batch_size", "eval_interval")]
    left_out = f"; left out: {', '.join(left)}" if left else ""
    yield document.at(at, f"lighteval is now evaluation, by lm-evaluation-harness in a process of its own{left_out}")
    document.put(("evaluation",), {name: value for name, value in new.items() if value is not None}, document.place(at))
    del document.data["lighteval"]


def _tasks(document: Document, listed: str) -> tuple[list[str], int | None]:
    """Names, and the number of examples before a question; None where lighteval's text does not say."""
    names: list[str] = []
    shots: set[str] = set()
    for task in listed.split(","):
        suite, *fields = task.strip().split("|")
        name = fields[0] if fields else suite
        names += _NAMES.get(name, [name.replace(":", "_")])
        shots |= set(fields[1:2])
    if len(shots) > 1 or not all(each.isdigit() for each in shots):
        found = f"expected one number for all tasks, found {', '.join(sorted(shots))} examples"
        raise document.error(("lighteval", "tasks", "tasks"), f"lighteval.tasks.tasks: {found}")
    return names, int(shots.pop()) if shots else None
