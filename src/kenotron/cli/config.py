"""`kenotron config`: check, show and compare configs without running them.

kenotron config check my.yaml                            whether it is valid and can be run
kenotron config show my.yaml tokens.train_steps=100      every key, defaults and overrides filled in
kenotron config diff a.yaml b.yaml                       one line per key that differs
kenotron config schema > config.schema.json              JSON schema for an editor
"""

from pathlib import Path
from typing import Annotated

import typer

from kenotron.checkpoint.folders import newest_complete
from kenotron.cli.tables import to_stderr
from kenotron.config import Config, dump, load, refuse_unsupported
from kenotron.config import diff as differences
from kenotron.config.architecture import HFArchitecture
from kenotron.config.data_stages import CustomSource, PretrainDataset, SFTDataset, paths_of
from kenotron.config.decoder import DecoderArchitecture
from kenotron.config.dotted import import_registered
from kenotron.config.errors import counted, is_a_path, no_such_path
from kenotron.config.families import built_in_names, is_user_family
from kenotron.config.warnings import amount
from kenotron.launch.before_start import epochs, warnings_before_start

app = typer.Typer(help="Check, show and compare configs.", no_args_is_help=True)

File = Annotated[str, typer.Argument(metavar="FILE", help="A YAML config.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides: dotted.path=value.")]

CHECKED_TOKENS = 512  # length of the sequence that checks a user's blocks; a run uses its sequence length


@app.command()
def check(file: File, overrides: Overrides = None) -> None:
    """Check a config: keys, types, cross-checks, unsupported features, and that what it refers to exists."""
    config = load(file, overrides or [], report=to_stderr)
    refuse_unsupported(config)
    # Names of the hub are not looked up, and libraries are imported only if they can find an error.
    _check_code(config)
    _check_paths(config)
    _check_architecture(config)
    _check_hub_datasets(config)
    _check_sources(config)
    for line in warnings_before_start(file, config, overrides or ()):
        to_stderr(f"warning: {line}")
    stages, lengths = config.data_stages, set(config.sequence_lengths.values())
    samples, length = f"{config.global_batch_size}", f"{max(lengths)}"
    if any(stage.batch_size_ramp for stage in stages):
        samples = f"up to {samples}"
    if len(lengths) > 1:
        length = f"up to {length}"
    typer.echo(
        f"{file}: valid: {config.tokens.train_steps} steps of {samples} sequences of {length} tokens, "
        f"{counted(len(stages), 'stage')}; {amount(config)}{epochs(config)}"
    )


def _check_code(config: Config) -> None:
    """Raise InputError if a dotted path to a part of training cannot be imported, or is of another kind."""
    for hook in config.general.hooks or []:
        from kenotron.training.hooks import find_hook

        find_hook(*((hook, {}) if isinstance(hook, str) else (hook.path, hook.kwargs)))
    if any("." in factory.name for _, factory in config.optimizer.factories):
        from kenotron.optim.custom import check_optimizer

        check_optimizer(config.optimizer)
    if any("." in schedule.lr_decay_style for _, schedule in config.optimizer.schedules):
        from kenotron.optim.schedule import check_schedules

        check_schedules(config.optimizer)
    if loss := config.model.loss:
        from kenotron.models.token_loss import load_loss

        load_loss(loss)
    if "." in (strategy := config.parallelism.strategy or ""):
        from kenotron.parallel.data import load_strategy

        load_strategy(strategy)
    if config.checkpoints.checkpointing_engine != "torch":
        from kenotron.checkpoint.engine import find_engine

        find_engine(config.checkpoints.checkpointing_engine)


def _check_paths(config: Config) -> None:
    """Raise InputError if the tokenizer, the architecture, or the model or checkpoint to start from is missing."""
    is_new = newest_complete(config.checkpoint_folder) is None  # otherwise the run's own checkpoint has priority
    paths = {
        "tokenizer.tokenizer_name_or_path": config.tokenizer.tokenizer_name_or_path,
        "model.init_method.path": getattr(config.model.init_method, "path", None) if is_new else None,
        "model.model_config.hf": getattr(config.model.architecture, "hf", None),
        "checkpoints.resume_checkpoint_path": config.checkpoints.resume_checkpoint_path if is_new else None,
    }
    for key, path in paths.items():
        must_exist = key.startswith("checkpoints.") or is_a_path(path or "")  # otherwise it may be a name of the hub
        if path and must_exist and "://" not in path and not Path(path).expanduser().exists():
            raise no_such_path(key, path)


