"""The training loop, and everything of a run around it.

build.py            from a config to a run: read `build_run` first
run.py              Run, and `fit`: the loop
step.py             one step: forward, backward, clip, update
hooks.py            the methods that everything else of a run hangs on, in their order

model_parts.py      the model in memory, split over the layout
initial_weights.py  its first weights
restore.py          loading the checkpoint that it starts from
checkpoint_hook.py  saving checkpoints
saved_state.py      the form in which model, optimizer and hooks are saved
run_folder.py       the log folder
deterministic.py    the same bits from every run on the same devices

metrics.py, console.py, report.py, nanotron_log.py     numbers and messages
loss_scale.py       a hook that scales the loss of float16 runs
distillation.py     a loss from another model's probabilities; teacher_cache.py, which are kept
guards.py           a hook that ends runs; those that only watch are in kenotron.observers
expert_loads.py     how many tokens each expert got in a step
compare.py          two layouts of one config, compared

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
    """Train as `config` says, from the newest of its `checkpoints` if there is one. All ranks of `mesh` call it.

    `checkpoints` are by default those in `checkpoints_path` alone. The architecture is resolved
    (`interop.resolve_architecture`). `observers` are more hooks (`kenotron.observers`). Returns the run; if its
    checkpoint has all steps already, nothing is loaded and None returned, or with `reopen` the run as it ended. Raises
    InputError if the input is wrong, RunFailed if the run cannot continue.
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
    first = mesh.is_first
    if first:
        report.run_log(config).project(config)
    with checkpoints.held() as held, deterministic(config.general.deterministic), use_kernels(config.model.kernels):
        start = checkpoints.start()
        config = with_run_name(config, start.name)
        done = start.done(config)
        if not done:
            run_on_rank0(lambda: take_log_folder(config, held))
        elif first:
            console.logger.info(report.already_finished(start))
        if done and not reopen:
            return None
        run = build_run(config, mesh, device, start, build_hooks(config, mesh, observers), checkpoints)
        try:
            if done:
                run.last_metrics = logged_step(log_folder(config), run.step) if first else {}
                return run
            if checkpoints.fresh:
                checkpoints.set_aside()
            if first:
                open_log_folder(config, start.continues)
                if run.finished:
                    console.logger.info(report.exhausted(run.data, start))
                else:
                    report.run_log(config).plan(run)
            if not run.finished:
                fit(run)
                if first:
                    report.farewell(run)
        except Exception as error:
            report_failure(run, error)
            raise
        finally:
            close(run)
        return run
