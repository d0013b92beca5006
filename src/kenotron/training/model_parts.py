"""Build the model of a run: on the meta device, sharded by its plan, and only then allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from kenotron.kernels.attentions.choice import OWN_BLOCKS
from kenotron.models import ModelPart, materialize, skeleton, zero_vocabulary_padding
from kenotron.models.decoder import Decoder
from kenotron.models.plan import modules
from kenotron.parallel import data as data_parallel
from kenotron.parallel.shards import shard_of

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.parallel.mesh import Mesh
    from kenotron.parallel.pipeline import Pipeline


COMPILATIONS = 64


def build_parts(config: Config, mesh: Mesh, device: torch.device) -> tuple[list[Decoder], Pipeline | None]:
    """Allocate the model on `device`, sharded by the layout, with undefined weights.

    Returns one part, which is the model, and None; with pp, this rank's parts and the pipeline that runs them. Order:
    meta device → tensor parallel → recomputation → compilation → data parallel → allocation.
    """
    if mesh.degree("pp") == 1:
        parts = [_on_meta(config, mesh, None)]
        _shard(config, mesh, parts[0], parts[0], device)
        return parts, None
    from kenotron.parallel.pipeline import Pipeline, parts_here, warn_of_idle_ranks

    model, layout, length = config.model, config.parallelism, max(config.sequence_lengths.values())
    parts = [_on_meta(config, mesh, part) for part in parts_here(model, layout, mesh, length)]
    pipeline = Pipeline(parts, mesh, layout, device, parts[0].stream_dtype, model.compile)
    if mesh.is_first:
        warn_of_idle_ranks(layout, config.tokens.batch_accumulation_per_replica, model.compile)
    for part, stage in zip(parts, pipeline.stages):
        _shard(config, mesh, part, stage, device)
    return parts, pipeline


def _on_meta(config: Config, mesh: Mesh, part: ModelPart | None) -> Decoder:
    """Return the model or a part of it on the meta device, sharded over tp."""
    model = skeleton(config.model, mesh.degree("tp"), part)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, config.kept_dtype))
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
    if mesh.expert_mesh is not None:
        from kenotron.parallel import experts

        experts.apply(model, model.plan, mesh)
    layout = config.parallelism
    by_blocks = layout.context_parallel_size > 1 and layout.context_parallel_method in OWN_BLOCKS
    model.set_recompute(layout.recompute_layer, layout.tp, attention=not by_blocks)
    if config.model.compile:
        limit_recompilations()
        model.compile_blocks()
    model.set_compute_dtype(getattr(torch, config.model.dtype))
    return model


def limit_recompilations() -> None:
    """Limit the compilations of a function, and fail beyond the limit, where torch would continue uncompiled.

    The combinations of kinds of layers, training or validation, and fixed or varying lengths exceed torch's limit of 8.
    """
    torch._dynamo.config.recompile_limit = COMPILATIONS
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def _shard(config: Config, mesh: Mesh, model: Decoder, root: nn.Module, device: torch.device) -> None:
    """Make `root`, the module that is called (`model`, or the stage around it), data-parallel; then allocate it."""
    blocks = [block for _, block in modules(model, model.plan.blocks)]
    data_parallel.load_strategy(config.parallelism.strategy)(
        root,
        blocks,
        mesh,
        zero_stage=3 if config.zero_stage == "hybrid" else int(config.zero_stage),
        compute_dtype=model.weight_dtype,
        cpu_offload=config.parallelism.cpu_offload,
        bucket_cap_mb=config.model.ddp_bucket_cap_mb,
    )
    materialize(model, device, trained_on="cpu" if config.parallelism.cpu_offload else None)
    zero_vocabulary_padding(model, shard_of)
