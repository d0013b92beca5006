"""Products through oneDNN are those of float64, with their gradients; torch computes the others, bit for bit."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron.kernels import products
from kenotron.kernels.experts import expert_mlp
from kenotron.kernels.fused import use_kernels
from kenotron.kernels.linear_cross_entropy import linear_cross_entropy
from kenotron.kernels.products import (
    ALONE,
    Exchange,
    Linears,
    adds_inside,
    backward_in_halves,
    is_zen_5,
    linear,
    on_onednn,
    rows_by_matrix,
    rows_by_rows,
)
from kenotron.models.blocks.linear import Linear

TOLERANCE = 2e-6  # of the largest element
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def of_processor(vendor: str, family: int, *flags: str) -> str:
    return f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nflags\t\t: fpu {' '.join(flags)}\n\n" * 2


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (of_processor("AuthenticAMD", 26, "avx2", "avx512f"), True),
        (of_processor("AuthenticAMD", 26, "avx2"), False),  # hidden by a hypervisor
        (of_processor("AuthenticAMD", 25, "avx2", "avx512f"), False),  # Zen 4
        (of_processor("GenuineIntel", 6, "avx2", "avx512f"), False),
        ("processor : 0\nCPU implementer : 0x41\n", False),
    ],
)
def test_processors_that_onednn_is_for(cpuinfo: str, expected: bool) -> None:
    assert is_zen_5(cpuinfo) == expected


@pytest.fixture(params=[False, True], ids=["torch", "onednn"])
def through_onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Products of any size through oneDNN, on every processor; or none."""
    monkeypatch.setattr(products, "ONEDNN", request.param)
    monkeypatch.setattr(products, "PART", 1000)
    monkeypatch.setattr(products, "SMALL", 1)
    return bool(request.param)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def assert_close(found: Tensor | None, expected: Tensor | None) -> None:
    assert (found.dtype, found.shape) == (torch.float32, expected.shape)
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "x",
    [draw(70, 48), draw(3, 17, 48), draw(48, 33).t(), draw(5, 96)[:, ::2], draw(1, 48).expand(9, 48), draw(0, 48)],
    ids=["rows", "sequences", "transposed", "strided", "expanded", "empty"],
)
@pytest.mark.parametrize("width", [1, 31, 200])
def test_a_linear_and_its_gradients(x: Tensor, width: int, bias: bool, through_onednn: bool) -> None:
    inputs = [x, draw(width, 48), *([draw(width)] if bias else [])]
    narrow = [each.detach().clone().requires_grad_() if each is not x else each.detach() for each in inputs]
    narrow[0].requires_grad_()
    wide = [each.detach().double().requires_grad_() for each in inputs]
    y, expected = linear(*narrow), F.linear(*wide)
    dy = draw(y.shape[-1]).expand(y.shape)
    gradients = torch.autograd.grad(y, narrow, dy)
    if not x.numel():
        assert (y.shape, gradients[1].abs().sum()) == (expected.shape, 0)
        return
    assert_close(y, expected)
    for found, wanted in zip(gradients, torch.autograd.grad(expected, wide, dy.double())):
        assert_close(found, wanted)


@pytest.mark.parametrize(("out_features", "in_features"), [(64, 20), (20, 64), (32, 32)])
def test_products_of_a_functions_own_backward(out_features: int, in_features: int, through_onednn: bool) -> None:
    x, y, matrix = draw(90, in_features), draw(90, out_features, seed=1), draw(out_features, in_features, seed=2)
    assert_close(rows_by_matrix(x, matrix), x.double() @ matrix.double().t())
    assert_close(rows_by_matrix(y, matrix.t()), y.double() @ matrix.double())
    assert_close(rows_by_rows(y, x), y.double().t() @ x.double())
    for product, of in ((rows_by_matrix, (x, matrix)), (rows_by_rows, (y, x))):
        plain = product(*of)
        out, onto = torch.empty_like(plain), torch.ones_like(plain)
        assert torch.equal(product(*of, out=out), plain)
        assert product(*of, onto=onto) is onto
        assert_close(onto, 1 + plain.double())


def test_a_matrix_with_gaps_is_copied_before() -> None:
    """oneDNN multiplies by such a one in a plain loop, a thousand times as slowly, and rounds otherwise."""
    x, matrix = draw(64, 96), draw(40, 200)[:, 50:146]
    for rows, by in ((x, matrix), (x[:, :40], matrix.t())):
        assert torch.equal(products.onednn(rows, by, None), products.onednn(rows, by.contiguous(), None))


def test_gradients_are_made_where_they_are_asked_for(through_onednn: bool) -> None:
    x, weight = draw(8, 16), draw(24, 16)
    assert not linear(x, weight).requires_grad
    with torch.no_grad():
        assert not linear(x.requires_grad_(), weight).requires_grad
    linear(x, weight).sum().backward()
    assert_close(x.grad, weight.double().sum(0).expand(8, 16))


@pytest.mark.parametrize("wanted", [0, 1])
def test_second_derivatives(wanted: int, through_onednn: bool) -> None:
    def second(linear_: Callable[..., Tensor], x: Tensor, weight: Tensor) -> list[Tensor]:
        inputs = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
        (first,) = torch.autograd.grad(linear_(*inputs).pow(3).sum(), inputs[wanted], create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), inputs))

    x, weight = draw(8, 16), draw(24, 16)
    for found, expected in zip(second(linear, x, weight), second(F.linear, x.double(), weight.double())):
        assert_close(found, expected)


