"""`kenotron branch`: print a config that anneals a run from one of its checkpoints, as a separate run.

kenotron branch my.yaml --at 6000 --cooldown 500 --name cool-500 > cool-500.yaml
kenotron train cool-500.yaml                   steps 6001 to 6500, in checkpoints/my_run-cool-500
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from kenotron.checkpoint.folders import list_checkpoints, resolve
from kenotron.cli.tables import to_stderr
from kenotron.config import Config
from kenotron.config.errors import InputError, naming
from kenotron.config.remote_data import is_remote


def branch(
    file: Annotated[Path, typer.Argument(help="The YAML file of the run.")],
    at: Annotated[int, typer.Option(help="The step of the checkpoint to start from.")],
    cooldown: Annotated[int, typer.Option(help="Number of steps to anneal.", min=1)],
    name: Annotated[str, typer.Option(help="Name of the new run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="More changes: dotted.path=value; the run's other YAML files."),
    ] = None,
    style: Annotated[str, typer.Option(help="The decay, an lr_decay_style.")] = "1-sqrt",
) -> None:
    """Print a config that anneals a run from one of its checkpoints.

    Weights, optimizer and data continue, the learning rate falls to 0 from its value at that step. The run and its
    folder are not changed.
    """
    from kenotron.config import load
    from kenotron.config.loading import overlay
    from kenotron.config.overrides import is_file
    from kenotron.config.writing import dump, inline

    files = list(filter(is_file, overrides or ()))
    config = load(file, files, report=to_stderr)
    if name in ("", config.general.run):
        raise InputError(f"--name: expected a name other than the run's own, found {name!r}")
    saved, staging = config.checkpoints.checkpoints_path.rstrip("/"), config.checkpoints.staging_path
    source = _source(config, at)
    rate = _rate(source, at)
    if rate == 0:
        raise InputError(f"--at: the learning rate is 0 at step {at}; expected a step before its decay has ended")
    schedule = {"learning_rate": rate, "lr_warmup_steps": 0, "lr_decay_style": style, "min_decay_lr": 0.0}
    changes: dict[str, Any] = {
        "general.run": name,
        "checkpoints.checkpoints_path": f"{saved}-{name}",
        "checkpoints.resume_checkpoint_path": f"{source}/{at}",
        "checkpoints.load_mode": "cooldown",
        "tokens.train_steps": cooldown,
        "optimizer.learning_rate_scheduler": schedule,
    }
    for part in ("load_optimizer", "load_lr_scheduler"):  # load_mode cooldown needs both
        if not getattr(config.checkpoints, part):
            changes[f"checkpoints.{part}"] = True
    if staging is not None:
        changes["checkpoints.staging_path"] = f"{staging.rstrip('/')}-{name}"
    if config.s3_upload is not None:
        changes["s3_upload.upload_s3_path"] = f"{config.s3_upload.upload_s3_path.rstrip('/')}-{name}"
    texts = [*(f"{key}={inline(value)}" for key, value in changes.items()), *(overrides or ())]
    document = overlay(file, texts, lambda line: None)
    load(document.data, report=lambda line: None)
    sources = " ".join(map(str, (file, *files)))
    print(f"# {cooldown} steps of cooldown from step {at} of {config.general.run}; made by: kenotron branch {sources}")
    print(dump(document.data), end="")


def _source(config: Config, step: int) -> str:
    """Return the folder or the URL that has the run's checkpoint of `step`; the local folder is preferred."""
    saved = config.checkpoints.checkpoints_path.rstrip("/")
    if config.upload_url is None or is_remote(saved):
        return saved
    is_local = any(entry.step == step and entry.manifest for entry in list_checkpoints(saved))
    return saved if is_local else config.upload_url.rstrip("/")


def _rate(checkpoints: str, step: int) -> float:
    """Return the learning rate of the last step before the checkpoint, which may be local or in a store."""
    from kenotron.checkpoint.manifest import read_manifest
    from kenotron.config.resolved import read_resolved
    from kenotron.optim.schedule import learning_rate

    with TemporaryDirectory() as folder:
        if is_remote(checkpoints):
            from kenotron.checkpoint.remote import find

            remote, _ = find(f"{checkpoints}/{step}")
            path = remote.fetch(step, Path(folder), lambda name: name == "config.yaml")
        else:
            with naming("--at"):
                path = resolve(f"{checkpoints}/{step}")
        config, begun = read_resolved(path / "config.yaml"), read_manifest(path).state.get("schedule_start", 0)
    return learning_rate(config.optimizer.learning_rate_scheduler, step - begun, config.tokens.train_steps)