def _check_architecture(config: Config) -> None:
    architecture = config.model.architecture
    if isinstance(architecture, HFArchitecture) and Path(architecture.hf).is_dir():
        from kenotron.interop import resolve_architecture  # imports torch

        config = resolve_architecture(config)
        architecture = config.model.architecture
    if isinstance(architecture, DecoderArchitecture) and architecture.family not in built_in_names():
        from kenotron.parallel.partial_gradients import check_plan

        check_plan(config.model, config.parallelism)
        if is_user_family(architecture.family):
            _check_family(config, architecture)
    if isinstance(architecture, DecoderArchitecture) and config.optimizer.param_groups:
        _check_groups(config)


def _check_groups(config: Config) -> None:
    """Raise InputError for a pattern without parameters, or an optimizer for matrices on other parameters."""
    from kenotron.models import named_parameters, skeleton
    from kenotron.optim.groups import parameter_groups

    parameter_groups(named_parameters(skeleton(config.model)), config.optimizer)


def _check_family(config: Config, architecture: DecoderArchitecture) -> None:
    """Raise InputError for a parameter without an initialization rule, or a block that mixes documents."""
    from kenotron.models import named_parameters, skeleton
    from kenotron.models.document_separation import check_blocks
    from kenotron.models.init_rules import rule_for

    model = skeleton(config.model)
    rules = model.init_rules(std=0.02, scaling="NONE")
    for name, _ in named_parameters(model):
        rule_for(name, rules)
    if config.masks_documents:
        check_blocks(architecture, min(CHECKED_TOKENS, *config.sequence_lengths.values()))


def _check_hub_datasets(config: Config) -> None:
    """Raise InputError if a Hugging Face dataset is a path that does not exist."""
    for dataset in config.datasets:
        names = dataset.hf_dataset_or_datasets if isinstance(dataset, PretrainDataset | SFTDataset) else []
        for name in [names] if isinstance(names, str) else names:
            if is_a_path(name) and not Path(name).expanduser().exists():
                raise no_such_path("dataset.hf_dataset_or_datasets", name)


def _check_sources(config: Config) -> None:
    """Raise InputError for a missing or bad data file, a restart without effect, or a source that is not importable."""
    restarts = any(stage.data.restart for stage in config.data_stages)
    if restarts or any(paths_of(dataset) or isinstance(dataset, CustomSource) for dataset in config.datasets):
        from kenotron.data.sources import DATASETS
        from kenotron.data.stage_plan import all_datasets_of, check_files, check_paths  # half a second

        first = _next_step(config)
        check_paths(config, first)
        check_files(config, first)
        for at, dataset in all_datasets_of(config):
            if isinstance(dataset, CustomSource):
                import_registered(dataset.source, f"{at}.source", DATASETS)


def _next_step(config: Config) -> int:
    """Return the next step in the order of the data. Data of finished stages may be gone, so they are not checked.

    Return 1 for a run that validates, because validation reads the first stage.
    """
    from kenotron.checkpoint.manifest import read_manifest

    newest = newest_complete(config.checkpoint_folder)
    if newest is None or config.tokens.validates:
        return 1
    saved = read_manifest(newest)
    return min(saved.step - saved.state.get("data_start", 0) + 1, config.tokens.train_steps)


@app.command()
def show(
    file: File,
    overrides: Overrides = None,
    multipliers: Annotated[
        bool,
        typer.Option("--multipliers", help="Print each parameter's initialization and its factors on steps instead."),
    ] = False,
) -> None:
    """Print a config with every default and override filled in; the output is a config again."""
    config = load(file, overrides or [], report=to_stderr)
    if multipliers:
        from kenotron.interop import resolve_architecture
        from kenotron.models.parametrization import table

        for line in table(resolve_architecture(config)):
            typer.echo(line)
    else:
        typer.echo(dump(config), nl=False)


@app.command()
def diff(a: File, b: File) -> None:
    """Print every key whose value differs between two configs, or configs of run folders, including defaults."""
    from kenotron.cli.compare_runs import config_file

    for path, old, new in differences(*(load(config_file(Path(file)), report=to_stderr) for file in (a, b))):
        typer.echo(f"{path}: {old!r} -> {new!r}")


@app.command()
def schema() -> None:
    """Print the JSON schema of a config, for editors."""
    from kenotron.config.schema import json_schema_text

    typer.echo(json_schema_text(), nl=False)
