"""The global norm against float64 and torch, on plain tensors, one-rank FSDP and two gloo ranks."""

import math

import pytest
import torch
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from kenotron.optim import clip
from kenotron.optim.clip import clip_gradients, decides_alone, step_where_finite
from kenotron.parallel.mesh import build_mesh
from support.host_reads import HostReads
from support.ranks import run_ranks


def parameters_with_gradients(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for shape in ((300, 70), (70,), (), (0, 4), (33, 5, 2)):
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.randn(shape, generator=generator).to(dtype)
        parameters.append(parameter)
    return parameters


def float64_norm(parameters: list[nn.Parameter]) -> float:
    return math.sqrt(math.fsum((p.grad.double() ** 2).sum().item() for p in parameters))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_all_gradients_together(dtype):
    parameters = parameters_with_gradients(dtype)
    norm = clip_gradients(parameters, None)
    assert norm.dtype == torch.float32
    assert norm.shape == ()
    assert norm.item() == pytest.approx(float64_norm(parameters), rel=2e-6)  # one thread's dot of 21,000 is 1.4e-6 off


def test_a_long_gradient_keeps_six_digits():
    """The norm kernel adds in one chain and is off by 2e-5 at 17M numbers, more than layouts may differ."""
    parameter = nn.Parameter(torch.zeros(4_000_000))
    parameter.grad = torch.randn(4_000_000, generator=torch.Generator().manual_seed(1))
    assert clip_gradients([parameter], None).item() == pytest.approx(float64_norm([parameter]), rel=5e-7)


@pytest.mark.parametrize("bound", [1.5, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_branch_of_accelerators_reads_nothing_and_clips_the_same(dtype, bound, monkeypatch):
    """It runs on CPU tensors here: one norm kernel for all, and a scale that the host does not look at."""
    monkeypatch.setattr(clip, "reads_are_free", lambda x: False)
    monkeypatch.setattr(clip, "_sum_of_squares", clip._sum_of_squares_by_norm)
    parameters = parameters_with_gradients(dtype)
    before, expected = [p.grad.clone() for p in parameters], float64_norm(parameters)
    with HostReads() as reads:
        norm = clip_gradients(parameters, bound)
    assert reads.count == 0
    assert norm.item() == pytest.approx(expected, rel=1e-5)
    factor = min(1.0, bound / expected)
    for parameter, gradient in zip(parameters, before, strict=True):
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3}[dtype]
        torch.testing.assert_close(parameter.grad, gradient * factor, rtol=tolerance, atol=0)


@pytest.mark.parametrize("bound", [1e6, None])
def test_gradients_within_the_bound_keep_every_bit(bound):
    parameters = parameters_with_gradients()
    before = [p.grad.clone() for p in parameters]
    clip_gradients(parameters, bound)
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, before, strict=True))


def test_parameters_without_gradient_do_not_count():
    parameters = parameters_with_gradients()
    expected = clip_gradients(parameters, None)
    assert torch.equal(clip_gradients([nn.Parameter(torch.ones(3)), *parameters], None), expected)
    assert clip_gradients([nn.Parameter(torch.ones(3))], 1.0).item() == 0.0


def on_rank(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(1.0, 16.0).reshape(5, 3)  # five rows: the shards are uneven
    other = torch.full((4,), 2.0)
    summand = torch.full((2,), 1.0 + 2 * rank)  # 1 + 3 = 4 when summed

    sharded = nn.Parameter(DTensor.from_local(whole.chunk(2)[rank], mesh, [Shard(0)], shape=(5, 3), stride=(3, 1)))
    sharded.grad = DTensor.from_local(whole.chunk(2)[rank].clone(), mesh, [Shard(0)], shape=(5, 3), stride=(3, 1))
    replicated = nn.Parameter(DTensor.from_local(other, mesh, [Replicate()]))
    replicated.grad = DTensor.from_local(other.clone(), mesh, [Replicate()])
    partial = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
    partial.grad = DTensor.from_local(summand, mesh, [Partial()])
    plain = nn.Parameter(torch.zeros(3))
    plain.grad = torch.full((3,), 5.0)

    expected = math.sqrt((whole**2).sum().item() + 4 * 4 + 2 * 16 + 3 * 25)
    norm = clip_gradients([sharded, replicated, partial, plain], 1.0)
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(sharded.grad.full_tensor(), whole / expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(partial.grad.to_local(), torch.full((2,), 4.0 / expected), rtol=1e-6, atol=0)
    torch.testing.assert_close(plain.grad, torch.full((3,), 5.0 / expected), rtol=1e-6, atol=0)

    two_stages, one_stage = build_mesh({"pp": 2}, 2, "cpu"), build_mesh({"dp_shard": 2}, 2, "cpu")
    stage = nn.Parameter(torch.zeros(2))
    stage.grad = torch.full((2,), 3.0 + rank)  # 2 * 9 on one stage, 2 * 16 on the other
    assert clip_gradients([stage], 5.0, two_stages).item() == pytest.approx(math.sqrt(50), rel=1e-6)
    torch.testing.assert_close(stage.grad, torch.full((2,), (3.0 + rank) * 5 / math.sqrt(50)))
    stage.grad = torch.full((2,), 3.0 + rank)
    assert clip_gradients([stage], None, one_stage).item() == pytest.approx(math.sqrt(2) * (3 + rank))


def test_two_ranks_agree_on_the_norm_of_sharded_replicated_and_partial_gradients():
    run_ranks(2, on_rank)


def test_an_update_queued_before_the_norm_is_known_is_the_one_made_after() -> None:
    torch.manual_seed(0)
    after, before = ([nn.Parameter(torch.randn(50, 3)) for _ in range(3)] for _ in range(2))
    for a, b in zip(after, before):
        b.data.copy_(a.data)
    plain, alone = (torch.optim.AdamW(each, lr=0.1, weight_decay=0.1, fused=True) for each in (after, before))
    for scale in (1e-3, 3.0, float("nan"), 0.5):  # within the bound, beyond it, not finite, beyond it
        for a, b in zip(after, before):
            a.grad = torch.randn_like(a) * scale
            b.grad = a.grad.clone()
        if clip_gradients(after, 1.0).isfinite():
            plain.step()
        norm = clip_gradients(before, None)
        step_where_finite(alone, torch.stack((torch.tensor(2.0), norm)), norm, 1.0)
        assert not hasattr(alone, "found_inf")
        assert not hasattr(alone, "grad_scale")
    for a, b in zip(after, before):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)
        assert plain.state[a]["step"] == alone.state[b]["step"] == 3


def test_only_a_fused_adam_on_an_accelerator_decides_alone(monkeypatch) -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    fused, plain = (torch.optim.AdamW(parameters, fused=each) for each in (True, False))
    assert not decides_alone(fused)  # on a CPU the norm costs nothing to read, and small gradients no pass
    monkeypatch.setattr("kenotron.optim.clip.reads_are_free", lambda tensor: False)
    assert decides_alone(fused)
    assert not decides_alone(plain)
    assert not decides_alone(torch.optim.SGD(parameters))
