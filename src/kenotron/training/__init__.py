"""The training loop, and the parts of a run that it needs.

build.py            builds a run from a config: read `build_run` first
run.py              Run, and `fit`: the loop
step.py             one step: forward, backward, clip, update
hooks.py            the methods that hooks override, in the order of their calls

model_parts.py      builds the model, sharded over the layout
initial_weights.py  initial weights: random, or from a checkpoint
restore.py          loads the checkpoint that the run starts from
checkpoint_hook.py  saves checkpoints
saved_state.py      the format in which model, optimizer and hooks are saved
run_folder.py       the log folder
deterministic.py    bitwise reproducible runs on the same devices

metrics.py, console.py, report.py, nanotron_log.py     metrics and log messages
loss_scale.py       a hook that scales the loss of float16 runs
distillation.py     a loss from a teacher's probabilities, which teacher_cache.py caches
guards.py           a hook that ends runs; hooks that only watch are in kenotron.observers
expert_loads.py     token counts of the experts in a step
compare.py          compares two layouts of one config

The package is called `training` because `kenotron.train` is the function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kenotron.checkpoint.checkpoints import Checkpoints
    from kenotron.config import Config
    from kenotron.parallel.mesh import Mesh
    from kenotron.training.run import Run

__all__ = ["Hook", "train"]


def train(
    config: Config,
    mesh: Mesh,
    device: torch.device,
    checkpoints: Checkpoints | None = None,
    *,
    reopen: bool = False,
    observers: Sequence[Hook] = (),
) -> Run | None:
    """Train with `config`, from the newest of its `checkpoints` if one exists. All ranks of `mesh` call it.

    By default only `checkpoints_path` is searched for checkpoints. The architecture of `config` must be resolved
    (`interop.resolve_architecture`). `observers` are additional hooks (`kenotron.observers`). Returns the run. If its
    checkpoint already has all steps, nothing is loaded and None is returned, or with `reopen` the finished run. Raises
    InputError if the input is wrong, and RunFailed if the run cannot continue.
    """
    from kenotron.checkpoint.checkpoints import Checkpoints
    from kenotron.checkpoint.start import with_run_name
    from kenotron.kernels.fused import use_kernels
    from kenotron.kernels.host_memory import keep_freed_memory
    from kenotron.parallel.ranks import run_on_rank0
    from kenotron.runs.files import logged_step
    from kenotron.training import console, report
    from kenotron.training.build import build_hooks, build_run
    from kenotron.training.deterministic import deterministic
    from kenotron.training.run import close, fit, report_failure
    from kenotron.training.run_folder import log_folder, open_log_folder, take_log_folder

    checkpoints = checkpoints or Checkpoints(config)
    keep_freed_memory()  # changes malloc for the whole process: steps allocate the same sizes again and again
    console.start_logging(config, mesh)
    if mesh.is_first:
        report.run_log(config).project(config)
    with checkpoints.held() as held, deterministic(config.general.deterministic), use_kernels(config.model.kernels):
        start = checkpoints.start()
        config = with_run_name(config, start.name)
        done = start.done(config)
        if not done:
            run_on_rank0(lambda: take_log_folder(config, held))
        elif mesh.is_first:
            console.logger.info(report.already_finished(start))
        if done and not reopen:
            return None
        run = build_run(config, mesh, device, start, build_hooks(config, mesh, observers), checkpoints)
        try:
            if done:
                run.last_metrics = logged_step(log_folder(config), run.step) if mesh.is_first else {}
                return run
            if checkpoints.fresh:
                checkpoints.set_aside()
            if mesh.is_first:
                open_log_folder(config, start.continues)
                if run.finished:
                    console.logger.info(report.exhausted(run.data, start))
                else:
                    report.run_log(config).plan(run)
            if not run.finished:
                fit(run)
                if mesh.is_first:
                    report.farewell(run)
        except Exception as error:
            report_failure(run, error)
            raise
        finally:
            close(run)
        return run
