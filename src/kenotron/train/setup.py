"""Preparing a run: hooks → model → weights → optimizer → data. Data last: to tokenize may take an hour."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import yaml
from torch import nn

from kenotron.config import dump
from kenotron.config.architecture import HFArchitecture
from kenotron.config.errors import InputError
from kenotron.config.model import ExistingCheckpointInit, RandomInit
from kenotron.kernels.host_memory import keep_freed_memory
from kenotron.models import (
    LanguageModel,
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


def prepare(config: Config, mesh: Mesh, device: torch.device, start: Start) -> Run:
    """Everything of a run but what `start` brings: `saving.restore` loads that."""
    logger.info("Config:\n%s", dump(config).rstrip())
    warn_of_length(config)
    hooks = make_hooks(config)
    model = make_model(config, mesh, device)
    if start.path is None:
        fill_weights(model, config)
    optimizer = build_optimizer(named_parameters(model), config.optimizer)
    describe_model(config, model, device)
    data = open_data(config, start)
    return Run(config, mesh, device, model, optimizer, data, data.tokenizer, hooks)


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


def make_model(config: Config, mesh: Mesh, device: torch.device) -> LanguageModel:
    """The model in memory on `device`, split by its plan, weights undefined. Order: recompute → compile → shard."""
    if device.type == "cpu":
        keep_freed_memory()  # a step's tensors are those of the last: no page faults for them
    with torch.device("meta"):
        model = build(config.model, mesh.degree("tp"))
    if mesh.degree("tp") > 1:
        from kenotron.parallel import tensor as tensor_parallel

        tensor_parallel.apply(model, model.plan, mesh)
    model.set_recompute(config.parallelism.recompute_layer)
    if config.model.compile:
        for _, block in modules(model, model.plan.blocks):
            block.compile()
    compute = getattr(torch, config.model.dtype)
    if compute not in (torch.float32, torch.bfloat16):
        raise InputError(f"model.dtype: expected float32 or bfloat16, found {config.model.dtype}")
    model.set_compute_dtype(compute)
    data_parallel.apply(model, model.plan, mesh, compute_dtype=compute, reduce_dtype=torch.float32)
    materialize(model, device)
    zero_vocabulary_padding(model, shard_of)
    return model


def fill_weights(model: LanguageModel, config: Config) -> None:
    init = config.model.init_method
    if isinstance(init, ExistingCheckpointInit):
        logger.info("Weights from %s", init.path)
        load_initial_weights(model, init.path)
        return
    assert isinstance(init, RandomInit)
    logger.info("Weights drawn with std %g (%s), seed %d", init.std, init.scaling_method, config.general.seed)
    initialize_model(model, init.std, init.scaling_method, config.general.seed, shard_of)


def warn_of_length(config: Config) -> None:
    architecture = config.model.architecture
    assert not isinstance(architecture, HFArchitecture)  # resolved by now
    length, positions = config.tokens.sequence_length, architecture.max_position_embeddings
    if length > positions:
        logger.warning(
            "tokens.sequence_length is %d, model_config.max_position_embeddings only %d: the model trains on all of "
            "it, but generation will stop at %d tokens",
            length,
            positions,
            positions,
        )


def describe_model(config: Config, model: nn.Module, device: torch.device) -> None:
    from kenotron.parallel import device as devices

    total = sum(parameter.numel() for _, parameter in named_parameters(model))
    local = sum(shard_of(parameter).tensor.numel() for _, parameter in named_parameters(model))
    width = sum(p.numel() * p.element_size() for _, p in named_parameters(model)) / total
    for name, count in (("Total", total), ("Local", local)):
        logger.info(
            "%s number of parameters: %s (%s)",
            name,
            console.human_format(count),
            console.mebibytes(count * width),
        )
    memory = devices.memory(device)
    logger.info("[After model building]%s", console.show_memory(memory))


def make_hooks(config: Config) -> list[Hook]:
    """The hooks that this config asks for, in the order in which they are called."""
    folder = log_folder(config)
    hooks: list[Hook] = []
    if config.profiler is not None and config.profiler.profiler_export_path is not None:
        hooks.append(Profiler(Path(config.profiler.profiler_export_path) / (config.general.run or "run")))
    if config.tokens.validates:
        hooks.append(Validation())
    hooks += [Metrics(folder), NonFiniteGuard()]
    hooks.append(Progress() if Progress.wanted() else Pace())
    for entry in config.general.hooks or []:
        path, kwargs = (entry, {}) if isinstance(entry, str) else (entry.path, entry.kwargs)
        hooks.append(load_hook(path, kwargs))
    hooks += [Signals(), Checkpoints()]
    if config.tokens.validates:
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
