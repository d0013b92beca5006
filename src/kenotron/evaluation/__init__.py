"""Evaluate a checkpoint on tasks of lm-evaluation-harness, with Kénotron's model, without an export.

    kn.evaluate("checkpoints/100", "hellaswag", limit=500)      # {"hellaswag": {"acc": Metric(0.27, 0.004), …}}

Importing this package imports neither torch nor lm_eval.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kenotron.config.errors import InputError

if TYPE_CHECKING:
    from kenotron.evaluation.harness import Results, Tasks


def evaluate(
    path: str | Path,
    tasks: str | Sequence[str] | Tasks,
    *,
    include_path: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    device: str | None = None,
    dtype: str | None = None,
    ema: bool = False,
) -> Results:
    """Evaluate the checkpoint or Hugging Face model at `path` on tasks, groups or tags of lm-evaluation-harness.

    Returns a value and its standard error for each metric of each task. `include_path` is a folder with YAML files of
    your own tasks; with `num_fewshot` None each task's default is used, with `limit` None all of its documents; with
    `device` None the accelerator, if there is one; with `dtype` None the config's dtype; with `ema` the moving average
    of the run's weights. Raises `kenotron.config.InputError` if a task does not exist, its dataset cannot be loaded, or
    `path` has no model or tokenizer.
    """
    from kenotron.evaluation.harness import Tasks

    if not isinstance(tasks, Tasks):
        tasks = Tasks([tasks] if isinstance(tasks, str) else tasks, include_path)
    from kenotron.generation.load import load_for_generation
    from kenotron.generation.model_on_ranks import ModelOnRanks

    model, tokenizer, _ = load_for_generation(path, dtype, device, ema=ema)
    assert not isinstance(model, ModelOnRanks), "without a mesh the model is whole"
    if tokenizer is None:
        raise InputError(f"{path} has no tokenizer, which evaluation needs")
    return tasks.evaluate(model, tokenizer, num_fewshot, limit, batch_size)