def test_where_backward_is_split_torch_has_its_own_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator of ours computes both gradients whenever one is asked for."""
    monkeypatch.setattr(products, "ONEDNN", True)
    x, weight = draw(1024, 64).requires_grad_(), draw(64, 64).requires_grad_()
    assert "kenotron" in str(linear(x, weight).grad_fn)
    with backward_in_halves(True):
        assert "kenotron" not in str(linear(x, weight).grad_fn)
    assert "kenotron" in str(linear(x, weight).grad_fn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linears_of_one_input_add_their_gradients_inside_products(dtype: torch.dtype) -> None:
    """Of whole numbers that bf16 holds, so that nothing is rounded."""
    shapes = (2, 5, 6), (7, 6), (3, 6), (2, 6), (3,)
    x, *parameters = (draw(*shape, seed=seed).sign().requires_grad_() for seed, shape in enumerate(shapes))
    weights, bias = parameters[:3], parameters[3]
    found = Linears.apply(x.to(dtype), ALONE, *weights, None, bias, None)
    expected = [F.linear(x, weight, bias if weight is weights[1] else None) for weight in weights]
    upstream = [torch.ones_like(y).cumsum(-1) for y in expected]
    assert {y.dtype for y in found} == {dtype}
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.float(), other)
    gradients = torch.autograd.grad(found, (x, *parameters), [each.to(dtype) for each in upstream])
    for one, other in zip(gradients, torch.autograd.grad(expected, (x, *parameters), upstream), strict=True):
        assert torch.equal(one, other)


def times(factor: float, x: Tensor) -> Callable[[], Tensor]:
    return lambda: factor * x


@pytest.mark.parametrize("keep", [True, False])
def test_linears_exchange_x_and_its_gradient_compiled_or_not(keep: bool) -> None:
    inputs = [draw(4, 6).bfloat16(), draw(3, 6).sign(), draw(3).sign()]

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        (y,) = Linears.apply(x, Exchange(partial(times, 2.0), partial(times, 4.0), keep), weight, bias)
        return y.float().sum()

    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        x, weight, bias = (each.clone().requires_grad_() for each in inputs)
        function(x, weight, bias).backward()
        assert torch.equal(x.grad, 4 * weight.bfloat16().sum(0).expand(4, 6))
        assert torch.equal(weight.grad, (2 * x.float()).sum(0).bfloat16().float().expand(3, 6))
        assert torch.equal(bias.grad, torch.full((3,), 4.0))


def test_linears_add_inside_products_in_training_on_a_gpu() -> None:
    x = torch.empty(4, 6, device="meta")
    assert adds_inside(x)
    assert not adds_inside(x.new_empty(4, 6, device="cpu"))
    for within in (torch.no_grad(), use_kernels("torch"), backward_in_halves(True)):
        with within:
            assert not adds_inside(x)


class Doubled(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("when", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_linears_that_are_more_than_a_product_are_called_one_by_one(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kenotron.models.blocks.linear.adds_inside", lambda x: True)
    layers, seen = [kind(6, 3) for kind in (Linear, Linear, Doubled)], []
    for layer in layers:
        nn.init.ones_(layer.weight)
    x = draw(4, 6).requires_grad_()
    plain, _ = Linear.grouped(x, *layers[:2])
    assert "Linears" in str(plain.grad_fn)
    assert torch.equal(Linear.grouped(x, *layers)[2], 2 * plain)
    getattr(layers[0], f"register_{when}_hook")(lambda *given: seen.append(when))
    hooked, _ = Linear.grouped(x, *layers[:2])
    assert torch.equal(hooked, plain)
    hooked.sum().backward()
    assert seen == [when]


def test_what_onednn_is_not_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ONEDNN", True)
    x, weight = draw(1024, 64), draw(64, 64)
    assert on_onednn(x, weight)
    assert not on_onednn(x[:8], weight)
    assert not on_onednn(x.double(), weight.double())
    assert not on_onednn(x.bfloat16(), weight.bfloat16())
    assert not on_onednn(x.to("meta"), weight.to("meta"))
    with use_kernels("torch"):  # a run can leave all products to torch
        assert not on_onednn(x, weight)
    assert on_onednn(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x, weight), F.linear(x.bfloat16(), weight.bfloat16()))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_it_is_one_graph_with_the_same_numbers(backend: str, through_onednn: bool) -> None:
    def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return x + linear(F.silu(linear(x, up)), down)

    inputs = [draw(40, 32).requires_grad_(), draw(64, 32).requires_grad_(), draw(32, 64).requires_grad_()]
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    found = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
    for one, other in zip(found, torch.autograd.grad(block(*inputs).square().sum(), inputs)):
        assert_close(one, other.double())


def test_loss_and_experts_are_the_same_through_either(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = draw(96, 32).requires_grad_(), draw(200, 32).requires_grad_()
    labels = torch.arange(96) * 2
    weights = [draw(*shape).requires_grad_() for shape in ((4, 24, 32), (4, 24, 32), (4, 32, 24))]
    gate, up, down = weights
    routing = draw(96, 2).softmax(-1)
    choice = torch.stack([torch.arange(96) % 3, (torch.arange(96) + 1) % 3], 1)  # the last expert has no token

    def results() -> list[Tensor]:
        loss, _ = linear_cross_entropy(hidden, weight, labels, scale=1 / 96, z_loss=1e-3, chunk_bytes=40 * 800)
        y = expert_mlp(hidden, choice, routing, gate, up, down)
        return [loss, y, *torch.autograd.grad(loss, (hidden, weight)), *torch.autograd.grad(y.square().sum(), weights)]

    monkeypatch.setattr(products, "SMALL", 1)
    monkeypatch.setattr(products, "ONEDNN", False)
    expected = results()
    monkeypatch.setattr(products, "ONEDNN", True)
    for found, wanted in zip(results(), expected):
        assert_close(found.detach(), wanted.detach().double())
