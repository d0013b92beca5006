"""AdamW with stochastic rounding: against its formula in float64, exact means, and the bits of shards."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from kenotron.optim import stochastic_rounding
from kenotron.optim.state import init_state
from kenotron.optim.stochastic_rounding import StochasticAdamW, rounded
from support.ranks import run_ranks

SHAPES = {"matrix": (6, 10), "vector": (7,), "experts": (4, 3, 5), "scalar": ()}
PLACEMENTS = {"rows": [Shard(0), Replicate()], "columns": [Replicate(), Shard(1)], "both": [Shard(0), Shard(1)]}


def test_it_rounds_to_a_neighbour_and_to_the_number_itself_on_average():
    torch.manual_seed(0)
    values = torch.cat([torch.randn(40) * 10.0 ** torch.randint(-12, 12, (40,)), torch.tensor([1.001, 0.0, -3.0])])
    bits = torch.arange(1 << 16)[:, None]  # every outcome once
    outcomes = rounded(values.expand(1 << 16, -1).contiguous(), bits.expand(-1, len(values)), torch.bfloat16)
    assert outcomes.bfloat16().float().equal(outcomes)
    assert outcomes.double().mean(0).equal(values.double())
    step = (outcomes - values).abs()
    assert (step <= values.abs() * 2.0**-7).all(), "no further than the next number of bf16"


def test_what_is_not_finite_stays_so():
    values = torch.tensor([float("inf"), float("-inf"), float("nan")])
    found = rounded(values, torch.full((3,), 0xFFFF), torch.bfloat16)
    assert found[:2].equal(values[:2])
    assert found[2].isnan()


def test_small_steps_move_bf16_weights_by_the_right_amount_on_average():
    weight = nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    optimizer = StochasticAdamW([{"params": [weight]}], {weight: "weight"}, lr=1e-3)
    for _ in range(10):  # each step is of size lr, and no number of bf16 is nearer to 1 than 0.0039
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.dtype == torch.bfloat16
    assert weight.float().mean().item() == pytest.approx(0.99, abs=2e-4)
    assert (weight == 1).float().mean().item() < 0.1  # 0.74^10 of them: each step rounds anew


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(1)
    return {name: nn.Parameter(torch.randn(shape).bfloat16()) for name, shape in SHAPES.items()}


def trained(those: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Weights and moments after three steps."""
    optimizer = StochasticAdamW([{"params": list(those.values())}], {p: name for name, p in those.items()}, lr=0.01)
    init_state(optimizer)
    torch.manual_seed(2)
    for _ in range(3):
        for parameter in those.values():
            gradient = torch.randn(parameter.shape).bfloat16()
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()
    states = {name: {"w": p.detach(), **optimizer.state[p]} for name, p in those.items()}
    kept = {(name, key): value for name, state in states.items() for key, value in state.items()}
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in kept.items()}


def on_shards(rank: int, where: str) -> dict[str, torch.Tensor]:
    """In parts of a few elements, each with its own random numbers."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    those = {}
    for name, parameter in parameters().items():
        placements = [p if p.is_replicate() or p.dim < parameter.dim() else Replicate() for p in PLACEMENTS[where]]
        those[name] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stochastic_rounding, "AT_ONCE", 7)
        return trained(those)


@pytest.mark.parametrize("where", PLACEMENTS)
def test_shards_have_the_bits_of_the_whole(where: str):
    expected = trained(parameters())
    for found in run_ranks(4, on_shards, where):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key].equal(value), key
