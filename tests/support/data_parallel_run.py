"""Three steps of a small Llama under one data-parallel layout, and everything that a test may want to know of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from kenotron.config.optimizer import Optimizer
from kenotron.kernels.attention import attention
from kenotron.models import Context, MicroBatch, initialize_model, materialize, named_parameters
from kenotron.models.decoder import Decoder
from kenotron.models.families.llama import LlamaArchitecture
from kenotron.optim.build import build_optimizer
from kenotron.optim.clip import clip_gradients
from kenotron.parallel import data, tensor
from kenotron.parallel.mesh import Mesh, build_mesh
from kenotron.parallel.shards import local_tensor, shard_of

LENGTH, VOCAB = 12, 50
STEPS = 3


@dataclass(frozen=True)
class Layout:
    """`degrees` are the mesh's. Even sizes divide by 4; the others leave ranks with less than others, or nothing."""

    degrees: tuple[tuple[str, int], ...] = ()
    zero_stage: int = 0
    micro_batches: int = 1  # of each rank, a step
    bf16: bool = False
    tied: bool = False
    even: bool = True
    recompute: bool = False
    compile: bool = False
    strategy: str | None = None
    cpu_offload: bool = False
    bucket_kb: int = 16  # KiB of gradients that stage 0 sums together; a projection has 4
    announced: bool = True  # the last micro-batch; a pipeline's schedule has no moment for it

    @property
    def alone(self) -> Layout:
        """The same steps by one process: as many sequences a step, in as many micro-batches."""
        return replace(self, degrees=(), zero_stage=0, compile=False, strategy=None, cpu_offload=False)

    @property
    def ranks(self) -> int:
        return prod(dict(self.degrees).values())


@dataclass
class Record:
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]  # of the first step, whole
    weights: dict[str, Tensor]  # of the end, whole
    collectives: list[list[str]]  # of each micro-batch of the second step
    bytes: dict[str, int]


def model_of(layout: Layout) -> Decoder:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes: dict[str, Any] = dict(zip(names, (32, 48, 4, 2) if layout.even else (18, 27, 3, 1)))
    sizes |= {"num_hidden_layers": 2, "vocab_size": VOCAB, "tie_word_embeddings": layout.tied}
    config = LlamaArchitecture(**sizes, z_loss_enabled=True, z_loss_coefficient=0.01)
    with torch.device("meta"):
        return Decoder(config)


def micro_batches(step: int, layout: Layout, rank: int, ranks: int, sequences: int) -> list[MicroBatch]:
    """This rank's share of the `sequences` of a step, which have very different numbers of real tokens."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (sequences, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for sequence in range(sequences):
        labels[sequence, sequence % LENGTH + 1 :] = -100
    scale = 1 / int((labels != -100).sum())
    mine = torch.arange(rank, sequences, ranks).chunk(layout.micro_batches)
    return [
        MicroBatch(
            tokens[some, :-1].reshape(-1),
            labels[some].reshape(-1),
            Context((len(some), LENGTH), torch.arange(LENGTH).repeat(len(some)), attention, loss_scale=scale),
        )
        for some in mine
    ]


class Collectives(TorchDispatchMode):
    """Names every collective that is begun."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in name:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def build(layout: Layout, mesh: Mesh) -> Decoder:
    model = model_of(layout)
    dtype = torch.bfloat16 if layout.bf16 else torch.float32
    tensor.apply(model, model.plan, mesh, mode="REDUCE_SCATTER")
    model.set_recompute(layout.recompute)
    blocks = list(model.model.layers.values())
    if layout.compile:
        for block in blocks:
            block.compile()
    model.set_compute_dtype(dtype)
    settings = {"cpu_offload": layout.cpu_offload, "bucket_cap_mb": layout.bucket_kb / 1024}
    strategy = data.load_strategy(layout.strategy)
    strategy(model, blocks, mesh, zero_stage=layout.zero_stage, compute_dtype=dtype, **settings)
    materialize(model, "cpu")
    initialize_model(model, std=0.2, scaling="NUM_LAYERS", seed=7, shard_of=shard_of)
    return model


def as_on_gpus(root: nn.Module, blocks: list[nn.Module], mesh: Mesh, **settings: Any) -> None:
    """Our strategy with the gathers ahead of time that it asks for on GPUs; `Collectives` sees blocks compute, too."""
    data.apply(root, blocks, mesh, **settings)
    data.gather_ahead(root, blocks, settings["zero_stage"])
    for number, block in enumerate(blocks):
        block.mlp.register_forward_pre_hook(partial(_note, f"block {number}"))
        block.mlp.register_full_backward_pre_hook(partial(_note, f"block {number}"))


def _note(name: str, *arguments: Any) -> None:
    mode = _get_current_dispatch_mode()
    assert isinstance(mode, Collectives)
    mode.names.append(name)


def optimizer_of(model: Decoder) -> torch.optim.Optimizer:
    section = {"optimizer_factory": {"name": "adamW"}, "zero_stage": None, "weight_decay": 0.1}
    section |= {"clip_grad": 1.0, "accumulate_grad_in_fp32": True, "learning_rate_scheduler": {"learning_rate": 0.01}}
    return build_optimizer(named_parameters(model), Optimizer.model_validate(section))


def whole(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def local_bytes(tensors: Any) -> int:
    return sum(local_tensor(tensor).nbytes for tensor in tensors)


def train(rank: int, layout: Layout, sequences: int) -> Record:
    """`STEPS` steps of `layout`; loss and norm are the layout's, not this rank's."""
    tp = dict(layout.degrees).get("tp", 1)
    mesh = build_mesh(dict(layout.degrees), layout.ranks, "cpu")
    model = build(layout, mesh)
    optimizer = optimizer_of(model)
    record = Record([], [], {}, {}, [], {})
    for step in range(STEPS):
        total = torch.zeros(())
        batches = micro_batches(step, layout, rank // tp, layout.ranks // tp, sequences)
        for number, batch in enumerate(batches, start=1):
            with Collectives() as seen:
                if layout.announced:
                    data.set_last_micro_batch(model, last=number == len(batches))
                loss, _ = model(batch.tokens, batch.ctx, batch.labels)
                loss.backward()
                if number == len(batches):
                    data.finish_gradients(model)
            if step == 1:
                record.collectives.append(seen.names)
            total += loss.detach()
        if layout.ranks > 1:
            torch.distributed.all_reduce(total)
            total /= tp  # whose ranks all have the whole loss
        if step == 0:
            record.gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
        norm = clip_gradients(model.parameters(), 1.0, mesh)
        record.bytes["gradients"] = local_bytes(p.grad for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        record.losses.append(total.item())
        record.norms.append(norm.item())
    record.weights = {name: whole(p) for name, p in model.named_parameters()}
    record.bytes["weights"] = local_bytes(model.parameters())
    record.bytes["state"] = local_bytes(t for s in optimizer.state.values() for t in s.values() if t.dim())
    return record
