"""lm-evaluation-harness around a model of ours: it makes the requests and the metrics, the model the likelihoods.

    tasks = Tasks(["hellaswag", "my_choices"], include_path="tasks")       # datasets are loaded here, once
    tasks.evaluate(model, tokenizer, num_fewshot=0, limit=None, batch_size=8)
    # {"hellaswag": {"acc": Metric(0.27, 0.004), "bits_per_byte": …}, "my_choices": …}

Tokens are those of lm_eval's own `hf` backend on the exported checkpoint, and so are the results. Tasks with choices
also get the bits per byte of the right answer, which moves long before the accuracy of a small model does.
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
    """`stderr` is the standard error of `value`; None where the task has none."""

    value: float
    stderr: float | None


Results = dict[str, dict[str, Metric]]  # task or group → metric


class Tasks:
    """Tasks of lm_eval by name (also groups and tags), with their datasets in memory.

    `include_path` is a folder with YAML files of one's own tasks. With `frozen` the requests that are made of a dataset
    are kept: lm_eval has them in the folder of the variable LM_HARNESS_CACHE_PATH. Raises InputError: lm_eval is not
    installed, there is no such task, its dataset cannot be loaded.
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
                found = self.manager.load([name])
            except Exception as error:  # datasets and task code raise anything
                raise InputError(f"tasks: cannot load '{name}': {first_line(error)}") from error
            group = found["groups"].get(name)
            self.loaded += found["tasks"].values() if group is None else [group]

    def evaluate(
        self,
        model: Decoder,
        tokenizer: TextTokenizer,
        num_fewshot: int | None,
        limit: int | None,
        batch_size: int,
    ) -> Results:
        """The metrics of `model`, which is in eval mode. Raises InputError."""
        import lm_eval

        from kenotron.evaluation.model import HarnessModel

        try:
            found = lm_eval.simple_evaluate(
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
        return results_of(found)


def _manager(names: Sequence[str], include_path: str | Path | None) -> Any:
    """lm_eval's list of tasks: of one's own where it has all names, else also the 14,000 that come with lm_eval."""
    from lm_eval.tasks import TaskManager

    folder = None if include_path is None else str(include_path)
    near = ""
    for with_defaults in (False, True) if folder else (True,):
        manager = TaskManager(include_path=folder, include_defaults=with_defaults)
        unknown = [name for name in names if name not in manager.all_tasks]
        if not unknown:
            return manager
        near = near or nearest(unknown[0], manager.all_tasks)
    raise InputError(
        f"tasks: lm_eval has no task '{unknown[0]}'{near}; `lm_eval ls tasks` lists them, and include_path "
        f"names a folder of your own"
    )


def results_of(found: dict[str, Any]) -> Results:
    """The metrics of tasks and groups in what lm_eval returns: ``acc,none`` is `acc`, other filters are named."""
    results: Results = {}
    for name, fields in {**found["results"], **found.get("groups", {})}.items():
        metrics = {}
        for key, value in fields.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = fields.get(f"{metric}_stderr,{kind}")
            metrics[metric if kind == "none" else f"{metric}/{kind}"] = Metric(
                float(value), float(stderr) if isinstance(stderr, int | float) else None
            )
        bits = list(bits_of_answers(found.get("samples", {}).get(name, ())))
        if bits and "bits_per_byte" not in metrics:
            spread = stdev(bits) / math.sqrt(len(bits)) if len(bits) > 1 else None
            metrics["bits_per_byte"] = Metric(fmean(bits), spread)
        results[name] = metrics
    return results


def bits_of_answers(samples: Sequence[dict[str, Any]]) -> Iterator[float]:
    """Bits per byte of the right answer of each question with choices."""
    for sample in samples:
        if len(sample["arguments"]) < 2:  # a text, whole or to be continued
            continue
        answers, right = [arguments[1] for arguments in sample["arguments"]], sample["target"]
        if isinstance(right, str):
            right = next((number for number, answer in enumerate(answers) if answer.strip() == right.strip()), None)
        scored = sample["filtered_resps"]
        if isinstance(right, int) and 0 <= right < len(scored) and answers[right]:
            yield -scored[right][0] / len(answers[right].encode()) / math.log(2)
