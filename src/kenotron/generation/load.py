"""Load a model for decoding from a Kénotron checkpoint or a Hugging Face folder, on any layout.

    model, tokenizer, config = load_for_generation("checkpoints/10")      # or "checkpoints": the newest one
    model, tokenizer, config = load_for_generation("exported/")           # config.json and safetensors
    model, tokenizer, config = load_for_generation(path, mesh=mesh)       # every rank of the mesh: its shards

A checkpoint has whole tensors on any layout, and every rank reads its own blocks of them:

    saved on dp 2 x pp 2 x tp 2           q_proj [64, 64]        read on tp 4: rank 1 reads rows 16 … 31

It has fp32 master weights; models trained in bf16 are decoded in bf16, with half the memory. Weights are read one
tensor at a time, so the host never holds the model twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kenotron.config.errors import NotSupportedYet
from kenotron.config.model import WEIGHT_DTYPES, Model
from kenotron.config.parallelism import Parallelism
from kenotron.generation.layout import check_layout
from kenotron.generation.model_on_ranks import ModelOnRanks
from kenotron.interop.sources import Source, check_shape, open_source, unpadded
from kenotron.kernels.tensor_shard import TensorShard
from kenotron.models import ModelPart, materialize
from kenotron.models.decoder import Decoder
from kenotron.parallel.device import best_device
from kenotron.parallel.mesh import Mesh
from kenotron.parallel.partial_gradients import check_plan
from kenotron.parallel.ranks import raise_on_any_rank
from kenotron.parallel.shards import shard_of
from kenotron.text.tokenizer import TextTokenizer, load_tokenizer

if TYPE_CHECKING:
    from kenotron.parallel.pipeline import Pipeline


class LoadedModel(NamedTuple):
    """A loaded model for `generate`, a `ModelOnRanks` if the mesh has several ranks.

    `tokenizer` is None if the checkpoint has none; `config` is the config's model section.
    """

    model: Decoder | ModelOnRanks
    tokenizer: TextTokenizer | None
    config: Model


def load_for_generation(
    path: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    mesh: Mesh | None = None,
    ema: bool = False,
) -> LoadedModel:
    """Build the model of `path` with its weights, in eval mode.

    `dtype` None is the config's `model.dtype`; `device` None is the accelerator, or without one the CPU. With a `mesh`
    of axes pp, dp_replicate, tp and ep every rank calls this; replicas along dp_replicate split the prompts, or decode
    the same ones if ep of them share the experts. `ema` loads the moving average of the weights instead.
    Raises InputError if `path` does not exist (with a near name), is no checkpoint or damaged, or if its family cannot
    decode or the mesh does not divide its shapes.
    """
    mesh = mesh or Mesh()
    # An error of one rank is then an error of all.
    on_all: Callable[[Callable[[], Any]], Any] = raise_on_any_rank if mesh.world_size > 1 else lambda work: work()
    source = on_all(lambda: open_source(path, verify=mesh.is_first, ema=ema))
    decoded_in = dtype_of(dtype or source.model.dtype)
    target = torch.device(device) if device is not None else best_device()
    check_layout(source.architecture, layout_of(mesh))
    on_all(lambda: check_plan(source.model, layout_of(mesh)))
    parts, pipeline = _on_mesh(source.model, decoded_in, mesh, target)

    def read() -> None:
        for part in parts:
            fill(part, source)

    on_all(read)
    tokenizer = load_tokenizer(source.tokenizer) if source.tokenizer else None
    alone = mesh.world_size == 1
    lockstep = mesh.degree("ep") > 1
    model = parts[0] if alone else ModelOnRanks(parts, mesh, target, pipeline, lockstep)
    return LoadedModel(model, tokenizer, source.model)


def layout_of(mesh: Mesh) -> Parallelism:
    """Return the degrees that split a model on `mesh`, without replicas."""
    return Parallelism(pp=mesh.degree("pp"), tp=mesh.degree("tp"), expert_parallel_size=mesh.degree("ep"))


def _on_mesh(
    model: Model, dtype: torch.dtype, mesh: Mesh, device: torch.device
) -> tuple[list[Decoder], Pipeline | None]:
    """Return this rank's parts of the model in `dtype` on `device`, uninitialized, and with pp their pipeline."""
    if mesh.degree("pp") == 1:
        return [_part(model, None, dtype, mesh, device)], None
    from kenotron.parallel.pipeline import Pipeline, parts_here

    layout = layout_of(mesh)
    parts = [_part(model, part, dtype, mesh, device) for part in parts_here(model, layout, mesh, length=1)]
    return parts, Pipeline(parts, mesh, layout, device, parts[0].stream_dtype)


def _part(model: Model, part: ModelPart | None, dtype: torch.dtype, mesh: Mesh, device: torch.device) -> Decoder:
    built = unpadded(model, mesh.degree("tp"), part)
    if mesh.degree("tp") > 1:
        from kenotron.parallel import tensor

        tensor.apply(built, built.plan, mesh)
    if mesh.expert_mesh is not None:
        from kenotron.parallel import experts

        experts.apply(built, built.plan, mesh)
    built.set_compute_dtype(dtype)
    untrained = [parameter for parameter in built.parameters() if not parameter.requires_grad]
    built.to(dtype)
    for parameter in untrained:  # the router's biases, in fp32 as in training, since bf16 would lose their steps
        parameter.data = parameter.data.float()
    materialize(built, device)
    return built.requires_grad_(False).eval()


@torch.no_grad()
def fill(part: Decoder, source: Source) -> None:
    """Read this rank's block of every parameter of `part`, copies of tied weights from their owners, and buffers."""
    copies = part.tied_copies()
    for name, parameter in part.named_parameters(remove_duplicate=True):
        rows = part.config.vocab_size if name in part.vocab_parameters else None
        _read(copies.get(name, name), shard_of(parameter), rows, source)
    for name, buffer in part.saved_buffers().items():
        check_shape(source, name, tuple(buffer.shape))
        buffer.copy_(source.weights[name])


def _read(name: str, shard: TensorShard, rows: int | None, source: Source) -> None:
    """Read the block `shard` of the source's tensor `name`, cast to its dtype; rows beyond `rows` are zeros."""
    real = shard if rows is None else shard.up_to(rows)
    check_shape(source, name, real.shape)
    if len(real.tensor):
        real.tensor.copy_(source.weights.block(name, shard.offset, tuple(real.tensor.shape)))
    shard.tensor[len(real.tensor) :].zero_()


def dtype_of(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype of a name.

    Raises InputError for a dtype that decoding does not support.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in WEIGHT_DTYPES:
        raise NotSupportedYet(f"generation in dtype {dtype!r} (supported: {', '.join(WEIGHT_DTYPES)})")
    return getattr(torch, dtype)
