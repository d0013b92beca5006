"""Compare two configs: do they describe the same run? Also fill in the name of a run.

A run that was stopped after step 10 of 15 may resume with 30 steps, on another layout or with other intervals, and is
still the same run; with another weight decay it would be a different run:

    >>> same_run_difference(config, load("my.yaml", ["tokens.train_steps=30"]))
    >>> same_run_difference(config, load("my.yaml", ["optimizer.weight_decay=0.1"]))
    ('optimizer.weight_decay', 0.01, 0.1)

With `lr_decay_steps: null` the learning rate decays until the end of the run: if such a run is extended, it gets
the schedule of the longer run, and is still the same run.

Only stages of `data_stages` that have begun at the step of the resume are compared; later stages may be edited.
"""

import math
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kenotron.config.config import Config
from kenotron.config.errors import InputError
from kenotron.config.writing import diff, differences, flatten, to_dict

KEYS_THAT_MAY_CHANGE = """
    general.project general.run general.step general.consumed_train_samples general.benchmark_csv_path
    general.kill_switch_path general.ignore_sanity_checks general.deterministic general.hooks*
    tokens.train_steps tokens.val_check_* tokens.limit_val_batches tokens.val_samples tokens.val_datasets*
    tokens.limit_test_batches tokens.test_datasets*
    checkpoints.checkpoints_path* checkpoints.staging_path checkpoints.remove_after_upload
    checkpoints.checkpoint_interval checkpoints.save_* checkpoints.keep_* checkpoints.local* checkpoints.export_hf
    checkpoints.checkpointing_engine checkpoints.datastates* checkpoints.writer
    logging.* remote_data.* profiler* metrics_logging* s3_upload* evaluation* doremi.ref_model_resume_checkpoint_path
    data_stages.*.num_loading_workers data_stages.*.dataset_processing_num_proc_per_process
    data_stages.*.dataset_overwrite_cache data_stages.*.on_bad_document
    parallelism.* tokens.micro_batch_size tokens.batch_accumulation_per_replica optimizer.zero_stage optimizer.spikes*
    optimizer.skip_nonfinite_steps optimizer*.torch_adam_is_fused model.compile model.kernels model.loss.cache
    model.model_config._attn_implementation model.ddp_bucket_cap_mb model.make_vocab_size_divisible_by
"""
_FREE = KEYS_THAT_MAY_CHANGE.split()  # when a run is resumed

BATCH_KEYS = ("tokens.micro_batch_size", "tokens.batch_accumulation_per_replica", "parallelism.dp")
"""Their product is the global batch."""


def fill_run_name(config: Config, now: datetime, jobid: str | None) -> Config:
    """Fill every `%date` (YYYYmmdd_HHMMSS) and `%jobid` (`local` without a job) in `general.run`."""
    name = config.general.run.replace("%date", now.strftime("%Y%m%d_%H%M%S")).replace("%jobid", jobid or "local")
    return config.model_copy(update={"general": config.general.model_copy(update={"run": name})})


Difference = tuple[str, Any, Any]


def same_run_difference(before: Config, config: Config, step: int | None = None) -> Difference | None:
    """Return the first key that makes `config` a different run from `before`, with both values, or None.

    `step` is the step of the checkpoint whose config is `before`; None compares all stages.
    """
    same_batch = before.global_batch_size == config.global_batch_size
    for path, old, new in diff(before, config):
        if path in BATCH_KEYS:
            free = same_batch
        elif path == "checkpoints.resume_checkpoint_path":
            free = _within(new, config.checkpoints.checkpoints_path)
        else:
            free = path.startswith("data_stages.") or _is_free(path)
        if not free:
            return path, old, new
    return past_stage_difference(before, config, step)


def same_batch_overrides(config: Config, dp: int) -> list[str]:
    """Return overrides of the micro-batches with which `dp` replicas have the global batch of `config`.

    A global batch of 8 in micro-batches of 8, on two replicas: ``tokens.micro_batch_size=4
    tokens.batch_accumulation_per_replica=1``. Raises InputError if `dp` does not divide the global batch.
    """
    per_replica, rest = divmod(config.global_batch_size, dp)
    if rest:
        raise InputError(
            f"parallelism.dp: expected a divisor of the global batch of {config.global_batch_size}, found {dp}"
        )
    ramps = [stage.batch_size_ramp for stage in config.data_stages if stage.batch_size_ramp]
    sizes = [size // dp for ramp in ramps for size in (ramp.start, ramp.increment)]
    micro = math.gcd(per_replica, config.tokens.micro_batch_size, *sizes)
    return [f"tokens.micro_batch_size={micro}", f"tokens.batch_accumulation_per_replica={per_replica // micro}"]


def past_stage_difference(before: Config, config: Config, step: int | None) -> Difference | None:
    """Return the first difference between the stages that have begun at `step` (None: all), with both values."""
    return _first_difference(_stages(before, step, begun=True), _stages(config, step, begun=True))


def edited_stages(before: Config, config: Config, step: int) -> list[str]:
    """Return the names of the stages after `step` that were changed, added or removed."""
    old, new = _stages(before, step, begun=False), _stages(config, step, begun=False)
    names = {stage.start_training_step: stage.name for stage in [*before.data_stages, *config.data_stages]}
    starts = sorted({*old, *new})
    return [names[start] for start in starts if _first_difference(_only(old, start), _only(new, start))]


Stages = dict[int, tuple[int, dict[str, Any]]]


def _stages(config: Config, step: int | None, begun: bool) -> Stages:
    """Return first step → (index, keys that determine the data), for stages that have `begun` at `step` or have not."""
    stages: Stages = {}
    for number, (stage, content) in enumerate(zip(config.data_stages, to_dict(config)["data_stages"])):
        content["sequence_length"] = stage.sequence_length or config.tokens.sequence_length
        content.pop("name")
        if (step is None or stage.start_training_step <= step) == begun:
            stages[stage.start_training_step] = (number, content)
    return stages


def _only(stages: Stages, start: int) -> Stages:
    return {start: stages[start]} if start in stages else {}


def _first_difference(before: Stages, now: Stages) -> Difference | None:
    for start in sorted({*before, *now}):
        if start not in before or start not in now:
            number, _ = before[start] if start in before else now[start]
            old, new = (start if start in stages else None for stages in (before, now))
            return f"data_stages.{number}.start_training_step", old, new
        number, saved = before[start]
        _, current = now[start]
        removed, added = _dataset_keys_only_in(saved, current), _dataset_keys_only_in(current, saved)
        if removed and added:  # a dataset of another kind
            return f"data_stages.{number}.data.dataset", removed, added
        left, right = (dict(flatten(stage, f"data_stages.{number}")) for stage in (saved, current))
        for difference in differences(left, right):
            if not _is_free(difference[0]):
                return difference
    return None


def _is_free(path: str) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in _FREE)


def _within(path: object, folder: str) -> bool:
    """Return whether `path` is among the run's own checkpoints, from which it resumes in any case."""
    return isinstance(path, str) and Path(path).absolute().is_relative_to(Path(folder).absolute())


def _dataset_keys_only_in(stage: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a stage's dataset, except null ones, that the dataset of the other stage does not have."""
    dataset, other_keys = stage["data"]["dataset"] or {}, other["data"]["dataset"] or {}
    return {key: value for key, value in dataset.items() if key not in other_keys and value is not None}
