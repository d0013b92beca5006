"""Preparing a run: hooks → model → weights → optimizer → data.

Data last, as to tokenize may take an hour. Whether their paths are there is looked at first: weights may take minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import yaml
from torch import nn

from kenotron.config import dump
from kenotron.config.architecture import HFArchitecture
from kenotron.config.errors import InputError
from kenotron.config.model import ExistingCheckpointInit, RandomInit
from kenotron.data.plan import check_paths
from kenotron.kernels.host_memory import keep_freed_memory
from kenotron.models import (
    LanguageModel,
    Part,
    build,
    initialize_model,
    materialize,
    named_parameters,
    zero_vocabulary_padding,
)
from kenotron.models.plan import modules
from kenotron.optim.build import build_optimizer
from kenotron.parallel import data as data_parallel
from kenotron.parallel.shards import shard_of
from kenotron.train import console
from kenotron.train.console import log_folder, logger
from kenotron.train.guards import NonFiniteGuard, Signals
from kenotron.train.hooks import Hook, load_hook
from kenotron.train.metrics import Metrics, set_aside
from kenotron.train.observing import Pace, Profiler, Progress, Samples
from kenotron.train.run import Run
from kenotron.train.saving import Checkpoints, Start, load_initial_weights
from kenotron.train.validation import Compressors, Validation

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.data import RunData
    from kenotron.parallel.mesh import Mesh
    from kenotron.parallel.pipeline import Pipeline


def prepare(config: Config, mesh: Mesh, device: torch.device, start: Start) -> Run:
    """Everything of a run but what `start` brings: `saving.restore` loads that."""
    logger.info("Config:\n%s", dump(config).rstrip())
    if mesh.is_first:
        warn_of_length(config)
    hooks = make_hooks(config, mesh)
    check_paths(config, start.step + 1)
    parts, pipeline = make_parts(config, mesh, device)
    if start.path is None:
        fill_weights(parts, config)
        if pipeline is not None:
            pipeline.share_tied_weights()
    optimizer = build_optimizer(named_parameters(*parts), config.optimizer)
    describe_model(config, parts, device)
    data = open_data(config, start)
    return Run(config, mesh, device, parts, optimizer, data, data.tokenizer, hooks, pipeline)


def open_data(config: Config, start: Start) -> RunData:
    """The run's data from the step after `start` on."""
    from kenotron.data import open_run

    own_tokenizer = start.path / "tokenizer" if start.path and start.continues and config.tokenizer.train else None
    data = open_run(config, start.step + 1, logger.info, own_tokenizer)
    if config.logging.sample_prompts and data.tokenizer is None:
        data.close()
        raise InputError("logging.sample_prompts: this run has no tokenizer to read them with; expected none")
    return data


def resolve_architecture(config: Config) -> Config:
    """``model_config: {hf: …}`` replaced by the shapes that it names."""
    architecture = config.model.architecture
    if not isinstance(architecture, HFArchitecture):
        return config
    from kenotron.interop import hf_architecture

    resolved = hf_architecture(architecture.hf, architecture.overrides)
    return config.model_copy(update={"model": config.model.model_copy(update={"architecture": resolved})})


def make_parts(config: Config, mesh: Mesh, device: torch.device) -> tuple[list[LanguageModel], Pipeline | None]:
    """The model in memory on `device`, weights undefined: whole, or with pp this rank's parts and what runs them."""
    keep_freed_memory()  # a step's batches, and on a CPU its tensors, are those of the last: no page faults for them
    if mesh.degree("pp") == 1:
        parts = [_on_meta(config, mesh, None)]
        _shard(config, mesh, parts[0], parts[0], device)
        return parts, None
    from kenotron.parallel.pipeline import Pipeline, parts_here

    parts = [_on_meta(config, mesh, part) for part in parts_here(config, mesh)]
    pipeline = Pipeline(parts, mesh, config, device)
    for part, stage in zip(parts, pipeline.stages):
        _shard(config, mesh, part, stage, device)
    return parts, pipeline


def _on_meta(config: Config, mesh: Mesh, part: Part | None) -> LanguageModel:
    """The model or a part of it, without memory, split over tp. Order: recompute → compile → shard."""
    with torch.device("meta"):
        model = build(config.model, mesh.degree("tp"), part)
    if mesh.degree("tp") > 1:
        from kenotron.parallel import tensor as tensor_parallel

        tensor_parallel.apply(
            model,
            model.plan,
            mesh,
            mode=config.parallelism.tp_mode,
            asynchronous=config.parallelism.tp_linear_async_communication,
            recompute_allgather=config.parallelism.tp_recompute_allgather,
        )
    model.set_recompute(config.parallelism.recompute_layer)
    if config.model.compile:
        for _, block in modules(model, model.plan.blocks):
            block.compile()
    model.set_compute_dtype(getattr(torch, config.model.dtype))
    return model


