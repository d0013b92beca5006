"""Llama's maths: logits, loss and every gradient are those of transformers' in fp32; angles those of float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.kernels.attention import attention
from kenotron.models import Context, named_parameters
from kenotron.models.blocks.rope import Rope
from kenotron.models.decoder import Decoder
from kenotron.models.families.llama import LlamaArchitecture
from support.tiny_llamas import SHAPES, VARIANTS, hf_llama, random_tokens

SEQUENCES, LENGTH = 3, 40
EXTRA: dict[str, dict[str, Any]] = {
    "yarn_with_attention_factor": {"rope_scaling": VARIANTS["yarn"]["rope_scaling"] | {"attention_factor": 1.3}},
    "default_rope_by_name": {"rope_scaling": {"rope_type": "default"}},
    "dynamic_within_the_trained_context": VARIANTS["dynamic"] | {"max_position_embeddings": LENGTH},
    "gelu_exact": {"hidden_act": "gelu"},
    "relu": {"hidden_act": "relu"},
}


def our_llama(vocab_multiple: int = 1, **changes: Any) -> Decoder:
    return Decoder(LlamaArchitecture(**(SHAPES | changes)), vocab_multiple)


def pair(**changes: Any) -> tuple[Any, Decoder]:
    """A model of transformers and one of ours with its weights, name by name."""
    theirs, ours = hf_llama(**changes), our_llama(**changes)
    given = dict(theirs.named_parameters())
    assert given.keys() == dict(named_parameters(ours)).keys()
    with torch.no_grad():
        for name, parameter in named_parameters(ours):
            parameter.copy_(given[name])
    return theirs, ours


def context(loss_scale: float = 1.0) -> Context:
    return Context((SEQUENCES, LENGTH), torch.arange(LENGTH).repeat(SEQUENCES), attention, loss_scale=loss_scale)


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels ``[SEQUENCES, LENGTH]``; some labels carry no loss."""
    tokens = random_tokens(SEQUENCES, LENGTH + 1)
    labels = tokens[:, 1:].clone()
    labels[0, :7] = -100
    return tokens[:, :-1], labels


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of a gradient, in the 2-norm."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).norm() / expected[n].norm()) for n in expected)


@pytest.mark.parametrize("variant", [*VARIANTS, *EXTRA])
def test_logits_loss_and_every_gradient_are_those_of_transformers(variant: str) -> None:
    theirs, ours = pair(**(VARIANTS | EXTRA)[variant])
    tokens, labels = batch()
    real = int((labels != -100).sum())
    logits = theirs(tokens).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected.backward()

    with torch.no_grad():
        found = ours(tokens.flatten(), context()).view_as(logits)
    assert (found - logits).abs().max() <= 1e-5 * logits.abs().max()
    loss, z_loss = ours(tokens.flatten(), context(loss_scale=1 / real), labels.flatten())
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert z_loss.item() == 0
    assert worst(gradients(ours), gradients(theirs)) < 2e-5


def test_z_loss_is_the_square_of_the_true_log_sum_exp_in_float64() -> None:
    weight = 0.3
    theirs, ours = pair()
    ours.lm_head.z_loss = 0.0
    _, zed = pair(z_loss_enabled=True, z_loss_coefficient=weight)
    tokens, labels = batch()
    logits = theirs(tokens).logits.flatten(0, 1)
    real = labels.flatten() != -100
    lse = logits.double()[real].logsumexp(-1)
    nll = lse - logits.double()[real].gather(1, labels.flatten()[real][:, None])[:, 0]
    expected = (nll + weight * lse**2).sum() / 50
    expected.backward()
    loss, z_part = zed(tokens.flatten(), context(loss_scale=1 / 50), labels.flatten())
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert z_part.item() == pytest.approx(float(weight * (lse.detach() ** 2).sum() / 50), rel=1e-6)
    assert worst(gradients(zed), gradients(theirs)) < 2e-5
    without, none = ours(tokens.flatten(), context(loss_scale=1 / 50), labels.flatten())
    assert none.item() == 0
    assert without.item() == pytest.approx(float(nll.detach().sum() / 50), rel=1e-6)


@pytest.mark.parametrize("variant", ["plain", "grouped_query", "tied", "attention_bias", "llama3"])
def test_bf16_over_fp32_weights_is_as_close_to_fp32_as_transformers_in_bf16(variant: str) -> None:
    """The yardstick is transformers with weights and activations in bf16; our masters and gradients stay fp32."""
    theirs, ours = pair(**VARIANTS[variant])
    tokens, labels = batch()
    exact = F.cross_entropy(theirs(tokens).logits.flatten(0, 1), labels.flatten())
    exact.backward()
    reference = gradients(theirs)

    rounded = hf_llama(**VARIANTS[variant]).bfloat16()
    F.cross_entropy(rounded(tokens).logits.float().flatten(0, 1), labels.flatten()).backward()
    yardstick = {name: gradient.float() for name, gradient in gradients(rounded).items()}

    ours.set_compute_dtype(torch.bfloat16)
    scale = 1 / int((labels != -100).sum())
    loss, _ = ours(tokens.flatten(), context(loss_scale=scale), labels.flatten())
    loss.backward()
    found = gradients(ours)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=5e-3)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    off = {
        name: [float((g[name] - expected).norm() / expected.norm()) for g in (found, yardstick)]
        for name, expected in reference.items()
    }
    assert sum(ours for ours, _ in off.values()) < 1.05 * sum(theirs for _, theirs in off.values())
    for name, (ours_off, theirs_off) in off.items():
        assert ours_off < 1.5 * theirs_off + 1e-3, f"{name}: {ours_off:.4f} against {theirs_off:.4f}"


@pytest.mark.parametrize(("scaling", "stretch"), [(None, 1.0), ({"rope_type": "linear", "factor": 4.0}, 4.0)])
def test_angles_at_4096_positions_are_those_of_float64(scaling: dict[str, object] | None, stretch: float) -> None:
    """fp32 is off by 4096 * 2^-24 radians; positions in bf16 would be off by up to 8 whole positions."""
    head_dim, theta = 64, 10_000.0
    cos, sin = Rope(head_dim, theta, scaling, 4096)(torch.arange(4096))
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64)
    angles = torch.arange(4096, dtype=torch.float64)[:, None] * theta ** (-pairs / head_dim) / stretch
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=5e-4)
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=5e-4)
