"""Tasks of lm-evaluation-harness on a checkpoint, computed by the model itself, without an export.

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

    The result has a value and its standard error for each metric of each task. `include_path` is a folder with YAML
    files of tasks of one's own; `num_fewshot` None is what each task says, `limit` None means all of its documents;
    `device` None is the accelerator, if there is one, `dtype` None that of the config; `ema` takes the
    moving average of weights that the run kept. Raises
    `kenotron.config.InputError`: there is no such task, its dataset cannot be loaded, no model or tokenizer at `path`.
    """
    from kenotron.evaluation.harness import Tasks

    if not isinstance(tasks, Tasks):
        tasks = Tasks([tasks] if isinstance(tasks, str) else tasks, include_path)
    from kenotron.generation.load import load_for_generation
    from kenotron.generation.ranks import ModelOnRanks

    model, tokenizer, _ = load_for_generation(path, dtype, device, ema=ema)
    assert not isinstance(model, ModelOnRanks), "without a mesh it is whole"
    if tokenizer is None:
        raise InputError(f"{path} has no tokenizer, which evaluation needs")
    return tasks.evaluate(model, tokenizer, num_fewshot, limit, batch_size)