def _shard(config: Config, mesh: Mesh, model: LanguageModel, root: nn.Module, device: torch.device) -> None:
    """Data parallelism over `root`, the module that is called (`model`, or the stage around it); then memory."""
    blocks = [block for _, block in modules(model, model.plan.blocks)]
    data_parallel.load_strategy(config.parallelism.strategy)(
        root,
        blocks,
        mesh,
        zero_stage=3 if config.zero_stage == "hybrid" else int(config.zero_stage),
        compute_dtype=getattr(torch, config.model.dtype),
        cpu_offload=config.parallelism.cpu_offload,
        bucket_cap_mb=config.model.ddp_bucket_cap_mb,
    )
    materialize(model, "cpu" if config.parallelism.cpu_offload else device)
    zero_vocabulary_padding(model, shard_of)


def fill_weights(parts: Sequence[LanguageModel], config: Config) -> None:
    init = config.model.init_method
    if isinstance(init, ExistingCheckpointInit):
        logger.info("Weights from %s", init.path)
        load_initial_weights(parts, init.path)
        return
    assert isinstance(init, RandomInit)
    logger.info("Weights drawn with std %g (%s), seed %d", init.std, init.scaling_method, config.general.seed)
    for part in parts:
        initialize_model(part, init.std, init.scaling_method, config.general.seed, shard_of)


def warn_of_length(config: Config) -> None:
    architecture = config.model.architecture
    assert not isinstance(architecture, HFArchitecture)  # resolved by now
    positions = architecture.max_position_embeddings
    name, length = max(config.sequence_lengths.items(), key=lambda each: each[1])
    if length > positions:
        logger.warning(
            "%s is %d, model_config.max_position_embeddings only %d: the model trains on all of it, but generation "
            "will stop at %d tokens",
            name,
            length,
            positions,
            positions,
        )


def describe_model(config: Config, parts: Sequence[LanguageModel], device: torch.device) -> None:
    from kenotron.parallel import device as devices

    with torch.device("meta"):
        total = sum(parameter.numel() for _, parameter in named_parameters(build(config.model)))
    here = [shard_of(parameter).tensor for part in parts for parameter in part.parameters()]
    local, width = sum(tensor.numel() for tensor in here), here[0].element_size()
    for name, count in (("Total", total), ("Local", local)):
        logger.info(
            "%s number of parameters: %s (%s)",
            name,
            console.human_format(count),
            console.mebibytes(count * width),
        )
    memory = devices.memory(device)
    logger.info("[After model building]%s", console.show_memory(memory))


def make_hooks(config: Config, mesh: Mesh) -> list[Hook]:
    """The hooks that this config asks for, in the order in which they are called.

    What only speaks or writes files is on the first rank; what computes or decides is on all.
    """
    folder, first = log_folder(config), mesh.is_first
    hooks: list[Hook] = []
    if first and config.profiler is not None and config.profiler.profiler_export_path is not None:
        hooks.append(Profiler(Path(config.profiler.profiler_export_path) / (config.general.run or "run")))
    if config.tokens.validates:
        hooks.append(Validation())
    hooks += [Metrics(folder), NonFiniteGuard()] if first else [NonFiniteGuard()]
    if first:
        hooks.append(Progress() if Progress.wanted() else Pace())
    for entry in config.general.hooks or []:
        path, kwargs = (entry, {}) if isinstance(entry, str) else (entry.path, entry.kwargs)
        hooks.append(load_hook(path, kwargs))
    hooks += [Signals(), Checkpoints()]
    if first and config.tokens.validates:
        hooks.append(Compressors())
    if config.logging.sample_prompts:
        hooks.append(Samples())
    return hooks


def open_log(config: Config, start: Start) -> None:
    """The run's log folder, with its resolved config in it. Metrics of another run there step aside."""
    folder = log_folder(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (start.continues and _logged_here(config, folder)):
            set_aside(folder)
        (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
    except OSError as error:
        raise InputError(f"logging.log_dir: cannot write to {folder}: {error.strerror}") from error


def _logged_here(config: Config, folder: Path) -> bool:
    """Whether the run that last logged in `folder` keeps its checkpoints where this one does."""
    file = folder / "config.yaml"
    if not file.exists():
        return True
    try:
        saved = yaml.safe_load(file.read_text(encoding="utf-8"))["checkpoints"]["checkpoints_path"]
    except (yaml.YAMLError, KeyError, TypeError):
        return False  # nobody's: what stands beside it is kept, under another name
    return Path(saved).absolute() == Path(config.checkpoints.checkpoints_path).absolute()
