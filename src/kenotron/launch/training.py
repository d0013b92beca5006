"""The training function of the ranks, with resolved architectures and observers, which `training` does not import."""

import socket
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from kenotron import interop, training
from kenotron.checkpoint import folders
from kenotron.checkpoint.checkpoints import Checkpoints
from kenotron.checkpoint.local import LocalTier, machine_of_each
from kenotron.checkpoint.restart import start_elsewhere
from kenotron.checkpoint.start import Start, continued_run, run_name, with_run_name
from kenotron.config import Config
from kenotron.config.errors import InputError
from kenotron.config.families import is_user_family
from kenotron.config.warnings import warnings_of
from kenotron.launch.environment import Ranks, ranks_from_environment
from kenotron.launch.memory import machine_limits
from kenotron.launch.shared_folder import check_shared
from kenotron.models.document_separation import check_blocks
from kenotron.observers import observers
from kenotron.parallel.mesh import Mesh, build_mesh
from kenotron.parallel.partial_gradients import check_plan
from kenotron.parallel.ranks import gather, rank_and_size, run_on_rank0, wait_for_all
from kenotron.training import compare, console
from kenotron.training.console import logger
from kenotron.training.report import already_finished
from kenotron.training.run import Run


def train(config: Config, mesh: Mesh, device: torch.device, *, fresh: bool = False, reopen: bool = False) -> Run | None:
    """Resolve the architecture, fetch remote checkpoints, and run `kenotron.training.train`. All ranks must call it.

    Raises InputError if several machines do not share the checkpoint folder.
    """
    ranks = ranks_from_environment()
    if ranks.local_world_size < ranks.world_size:
        check_shared(config.checkpoint_folder, config.checkpoints.checkpoints_path_is_shared_file_system)
    local = local_tier(config, ranks)  # from this rank's own config, because paths of local disks may differ
    messages: list[str] = []
    with machine_limits(config, device):
        config = _resolved(config, messages.append)
        if config.masks_documents and is_user_family(config.model.decoder.family):
            longest = max(config.sequence_lengths.values())
            run_on_rank0(lambda: check_blocks(config.model.decoder, longest, device))
        fetch_checkpoints(config, fresh)
    checkpoints = Checkpoints(config, fresh=fresh, local=local, start_elsewhere=start_elsewhere)
    console.start_logging(config, mesh)
    for line in (*messages, *warnings_of(config)):
        logger.warning("%s", line)
    with machine_limits(config, device, warn=True):  # memory is estimated from the resolved architecture
        run = training.train(config, mesh, device, checkpoints, reopen=reopen, observers=observers(config, mesh))
    if run is None or (run.finished and run.last_result is None):
        _finish_last(config, mesh, checkpoints)
    return run


def _resolved(config: Config, report: folders.Report) -> Config:
    """Resolve the architecture; `report` gets a line for each setting of a Hugging Face model that is left out.

    Raises InputError if the model's plan would leave a rank with a part of a gradient.
    """

    def resolve() -> Config:
        resolved = interop.resolve_architecture(config, report)
        check_plan(resolved.model, resolved.parallelism)
        return resolved

    return run_on_rank0(resolve)


def _finish_last(config: Config, mesh: Mesh, checkpoints: Checkpoints) -> None:
    """Export and upload the last checkpoint of a run that had finished before, if needed. All ranks must call it."""
    checkpoints.end()
    if config.checkpoints.export_hf:
        from kenotron.observers.export import export_last

        with checkpoints.held():
            export_last(config)
    if mesh.is_first and config.upload_url is not None:
        from kenotron.observers.uploads import build_uploader, finish

        uploader, lines = build_uploader(config, config.upload_url)
        uploader.start()
        finish(uploader, lines)


def local_tier(config: Config, ranks: Ranks) -> LocalTier | None:
    """Return the tier of `checkpoints.local`, or None if it is not set. All ranks must call it."""
    if config.checkpoints.local is None:
        return None
    machines = (0,) * rank_and_size()[1]
    if ranks.local_world_size < ranks.world_size:
        machines = machine_of_each(gather((socket.gethostname(), ranks.local_rank)))
    return LocalTier(config, machines, logger.warning, logger.info)


def name_before_start(config: Config, roots: Iterable[Path]) -> tuple[Config, Path]:
    """Return the config for the ranks, and the folder of their logs; `roots` have the run's checkpoints.

    A new run gets its name here, so that all ranks have one. A resumed run keeps its config: its ranks read the name
    from the checkpoint, and warn if the config has another. Raises InputError if it resumes with a different global
    batch, which a change of the layout may cause.
    """
    logs = Path(config.logging.log_dir)
    if (before := continued_run(config, roots)) is not None:
        return config, logs / before.general.run / "ranks"
    name = run_name(config, None)
    return with_run_name(config, name), logs / name / "ranks"


def finished_before_start(config: Config) -> bool:
    """Return whether the run in `checkpoints_path` has all steps, and log it, without starting ranks.

    Return False also if its last checkpoint may need an export, an upload, or the removal of local checkpoints. Raises
    InputError if `config` is another run.
    """
    if config.upload_url or config.checkpoints.export_hf or config.checkpoints.local:
        return False
    saved = folders.list_checkpoints(config.checkpoint_folder)
    if not saved or saved[-1].problem or not Start.at(saved[-1].path, continues=True).done(config):
        return False
    console.start_logging(config, build_mesh({}, 1, "cpu"))
    checkpoints = Checkpoints(interop.resolve_architecture(config))
    with checkpoints.held():
        start = checkpoints.start()
    if done := start.done(config):  # False if the newest checkpoint is damaged
        logger.info("%s", already_finished(start))
    return done


def fetch_checkpoints(config: Config, fresh: bool) -> None:
    """Fetch the remote checkpoint that a run starts from, on rank 0, without a time limit. All ranks must call it.

    The ranks share a file system, as for the checkpoints themselves. Raises InputError on all ranks.
    """
    if not config.begins_remote:
        return
    from kenotron.checkpoint.remote import fetch_for_run

    def on_rank0() -> None:
        if problem is not None:
            raise problem

    problem: InputError | None = None
    if rank_and_size()[0] == 0:
        try:
            quiet = config.logging.log_level not in ("debug", "info")
            fetch_for_run(
                config,
                fresh,
                report=lambda line: print(f"warning: {line}", file=sys.stderr, flush=True),
                say=lambda line: None if quiet else print(line, flush=True),
            )
        except InputError as error:
            problem = error
    wait_for_all()
    run_on_rank0(on_rank0)


def record(config: Config, mesh: Mesh, device: torch.device, *, steps: int, seed: int, folder: str) -> None:
    """Resolve the architecture and call `kenotron.training.compare.record`."""
    compare.record(_resolved(config, folders.quiet), mesh, device, steps=steps, seed=seed, folder=folder)
