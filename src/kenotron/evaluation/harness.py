"""Run lm-evaluation-harness with Kénotron's models: it makes requests and metrics, the model computes likelihoods.

    tasks = Tasks(["hellaswag", "my_choices"], include_path="tasks")       # datasets are loaded here, once
    tasks.evaluate(model, tokenizer, num_fewshot=0, limit=None, batch_size=8)
    # {"hellaswag": {"acc": Metric(0.27, 0.004), "bits_per_byte": …}, "my_choices": …}

Tokens and results are equal to those of lm_eval's `hf` backend on the exported checkpoint. Tasks with choices also get
the bits per byte of the right answer, which improve long before the accuracy of a small model does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from kenotron.config.errors import InputError, nearest, no_such_path
from kenotron.storage.hub import first_line

if TYPE_CHECKING:
    from kenotron.models.decoder import Decoder
    from kenotron.text.tokenizer import TextTokenizer

MISSING = "tasks: need lm-evaluation-harness: pip install 'kenotron[eval]'"


class Metric(NamedTuple):
    """The `value` of a metric and its standard error `stderr`; None if the task has none."""

    value: float
    stderr: float | None


Results = dict[str, dict[str, Metric]]  # task or group → metric


class Tasks:
    """Tasks of lm_eval by name (also groups and tags), with their datasets in memory.

    `include_path` is a folder with YAML files of your own tasks. With `frozen` lm_eval caches the requests of a dataset
    in the folder of the variable LM_HARNESS_CACHE_PATH. Raises InputError if lm_eval is not installed, a task does not
    exist, or its dataset cannot be loaded.
    """

    def __init__(self, names: Sequence[str], include_path: str | Path | None = None, frozen: bool = False) -> None:
        if find_spec("lm_eval") is None:
            raise InputError(MISSING)
        if include_path is not None and not Path(include_path).is_dir():
            raise no_such_path("include_path", Path(include_path))
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self.frozen = frozen
        self.manager = _manager(names, include_path)
        self.loaded: list[Any] = []
        for name in names:
            try:
                loaded = self.manager.load([name])
            except Exception as error:  # datasets and task code raise any kind of error
                raise InputError(f"tasks: cannot load '{name}': {first_line(error)}") from error
            group = loaded["groups"].get(name)
            self.loaded += loaded["tasks"].values() if group is None else [group]

    def evaluate(
        self, model: Decoder, tokenizer: TextTokenizer, num_fewshot: int | None, limit: int | None, batch_size: int
    ) -> Results:
        """Return the metrics of `model`, which is in eval mode. Raises InputError if lm_eval cannot run the tasks."""
        import lm_eval

        from kenotron.evaluation.model import HarnessModel

        try:
            output = lm_eval.simple_evaluate(
                model=HarnessModel(model, tokenizer, batch_size),
                tasks=list(self.loaded),
                task_manager=self.manager,
                num_fewshot=num_fewshot,
                limit=limit,
                cache_requests=self.frozen,
                bootstrap_iters=1000,
            )
        except (ValueError, NotImplementedError, LookupError) as error:
            raise InputError(f"tasks: {first_line(error)}") from error
        return results_of(output)


def _manager(names: Sequence[str], include_path: str | Path | None) -> Any:
    """Return lm_eval's TaskManager, of only the tasks in `include_path` if they have all names, else of all 14,000."""
    from lm_eval.tasks import TaskManager

    folder = None if include_path is None else str(include_path)
    suggestion = ""
    for with_defaults in (False, True) if folder else (True,):
        manager = TaskManager(include_path=folder, include_defaults=with_defaults)
        unknown = [name for name in names if name not in manager.all_tasks]
        if not unknown:
            return manager
        suggestion = suggestion or nearest(unknown[0], manager.all_tasks)
    raise InputError(
        f"tasks: lm_eval has no task '{unknown[0]}'{suggestion}; `lm_eval ls tasks` lists them, and include_path "
        f"names a folder of your own"
    )


def results_of(output: dict[str, Any]) -> Results:
    """Return the metrics of tasks and groups in lm_eval's `output`; ``acc,none`` is `acc`, ``acc,x`` is ``acc/x``."""
    results: Results = {}
    for name, fields in {**output["results"], **output.get("groups", {})}.items():
        metrics = {}
        for key, value in fields.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = fields.get(f"{metric}_stderr,{kind}")
            metrics[metric if kind == "none" else f"{metric}/{kind}"] = Metric(
                float(value), float(stderr) if isinstance(stderr, int | float) else None
            )
        bits = list(bits_of_answers(output.get("samples", {}).get(name, ())))
        if bits and "bits_per_byte" not in metrics:
            spread = stdev(bits) / math.sqrt(len(bits)) if len(bits) > 1 else None
            metrics["bits_per_byte"] = Metric(fmean(bits), spread)
        results[name] = metrics
    return results


def bits_of_answers(samples: Sequence[dict[str, Any]]) -> Iterator[float]:
    """Yield the bits per byte of the right answer of each question with choices."""
    for sample in samples:
        if len(sample["arguments"]) < 2:  # a text to score or to continue, without choices
            continue
        answers, right = [arguments[1] for arguments in sample["arguments"]], sample["target"]
        if isinstance(right, str):
            right = next((number for number, answer in enumerate(answers) if answer.strip() == right.strip()), None)
        scored = sample["filtered_resps"]
        if isinstance(right, int) and 0 <= right < len(scored) and answers[right]:
            yield -scored[right][0] / len(answers[right].encode()) / math.log(2)
