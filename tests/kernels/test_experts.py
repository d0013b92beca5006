"""Experts' MLPs by sorted rows are the formula, expert by expert, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.kernels import products
from kenotron.kernels.experts import _with_room, expert_mlp
from support.plain_experts import expert_mlp_plain


def problem(tokens: int, experts: int, k: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """(x, weights, gate, up, down) that ask for gradients, and the choice of experts."""
    generator = torch.Generator().manual_seed(tokens + experts)
    hidden, width = 16, 12

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    tensors = [draw(tokens, hidden), draw(tokens, k), draw(experts, width, hidden), draw(experts, width, hidden)]
    choice = torch.rand(tokens, max(1, experts - 1), generator=generator).argsort(1)[:, :k]  # the last expert is idle
    return [*tensors, draw(experts, hidden, width)], choice


@pytest.mark.parametrize(
    ("dtype", "bound"),  # gradients of the routing weights are sums in fp32
    [(torch.float64, 5e-7), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)],
    ids=str,
)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "k", "act"), [(9, 4, 2, "silu"), (30, 7, 3, "gelu"), (5, 1, 1, "relu")])
def test_outputs_and_gradients_are_the_formula_in_float64(dtype, bound, gated, tokens, experts, k, act) -> None:
    given, choice = problem(tokens, experts, k, dtype)
    given[1] = given[1].detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()  # as in every run
    upstream = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    results = []
    for form, (x, weights, gate, up, down) in ((expert_mlp, given), (expert_mlp_plain, wide)):
        y = form(x, choice, weights, gate if gated else None, up, down, act)
        inputs = [x, weights, up, down, *([gate] if gated else [])]
        results.append([y, *torch.autograd.grad((y.double() * upstream).sum(), inputs)])
    assert results[0][0].dtype == dtype
    for found, expected in zip(*results):
        assert float((found.double() - expected).norm() / expected.norm()) < bound


@pytest.mark.parametrize("on_host", [True, False])
def test_dropped_slots_add_nothing_and_get_no_gradient(on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where group sizes stay on the device: `grouped_mm` runs on a CPU, too."""
    monkeypatch.setattr("kenotron.kernels.experts.reads_are_free", lambda sizes: on_host)
    (x, weights, *matrices), choice = problem(12, 5, 2, torch.float32)
    kept = torch.rand(choice.shape, generator=torch.Generator().manual_seed(2)) < 0.6
    choice, factors = choice.where(kept, 5), weights * kept
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((expert_mlp(x, choice, factors, *matrices) * upstream).sum(), (x, weights, *matrices))
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weights, *matrices)]
    y = expert_mlp_plain(wide[0], choice, wide[1] * kept, *wide[2:])
    expected = torch.autograd.grad((y * upstream).sum(), wide)
    assert all(torch.allclose(a.double(), b, atol=1e-4) for a, b in zip(found, expected))
    assert not found[1][~kept].any()


def test_an_idle_expert_has_a_gradient_of_zeros_where_the_gpus_kernel_leaves_others(monkeypatch):
    """As on Blackwell, pytorch/pytorch#172439: a group without rows keeps what was in the memory of its product."""
    plain = F.grouped_mm

    def grouped_mm(x: Tensor, matrices: Tensor, *, offs: Tensor) -> Tensor:
        y = plain(x, matrices, offs=offs)
        empty = offs.diff(prepend=offs.new_zeros(1)) == 0
        return y.masked_fill(empty[:, None, None], torch.nan) if y.dim() == 3 else y

    (x, weights, *matrices), choice = problem(9, 4, 2, torch.float32)
    expected = torch.autograd.grad(expert_mlp_plain(x, choice, weights, *matrices).sum(), (x, weights, *matrices))
    monkeypatch.setattr(F, "grouped_mm", grouped_mm)
    monkeypatch.setattr("kenotron.kernels.experts.reads_are_free", lambda sizes: False)
    found = torch.autograd.grad(expert_mlp(x, choice, weights, *matrices).sum(), (x, weights, *matrices))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected))
    assert all(torch.equal(gradient[-1], torch.zeros_like(gradient[-1])) for gradient in found[2:])  # the idle one's


def test_on_a_cpu_experts_have_few_numbers_of_rows_for_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN compiles a kernel for each number of rows; a step of 64 experts took twice as long with new routing."""
    found = set()
    for count in (*range(1, 600), *range(600, 9000, 37)):
        sizes = torch.tensor([count, 0])
        slot, w, at, room = _with_room(torch.arange(count), torch.ones(count, 1), sizes, torch.bfloat16)
        assert room[1] == 0
        assert count <= room[0] <= max(count * 9 // 8, count + 15)
        assert (len(slot), len(at), int((w != 0).sum())) == (room[0], count, count)
        found.add(room[0])
    assert len(found) < 80
    order, weights = torch.randperm(5), torch.rand(5, 1)
    slot, w, at, room = _with_room(order, weights, torch.tensor([2, 3]), torch.bfloat16)
    assert (room, at.tolist()) == ([16, 16], [0, 1, 16, 17, 18])
    assert torch.equal(slot[at], order)
    assert int((w != 0).sum()) == 5
    for onednn in (False, True):  # what fp32 is multiplied by
        monkeypatch.setattr(products, "ONEDNN", onednn)
        assert (_with_room(order, weights, torch.tensor([2, 3]), torch.float32)[2] is not None) == onednn
