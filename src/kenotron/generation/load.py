"""A model ready to decode, from a checkpoint of ours or from a Hugging Face folder, on any layout.

    model, tokenizer, config = load_for_generation("checkpoints/10")      # or "checkpoints": the newest there
    model, tokenizer, config = load_for_generation("exported/")           # config.json and safetensors
    model, tokenizer, config = load_for_generation(path, mesh=mesh)       # every rank of the mesh: its part

A checkpoint holds whole tensors whatever layout it was saved on, and every rank reads its own blocks of them:

    saved on dp 2 x pp 2 x tp 2           q_proj [64, 64]        read on tp 4: rank 1 reads rows 16 … 31

It holds fp32 masters; what was trained in bf16 is decoded in bf16, with half the memory. Weights come one tensor at a
time, so the host never holds the model twice.
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
from kenotron.generation.ranks import ModelOnRanks
from kenotron.interop.sources import Source, check_shape, open_source
from kenotron.kernels.tensor_shard import TensorShard
from kenotron.models import ModelPart, build, materialize
from kenotron.models.decoder import Decoder
from kenotron.parallel.device import best_device
from kenotron.parallel.mesh import Mesh
from kenotron.parallel.partial_gradients import check_plan
from kenotron.parallel.ranks import raise_on_any_rank
from kenotron.parallel.shards import shard_of
from kenotron.text.tokenizer import TextTokenizer, load_tokenizer

if TYPE_CHECKING:
    from kenotron.parallel.pipeline import Pipeline


class Loaded(NamedTuple):
    """`tokenizer` is None where the checkpoint has none; `config` is the config's model section.

    `model` is for `generate`; a `ModelOnRanks` where the mesh has several ranks.
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
) -> Loaded:
    """Build the model of `path` with its weights, in eval mode.

    `dtype` None is the config's `model.dtype`; `device` None the accelerator, or the CPU where there is none. With a
    `mesh` of axes pp, dp_replicate, tp and ep every rank calls this; replicas along dp_replicate share out the prompts,
    or decode the same ones where ep of them share the experts. `ema`: the moving average of the weights instead.
    Raises InputError: nothing at `path` (names what is near), not a checkpoint, damaged, not a family that
    can decode, or of a shape that the mesh does not divide.
    """
    mesh = mesh or Mesh()
    # An error of one is then an error of all.
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
    return Loaded(model, tokenizer, source.model)


def layout_of(mesh: Mesh) -> Parallelism:
    """What splits a model on `mesh`; replicas do not."""
    return Parallelism(pp=mesh.degree("pp"), tp=mesh.degree("tp"), expert_parallel_size=mesh.degree("ep"))


def _on_mesh(
    model: Model, dtype: torch.dtype, mesh: Mesh, device: torch.device
) -> tuple[list[Decoder], Pipeline | None]:
    """This rank's parts of the model in `dtype` on `device`, weights undefined, and with pp what runs them."""
    if mesh.degree("pp") == 1:
        return [_part(model, None, dtype, mesh, device)], None
    from kenotron.parallel.pipeline import Pipeline, parts_here

    layout = layout_of(mesh)
    parts = [_part(model, part, dtype, mesh, device) for part in parts_here(model, layout, mesh, length=1)]
    return parts, Pipeline(parts, mesh, layout, device, parts[0].stream_dtype)


def _part(model: Model, part: ModelPart | None, dtype: torch.dtype, mesh: Mesh, device: torch.device) -> Decoder:
    unpadded = model.model_copy(update={"make_vocab_size_divisible_by": 1})
    with torch.device("meta"):
        built = build(unpadded, mesh.degree("tp"), part)
    if mesh.degree("tp") > 1:
        from kenotron.parallel import tensor

        tensor.apply(built, built.plan, mesh)
    if mesh.expert_mesh is not None:
        from kenotron.parallel import experts

        experts.apply(built, built.plan, mesh)
    built.set_compute_dtype(dtype)
    untrained = [parameter for parameter in built.parameters() if not parameter.requires_grad]
    built.to(dtype)
    for parameter in untrained:  # the router's biases, in fp32 as in training: in bf16 their steps are lost
        parameter.data = parameter.data.float()
    materialize(built, device)
    return built.requires_grad_(False).eval()


@torch.no_grad()
def fill(part: Decoder, source: Source) -> None:
    """Read this rank's block of every parameter of `part`, a copy of a tied weight where its owner is, and buffers."""
    copies = part.tied_copies()
    for name, parameter in part.named_parameters(remove_duplicate=True):
        rows = part.config.vocab_size if name in part.vocab_parameters else None
        _read(copies.get(name, name), shard_of(parameter), rows, source)
    for name, buffer in part.saved_buffers().items():
        check_shape(source, name, tuple(buffer.shape))
        buffer.copy_(source.weights[name])


def _read(name: str, shard: TensorShard, rows: int | None, source: Source) -> None:
    """Tensor `name` of the source, cast, into the block that `shard` is of it. Beyond `rows` is padding: zeros."""
    real = shard if rows is None else shard.up_to(rows)
    check_shape(source, name, real.shape)
    if len(real.tensor):
        real.tensor.copy_(source.weights.block(name, shard.offset, tuple(real.tensor.shape)))
    shard.tensor[len(real.tensor) :].zero_()


def dtype_of(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a name.

    Raises InputError: a dtype that decoding does not support.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in WEIGHT_DTYPES:
        raise NotSupportedYet(f"generation in dtype {dtype!r} (supported: {', '.join(WEIGHT_DTYPES)})")
    return getattr(torch, dtype)
