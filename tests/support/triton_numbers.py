"""Run with TRITON_INTERPRET=1: errors of the kernels in Triton, in its interpreter on the CPU, printed as JSON.

Each line of the result is a case: the largest relative error of the output and of every gradient against the formula in
float64, and the largest difference from the reference in `kernels`. In fp32: the interpreter truncates in bf16.
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.config.dotted import import_dotted
from kenotron.kernels import experts as plain_experts
from kenotron.kernels import linear_cross_entropy as plain_loss
from kenotron.kernels import products, token_slots
from kenotron.kernels import rms_norm as plain_norm
from kenotron.kernels import rope as plain_rope
from kenotron.kernels import swiglu as plain_swiglu
from kenotron.kernels.attention import attention
from kenotron.kernels.triton import experts, rms_norm, rope, swiglu
from kenotron.models import Context, initialize_model
from kenotron.models.decoder import Decoder
from kenotron.models.families.llama import LlamaArchitecture
from kenotron.models.families.mixtral import MixtralArchitecture
from support.tiny_llamas import SHAPES, random_tokens

products.ONEDNN = False  # as on a GPU: on a CPU it gives experts rows that are not slots
Function = Callable[..., Tensor]
# A layer of a mixture in both passes.
EXPERTS = ["experts.gate_and_weigh", "experts.gate_and_weigh_backward", *["experts.sum_of_slots"] * 2]

Case = tuple[str, Function, Function, Function, tuple[Tensor, ...]]


def cases(dtype: torch.dtype = torch.float32) -> Iterator[Case]:
    """(name, ours, its reference, the formula, arguments in `dtype`); on the device of ``with torch.device(...)``."""
    for *functions, arguments in _cases():
        yield *functions, tuple(x.to(dtype) for x in arguments)  # type: ignore[misc]


def _cases() -> Iterator[Case]:
    for shape in ((1, 5), (3, 5, 64), (300, 2500)):  # 300 rows: more than the groups of the backward
        x, weight = torch.randn(shape) * 3, torch.rand(shape[-1])
        yield (
            f"rms_norm {shape}",
            lambda x, w: rms_norm.rms_norm(x, w, 1e-5),
            lambda x, w: plain_norm.rms_norm(x, w, 1e-5),
            lambda x, w: x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5) * w,
            (x, weight),
        )
    for shape in ((3,), (7, 301)):
        gate, up = torch.randn(shape) * 3, torch.randn(shape)
        yield f"swiglu {shape}", swiglu.silu_and_multiply, plain_swiglu.swiglu, lambda g, u: F.silu(g) * u, (gate, up)
    for shape in ((3, 5), (7, 1301)):  # 1301: two blocks of columns
        in_triton = experts.gate_and_weigh, experts.gate_and_weigh_backward
        in_torch = (
            lambda g, u, w: plain_experts._gate_and_weigh(g, u, w, "silu"),
            lambda d, g, u, w: plain_experts._gate_and_weigh_backward(d, g, u, w, "silu"),
        )
        yield (
            f"gate_and_weigh {shape}",
            lambda *tensors, both=in_triton: _Weighed.apply(*tensors, *both),
            lambda *tensors, both=in_torch: _Weighed.apply(*tensors, *both),
            lambda g, u, w: F.silu(g) * u * w,
            (torch.randn(shape) * 3, torch.randn(shape), torch.rand(shape[0], 1)),
        )
    for tokens, slots, features, dropped in ((5, 3, 7, 0), (4, 2, 1100, 3)):
        order = torch.randperm(tokens * slots)[: tokens * slots - dropped]
        yield (
            f"sum_of_slots {tokens} {slots} {features} {dropped}",
            lambda x, o=order, t=tokens, k=slots: _Summed.apply(x, o, t, k, experts.sum_of_slots),
            lambda x, o=order, t=tokens, k=slots: _Summed.apply(x, o, t, k, token_slots.sum_of_slots),
            lambda x, o=order, t=tokens, k=slots: x.new_zeros(t, x.shape[1]).index_add(0, o // k, x),
            (torch.randn(len(order), features),),
        )
    shapes = ((3, 8, 8, False), (4, 8, 8, True), (2, 12, 6, False), (1, 16, 8, True))
    for heads, head_dim, turning, interleaved in shapes:
        angles = torch.rand(2, 7, turning // 2) * 6
        tables = (angles.cos(), angles.sin())
        yield (
            f"rope {heads} {head_dim} {turning} {interleaved}",
            lambda x, t=tables, i=interleaved: rope.apply_rope(x[..., 1:], *t, i),  # heads that lie apart in memory
            lambda x, t=tables, i=interleaved: plain_rope.apply_rope(x[..., 1:], *t, i),
            lambda x, a=angles, i=interleaved: turned(x[..., 1:], a, i),
            (torch.randn(2, 7, heads, head_dim + 1),),
        )
    for tokens, vocabulary, z_loss in ((5, 33, 0.0), (13, 4101, 1e-2)):  # 4101: two blocks of columns
        labels = torch.randint(0, vocabulary, (tokens,))
        labels[::4] = -100
        yield (
            f"cross_entropy {tokens} {vocabulary}",
            lambda h, w, y=labels, z=z_loss: loss_in_triton(h, w, y, z),
            lambda h, w, y=labels, z=z_loss: plain_losses(h, w, y, z),
            lambda h, w, y=labels, z=z_loss: loss_formula(h, w, y, z),
            (torch.randn(tokens, 8), torch.randn(vocabulary + 7, 8) / 4),  # 7 rows pad the vocabulary
        )


class _Weighed(torch.autograd.Function):
    """A form of ``silu(gate) * up * weights``, as the forward and the backward pass of experts call it."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weights: Tensor, forward: Function, backward: Function) -> Tensor:
        ctx.backward_form = backward
        out = forward(gate, up, weights)
        ctx.save_for_backward(gate, up, weights, out.clone())
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        *tensors, out = ctx.saved_tensors
        dgate, dup, again, dweights = ctx.backward_form(upstream[0].clone(), *tensors)
        assert dweights.dtype == torch.float32
        torch.testing.assert_close(again, out)
        return dgate, dup, dweights[:, None].to(out.dtype), None, None


