"""Build the `Run` of a config. Read `build_run` first, then `fit` in run.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kenotron.checkpoint.checkpoints import Checkpoints
from kenotron.checkpoint.start import Start
from kenotron.config.dotted import import_dotted
from kenotron.config.errors import InputError
from kenotron.config.model import Distillation, SpectralInit
from kenotron.data.stage_plan import check_paths
from kenotron.kernels.attentions.choice import attention_of_run
from kenotron.models import named_parameters, skeleton
from kenotron.models.token_loss import load_loss
from kenotron.optim.build import build_optimizer
from kenotron.parallel.ranks import raise_on_any_rank, wait_for_all
from kenotron.training.checkpoint_hook import CheckpointHook
from kenotron.training.console import logger
from kenotron.training.guards import NonFiniteGuard
from kenotron.training.hooks import Hook, load_hook
from kenotron.training.initial_weights import fill_weights
from kenotron.training.metrics import Metrics
from kenotron.training.model_parts import build_parts
from kenotron.training.report import run_log
from kenotron.training.restore import restore
from kenotron.training.run import Run, close
from kenotron.training.run_folder import log_folder

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.data import RunData
    from kenotron.models.decoder import Decoder
    from kenotron.models.parametrization import Factors
    from kenotron.parallel.mesh import Mesh

FROM_SCRATCH = Start()
LOSS_SCALE = "kenotron.training.loss_scale.LossScale"  # imported for float16
TEACHING = "kenotron.training.distillation.teaching"


def build_run(
    config: Config,
    mesh: Mesh,
    device: torch.device,
    start: Start = FROM_SCRATCH,
    hooks: Sequence[Hook] = (),
    checkpoints: Checkpoints | None = None,
) -> Run:
    """Build a run at the step of `start`: model → optimizer → data → checkpoint. All ranks call it.

    `hooks` are the hooks that `build_hooks` returns.

    Data are opened late because tokenizing may take an hour; their paths are checked first because weights take
    minutes.
    """
    log = run_log(config)
    log.config(config)
    step = min(start.step + 1, start.end(config))
    check_paths(start.in_run_steps(config), step, step)
    load_loss(config.model.loss)
    checkpoints = checkpoints or Checkpoints(config)

    attention, chosen = attention_of_run(config, device)
    logger.info("Attention: %s", chosen)

    log.building()
    whole = skeleton(config.model)
    parts, pipeline = build_parts(config, mesh, device)
    factors = factors_of(whole, config)
    if "model" not in start.loads:
        init, seed = config.model.init_method, config.general.seed
        group_of = config.optimizer.group_of
        stds = {name: factor.std for name, factor in factors.items()}
        fill_weights(parts, init, seed, lambda name: stds.get(name, 1.0) * group_of(name).init_std_scale)
        if pipeline is not None:
            pipeline.share_tied_weights()
    optimizer = optimizer_of(config, whole, parts, factors)
    log.model_size(whole, parts, device)
    if "model" not in start.loads:
        log.first_weights()

    teach = None
    if isinstance(config.model.loss, Distillation):
        teach = import_dotted(TEACHING, "model.loss")(config, parts, device)
    data = open_data(config, start)
    if isinstance(config.model.loss, Distillation):
        raise_on_any_rank(lambda: teach and teach.check(data))
    checkpoints.open()
    run = Run(
        config=config,
        mesh=mesh,
        device=device,
        skeleton=whole,
        parts=parts,
        optimizer=optimizer,
        data=data,
        hooks=list(hooks),
        pipeline=pipeline,
        start=start,
        attention=attention,
        teach=teach,
        checkpoints=checkpoints,
    )
    try:
        wait_for_all()
        restore(run, start)
    except BaseException:
        close(run)
        raise
    return run


def optimizer_of(
    config: Config, skeleton: Decoder, parts: Sequence[Decoder], factors: dict[str, Factors]
) -> torch.optim.Optimizer:
    """Build the optimizer of this rank's parameters."""
    return build_optimizer(
        named_parameters(*parts),
        config.optimizer,
        all_names=[name for name, _ in named_parameters(skeleton)],
        padded=config.model.decoder.vocab_size % config.model.make_vocab_size_divisible_by > 0,
        dtype=config.model.dtype,
        factors=factors,
    )


def factors_of(skeleton: Decoder, config: Config) -> dict[str, Factors]:
    """Return `models.parametrization.factors`, which is imported only for a config that uses them, else {}."""
    if config.model.parametrization is None and not isinstance(config.model.init_method, SpectralInit):
        return {}
    return import_dotted("kenotron.models.parametrization.factors", "model")(skeleton, config)


def open_data(config: Config, start: Start) -> RunData:
    """Open the run's data at the step after `start`.

    Raises InputError if there are prompts to complete (`logging.sample_prompts`) but no tokenizer.
    """
    from kenotron.data import open_run

    # The weights need the tokenizer that they were trained with: with another, token ids mean different text.
    tokenizer = start.path / "tokenizer" if start.path and "model" in start.loads and config.tokenizer.train else None
    data = open_run(start.in_run_steps(config), start.step + 1, logger.info, tokenizer, start.held_out)
    if config.logging.sample_prompts and data.tokenizer is None:
        data.close()
        raise InputError("logging.sample_prompts: this run has no tokenizer to encode them; expected none")
    return data


def build_hooks(config: Config, mesh: Mesh, observers: Sequence[Hook] = ()) -> list[Hook]:
    """Return the hooks of training, `observers` and the user's hooks, in the order of their calls.

    Hooks that only write are on the first rank; hooks that compute or decide are on all ranks.
    """
    hooks: list[Hook] = [NonFiniteGuard(), CheckpointHook(), *observers]
    if config.model.dtype == "float16":
        hooks.append(import_dotted(LOSS_SCALE, "model.dtype")())
    if mesh.is_first:
        hooks.append(Metrics(log_folder(config)))
    for entry in config.general.hooks or []:
        path, kwargs = (entry, {}) if isinstance(entry, str) else (entry.path, entry.kwargs)
        hooks.append(load_hook(path, kwargs))
    return sorted(hooks, key=lambda hook: -hook.priority)
