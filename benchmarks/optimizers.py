"""What a step of each optimizer costs, beside torch's own fused AdamW on the same 17M parameters.

    python benchmarks/optimizers.py [--threads 1] [--rounds 7]
    python benchmarks/optimizers.py --ranks 2            # the same steps on shards, beside an even share of them

The model has the weights of training.py's 17M: hidden 384, 6 layers, intermediate 1024, vocabulary 8192, untied. All
candidates take turns in every round, so that a busy machine slows them alike; each line has the best round, and its
ratio to that of the first line.

With --ranks, weights are sharded as by ZeRO over ranks of one thread each. The ideal is what one process takes, divided
by the number of ranks: all work shared, and nothing sent.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from kenotron.config.optimizer import Optimizer
from kenotron.optim.build import build_optimizer
from kenotron.optim.clip import clip_gradients
from kenotron.optim.muon import matmul_dtype, orthogonalize

HIDDEN, LAYERS, INTERMEDIATE, VOCAB = 384, 6, 1024, 8192


class Layer(nn.Module):
    """The weights of a Llama block; no maths is needed here."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(HIDDEN, HIDDEN, bias=False))
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        self.input_layernorm = nn.RMSNorm(HIDDEN)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN)


def model() -> nn.Module:
    """17M parameters with gradients, under Hugging Face's names as far as Muon reads them."""
    root = nn.Module()
    root.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
    root.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
    root.norm = nn.RMSNorm(HIDDEN)
    root.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
    return root


def with_gradients(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
        local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        local.normal_(std=1e-3)
    return module


def ours(module: nn.Module, **factory: object) -> Callable[[], object]:
    config = Optimizer.model_validate(
        {
            "optimizer_factory": factory,
            "zero_stage": 0,
            "weight_decay": 0.1,
            "clip_grad": 1.0,
            "accumulate_grad_in_fp32": True,
            "learning_rate_scheduler": {"learning_rate": 1e-4},
        }
    )
    return build_optimizer(with_gradients(module).named_parameters(), config, dtype="bfloat16").step


def candidates() -> dict[str, Callable[[], object]]:
    """Name → one step, or one part of a step."""
    plain = with_gradients(model())
    wrapped = model()
    fully_shard(wrapped, mesh=init_device_mesh("cpu", (1,)))
    hidden = [p for layer in model().layers for p in layer.parameters() if p.ndim == 2]
    shapes = [[p.detach() for p in hidden if p.shape == shape] for shape in {p.shape for p in hidden}]
    dtype = matmul_dtype(torch.device("cpu"), torch.bfloat16)
    batches = [batch for same in shapes for batch in torch.stack(same).to(dtype).split(10)]

    def iterate() -> None:
        for batch in batches:
            orthogonalize(batch, 5)

    of_layers = with_gradients(model().layers)
    within, beyond = with_gradients(model()), with_gradients(model())
    return {
        "torch AdamW fused": torch.optim.AdamW(plain.parameters(), lr=1e-4, weight_decay=0.1, fused=True).step,
        "torch AdamW foreach": torch.optim.AdamW(plain.parameters(), lr=1e-4, weight_decay=0.1, foreach=True).step,
        "torch AdamW fused, the matrices": torch.optim.AdamW(of_layers.parameters(), lr=1e-4, fused=True).step,
        "adamW": ours(model(), name="adamW"),
        "adamW, FSDP on one rank": ours(wrapped, name="adamW"),
        "adamW, not fused": ours(model(), name="adamW", torch_adam_is_fused=False),
        "sgd, momentum": ours(model(), name="sgd", momentum=0.9),
        "muon": ours(model(), name="muon"),
        f"muon's iteration alone, {dtype}": iterate,
        "clip: norm only": lambda: clip_gradients(within.parameters(), None),
        "clip: norm and scale": lambda: clip_gradients(beyond.parameters(), 1e-9),
        "torch clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9),
    }


def on_ranks(rank: int, ranks: int, rounds: int, store: str) -> None:
    """Compare steps of one process with those of all ranks, in turns; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for name in ("adamW", "muon", "normuon", "soap"):
        wrapped = model()
        for layer in wrapped.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(wrapped, mesh=mesh)
        alone, shared = ours(model(), name=name), ours(wrapped, name=name)
        best = {"alone": float("inf"), "shared": float("inf")}
        for turn in range(rounds + 1):  # the first makes the state
            for which, step in (("alone", alone if rank == 0 else lambda: None), ("shared", shared)):
                dist.barrier()
                start = time.perf_counter()
                step()
                dist.barrier()
                best[which] = min(best[which], time.perf_counter() - start) if turn else best[which]
        if rank == 0:
            one, all_ranks = 1e3 * best["alone"], 1e3 * best["shared"]
            print(f"{name:12}{one:9.1f} ms alone{all_ranks:9.1f} ms shared{all_ranks * ranks / one:8.2f}x of the ideal")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.ranks > 1:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(on_ranks, (arguments.ranks, arguments.rounds, f"{folder}/store"), nprocs=arguments.ranks)
        return
    torch.set_num_threads(arguments.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    steps = candidates()
    best = dict.fromkeys(steps, float("inf"))
    for step in steps.values():
        step()  # makes the state
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            best[name] = min(best[name], time.perf_counter() - start)
    base = best["torch AdamW fused"]
    print(f"17M parameters, fp32, {arguments.threads} thread(s), torch {torch.__version__}")
    for name, seconds in best.items():
        print(f"{name:48}{1e3 * seconds:9.2f} ms{seconds / base:8.2f}x")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