class _Summed(torch.autograd.Function):
    """A form of `sum_of_slots`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, tokens: int, slots: int, form: Function) -> Tensor:
        ctx.token = order // slots
        return form(rows, order, tokens, slots)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return upstream[0][ctx.token], None, None, None, None


def plain_losses(hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float) -> Tensor:
    """The loss by `linear_cross_entropy`, in chunks of 4 tokens; with a z-loss also a softcap of 5, as under tp."""
    alone = plain_loss.VocabularyRanks(0, lambda x: x, lambda x: x)
    options = {"scale": 0.5, "z_loss": z_loss, "valid_rows": len(weight) - 7, "chunk_bytes": 16 * len(weight)}
    options |= {"softcap": 5.0, "ranks": alone} if z_loss else {}
    loss, _ = plain_loss.linear_cross_entropy(hidden, weight, labels, **options)  # type: ignore[arg-type]
    return loss.to(hidden.dtype)


def loss_in_triton(*arguments: Any) -> Tensor:
    """The same with the kernel, on any device."""
    with patch.object(plain_loss, "fused", lambda name, x: import_dotted(f"kenotron.kernels.triton.{name}", "here")):
        return plain_losses(*arguments)


def loss_formula(hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float) -> Tensor:
    """``0.5 sum (lse - logit[label] + z lse**2)`` over tokens with a label."""
    real = labels != -100
    logits = (hidden @ weight[:-7].T)[real]
    logits = 5 * torch.tanh(logits / 5) if z_loss else logits
    lse = logits.logsumexp(-1)
    return 0.5 * (lse - logits[torch.arange(len(lse)), labels[real]] + z_loss * lse**2).sum()


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Each pair of channels as a complex number times exp(i angle)."""
    turning = 2 * angles.shape[-1]
    pairs = x[..., :turning]
    pairs = pairs.unflatten(-1, (-1, 2)) if interleaved else pairs.unflatten(-1, (2, -1)).transpose(-1, -2)
    unit = torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double()).unsqueeze(-2)
    both = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * unit)
    both = both.flatten(-2) if interleaved else both.transpose(-1, -2).flatten(-2)
    return torch.cat((both, x[..., turning:]), dim=-1)


def results(function: Function, arguments: tuple[Tensor, ...]) -> list[Tensor]:
    """Its output and the gradients of all arguments."""
    leaves = [x.detach().clone().requires_grad_() for x in arguments]
    out = function(*leaves)
    torch.manual_seed(5)
    out.backward(torch.randn(out.shape).to(out))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def distance(some: list[Tensor], others: list[Tensor]) -> float:
    """The largest relative difference."""
    assert len(some) == len(others)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(some, others))


def a_models_gradients(in_triton: bool, mixture: bool) -> list[Tensor]:
    """The loss of a small Llama or Mixtral and its gradients, with the kernels that a GPU would have, or without."""
    config = MixtralArchitecture(**SHAPES, num_local_experts=4) if mixture else LlamaArchitecture(**SHAPES)
    model = Decoder(config)
    initialize_model(model, std=0.2, scaling="NUM_LAYERS", seed=1)
    tokens, positions = random_tokens(2, 16).flatten(), torch.arange(16).repeat(2)
    calls = []

    def on_any_device(name: str, x: Tensor) -> Function | None:
        calls.append(name)
        return import_dotted(f"kenotron.kernels.triton.{name}", "here") if in_triton else None

    for module in (plain_norm, plain_rope, plain_swiglu, plain_loss, plain_experts, token_slots):
        module.fused = on_any_device  # type: ignore[attr-defined]
    loss, _ = model(tokens, Context((2, 16), positions, attention), tokens.roll(-1))
    loss.backward()
    layers = model.config.num_hidden_layers
    of_a_layer = ["rms_norm.rms_norm", "rope.apply_rope"] * 2
    of_a_layer += EXPERTS if mixture else ["swiglu.silu_and_multiply"]
    assert sorted(calls) == sorted([*of_a_layer * layers, "rms_norm.rms_norm", "cross_entropy.exp_rows_"])
    return [loss.detach(), *(x.grad for x in model.parameters() if x.grad is not None)]


if __name__ == "__main__":
    torch.manual_seed(0)
    found = {}
    for name, ours, reference, formula, arguments in cases():
        here = results(ours, arguments)
        exact = results(formula, tuple(x.double() for x in arguments))
        found[name] = (distance(here, exact), distance(here, results(reference, arguments)))
    for name, mixture in (("a Llama", False), ("a Mixtral", True)):
        whole = distance(a_models_gradients(True, mixture), a_models_gradients(False, mixture))
        found[name] = (whole, whole)
    sys.stdout.write(json.dumps(found))
