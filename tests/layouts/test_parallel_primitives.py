"""The primitives of parallelism: on two ranks, by data or by tensor, gradients at step 1 are one process's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from kenotron.kernels.attention import attention
from kenotron.models import Context, initialize_model, materialize
from kenotron.models.decoder import Decoder
from kenotron.models.families.llama import LlamaArchitecture
from kenotron.parallel import data, tensor
from kenotron.parallel.collectives import any_rank, copy_to, sum_over_ranks
from kenotron.parallel.mesh import Mesh, build_mesh
from kenotron.parallel.shards import shard_of
from support.layout_runs import Problem, prepared
from support.ranks import ROUNDING, relative_error, run_ranks

SEQUENCES, LENGTH, VOCAB = 4, 16, 50
TOKENS = SEQUENCES * LENGTH


def small_llama(tied: bool) -> Decoder:
    config = LlamaArchitecture(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=VOCAB,
        tie_word_embeddings=tied,
        z_loss_enabled=True,
        z_loss_coefficient=0.01,
    )
    with torch.device("meta"):
        return Decoder(config)


def batch(sequences: slice) -> tuple[torch.Tensor, torch.Tensor, Context]:
    """Some sequences of the one global batch, with the global weight of a token's loss."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=generator)[sequences]
    positions = torch.arange(LENGTH).repeat(len(tokens))
    ctx = Context((len(tokens), LENGTH), positions, attention, loss_scale=1 / TOKENS)
    return tokens[:, :-1].reshape(-1), tokens[:, 1:].reshape(-1), ctx


def step(model: Decoder, sequences: slice) -> tuple[float, dict[str, torch.Tensor]]:
    materialize(model, "cpu")
    initialize_model(model, std=0.2, scaling="NUM_LAYERS", seed=7, shard_of=shard_of)
    tokens, labels, ctx = batch(sequences)
    loss, _ = model(tokens, ctx, labels)
    loss.backward()
    gradients = {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in model.named_parameters()
    }
    return loss.item(), gradients


def data_parallel_rank(rank: int, tied: bool, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    mesh = build_mesh({"dp_shard": 2}, 2, "cpu")
    model = small_llama(tied)
    model.set_compute_dtype(dtype)
    data.apply(model, list(model.model.layers.values()), mesh, zero_stage=2, compute_dtype=dtype)
    half = SEQUENCES // 2
    return step(model, slice(rank * half, (rank + 1) * half))


def tensor_parallel_rank(rank: int, tied: bool) -> tuple[float, dict[str, torch.Tensor]]:
    mesh = build_mesh({"tp": 2}, 2, "cpu")
    model = small_llama(tied)
    tensor.apply(model, model.plan, mesh)
    return step(model, slice(None))


@pytest.mark.parametrize("tied", [False, True])
def test_two_data_parallel_ranks_have_one_process_gradients(tied: bool) -> None:
    loss, expected = step(small_llama(tied), slice(None))
    (loss0, gradients), (loss1, _) = run_ranks(2, data_parallel_rank, tied, torch.float32)
    assert loss0 + loss1 == pytest.approx(loss, rel=ROUNDING)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected[name]) < ROUNDING, name


def test_bf16_with_fp32_masters_means_the_same_on_one_rank_and_sharded_over_two() -> None:
    model = small_llama(tied=False)
    model.set_compute_dtype(torch.bfloat16)
    loss, expected = step(model, slice(None))
    (loss0, gradients), (loss1, _) = run_ranks(2, data_parallel_rank, False, torch.bfloat16)
    assert loss0 + loss1 == pytest.approx(loss, rel=1e-3)
    for name, gradient in gradients.items():
        assert gradient.dtype == expected[name].dtype == torch.float32
        assert relative_error(gradient, expected[name]) < 1e-2, name


@pytest.mark.parametrize("tied", [False, True])
def test_two_tensor_parallel_ranks_have_one_process_gradients(tied: bool) -> None:
    loss, expected = step(small_llama(tied), slice(None))
    results = run_ranks(2, tensor_parallel_rank, tied)
    for rank_loss, gradients in results:
        assert rank_loss == pytest.approx(loss, rel=ROUNDING)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert relative_error(gradient, expected[name]) < ROUNDING, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_one_rank_nothing_is_wrapped(dtype: str, tmp_path: Path) -> None:
    """The trained model is the model file's own: no module of another class, no hook, no DTensor, no process group."""
    config = Problem("plain", (f"model.dtype={dtype}", "optimizer.zero_stage=3")).config("", tmp_path)
    with prepared(config, Mesh()) as run:
        with torch.device("meta"):
            plain = Decoder(config.model.architecture)
        assert run.pipeline is None
        assert run.mesh.device_mesh is None
        assert not torch.distributed.is_initialized()
        assert [type(module) for module in run.model.modules()] == [type(module) for module in plain.modules()]
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        assert not any(getattr(module, name) for module in run.model.modules() for name in hooks)
        assert all(type(parameter) is torch.nn.Parameter for parameter in run.model.parameters())
        assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
        assert not hasattr(run.model, "gradient_buckets")


def gradients_beside_a_copy(rank: int) -> list[list[float]]:
    x, z = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    upstream = torch.full((3,), rank + 1.0)
    (z + copy_to(x, dist.group.WORLD)).backward(upstream)
    assert x.grad is not None
    assert z.grad is not None
    return [x.grad.tolist(), z.grad.tolist(), upstream.tolist()]


def test_the_sum_of_a_copys_gradients_leaves_those_beside_it_alone() -> None:
    """Autograd gives both terms of a sum one tensor."""
    for rank, found in enumerate(run_ranks(2, gradients_beside_a_copy)):
        assert found == [[3.0] * 3, [rank + 1.0] * 3, [rank + 1.0] * 3]


def host_numbers(rank: int) -> tuple[list[int], list[bool]]:
    mesh, cpu = build_mesh({"dp_shard": 3, "tp": 2}, 6, "cpu"), torch.device("cpu")
    sums = [sum_over_ranks(2**40 + rank, group, cpu) for group in (mesh.group("world"), mesh.group("batch"))]
    return sums, [any_rank(rank == 4, 6, cpu), any_rank(False, 6, cpu)]


def test_hosts_sum_their_numbers_over_the_ranks_of_a_group() -> None:
    for rank, (sums, votes) in enumerate(run_ranks(6, host_numbers)):
        assert sums == [6 * 2**40 + 15, 3 * 2**40 + sum(range(rank % 2, 6, 2))]
        assert votes == [True, False]
