"""Warn before a run starts, above all of a global batch that overrides of the layout have changed."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from kenotron.config import Config, load
from kenotron.config.data_stages import TEXT_DATASETS, TOKEN_DATASETS, paths_of
from kenotron.config.errors import InputError
from kenotron.config.overrides import is_file
from kenotron.config.remote_data import is_remote
from kenotron.config.runs import same_batch_overrides
from kenotron.config.warnings import amount, warnings_of


def warnings_before_start(file: str | Path, config: Config, overrides: Sequence[str]) -> list[str]:
    """Return the warnings of `config check` and `submit`.

    Raises InputError if the run in the checkpoint folder has another global batch.
    """
    if config.checkpoint_folder.is_dir():
        from kenotron.checkpoint.start import continued_run

        continued_run(config, [config.checkpoint_folder])
    return [*changed_batch(file, config, overrides), *warnings_of(config)]


BATCH_OVERRIDES = ("tokens=", "tokens.micro_batch_size", "tokens.batch_accumulation_per_replica")


def changed_batch(file: str | Path, config: Config, overrides: Sequence[str]) -> Iterator[str]:
    """Yield a warning if `overrides` of the layout change the global batch of `file`.

    Every replica has its own micro-batches, so 32 times as many replicas train on 32 times as many tokens a step.
    """
    dp = [text for text in overrides if text.startswith("parallelism")]
    if not dp or any(text.startswith(BATCH_OVERRIDES) for text in overrides):
        return
    try:
        before = load(file, list(filter(is_file, overrides)), report=lambda line: None)
    except InputError:  # the file is valid only with the overrides
        return
    old, new = before.global_batch_size, config.global_batch_size
    if old == new:
        return
    try:
        keep = f"; to keep it, add {' '.join(same_batch_overrides(before, config.parallelism.dp))}"
    except InputError:
        keep = ""
    yield f"{' '.join(dp)}: the global batch is now {new} sequences and not {old}, {amount(config)}{keep}"


def epochs(config: Config) -> str:
    """Return ``; after step 1000: 0.52 epochs of code`` for a run on local token files, or "" if it is unknown.

    Raises InputError if a token file cannot be read.
    """
    stages = [stage for stage in config.data_stages if stage.start_training_step <= config.tokens.train_steps]
    datasets = [dataset for stage in stages for dataset in stage.data.datasets]
    if any(isinstance(data, TEXT_DATASETS) and getattr(data, "streaming", None) is None for data in datasets):
        return "; `kenotron train` says the epochs, once the text is tokenized"
    is_local = all(isinstance(data, TOKEN_DATASETS) and not any(map(is_remote, paths_of(data))) for data in datasets)
    if not is_local or not hasattr(config.model.architecture, "vocab_size"):
        return ""
    from kenotron.data.run import RunData, run_settings
    from kenotron.data.stage_plan import plan_stages

    settings = run_settings(config, report=lambda line: None)
    with RunData(settings, plan_stages(config)) as data:
        return data.describe_epochs(config.tokens.train_steps)
