"""Mamba-2's scan as matrix products: state-space duality (Dao & Gu 2024, arXiv 2405.21060, section 6).

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T        state h [head_dim, n] of a head, one decay for all of it
    y_t = h_t C_t + D x_t

With a scalar decay, a sequence is attention without softmax, y = (L ∘ C B^T) (dt x), where L[t, s] is the product of
the decays from s to t. Tokens of a chunk are computed this way, and a state is passed to the next chunk:

    chunk 0 [L ∘ C B^T] ─ state ─▶ chunk 1 [L ∘ C B^T] ─ state ─▶ …       work grows with length x chunk

    decay 0.5 per token, chunk of 3:  L = 1    0    0        state: 0.125 of the old one, and the tokens' times
                                          0.5  1    0               0.25, 0.5, 1
                                          0.25 0.5  1

Every exponential is of a sum of negative numbers, and masked first, so nothing overflows in either half of L.
Backward is autograd's. A document that begins inside a chunk masks L and the states there.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.kernels.mamba_packages import packaged

# Tokens per chunk. Milliseconds of CPU time, forward and backward of 1024 tokens, 24 heads of 64, 128 states (fp32, 1
# thread): chunks of 16, 32, 64, 128, 256 take 230, 133, 111, 156, 268.
CHUNK = 64
PACKAGED = (torch.bfloat16, torch.float16)  # dtypes for mamba_ssm: products of fp32 keep 10 bits there (TF32)


def state_space_dual(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    starts: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the scan of every sequence, and its state after the last token.

    x ``[sequences, length, heads, head_dim]``; dt ``[sequences, length, heads]``, positive; a, d ``[heads]``, a
    negative; b, c ``[sequences, length, groups, n]``: heads ``h // (heads / groups)`` share them. `starts`
    ``[sequences, length]``: True where a document begins; None: only at the first token. `state`
    ``[sequences, heads, head_dim, n]`` before the first token; None: zeros. A token with dt 0 does not change the
    state. It is computed in fp32, or in float64 if x is; y has x's dtype and shape, the state is in fp32. In bf16 and
    fp16 on a GPU, the package mamba_ssm is used if it is installed.
    """
    if x.dtype in PACKAGED and (kernel := packaged("state_space_dual", x)):
        return kernel(x, dt, a, b, c, d, starts, state)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    (sequences, length, heads, head_dim), (groups, n) = x.shape, b.shape[2:]
    chunk = min(CHUNK, length)
    by_group = (groups, heads // groups)
    inputs = _by_chunk((x * dt[..., None]).to(wide), chunk).unflatten(3, by_group)  # [sequences, chunks, q, g, r, p]
    b, c = (_by_chunk(each.to(wide), chunk).transpose(2, 3) for each in (b, c))  # [sequences, chunks, g, q, n]
    rates = _by_chunk((dt * a).to(wide), chunk).unflatten(3, by_group).movedim(2, -1)  # [sequences, chunks, g, r, q]
    between = _sums_between(rates)
    documents = None if starts is None else _by_chunk(starts[..., None], chunk)[..., 0].cumsum(-1)

    within = _among_themselves(between, b, c, inputs, documents)
    begins, last = _states(rates, between, b, inputs, documents, _grouped(state, x, groups, n, wide))
    carried = (c @ begins.flatten(-2)).unflatten(-1, (-1, head_dim))  # [sequences, chunks, g, q, r, p]
    left = _masked_exp(_sums_up_to(rates, -1), None if documents is None else documents == 0)
    y = within.transpose(3, 4) + carried * left.transpose(3, 4)[..., None]
    y = y.transpose(2, 3).reshape(sequences, -1, heads, head_dim)[:, :length]
    return (y + d.to(wide)[:, None] * x).to(x.dtype), last.movedim(2, -1).flatten(1, 2)


def _by_chunk(x: Tensor, chunk: int) -> Tensor:
    """Return ``[sequences, length, …]`` as ``[sequences, chunks, chunk, …]``, padded with zeros at the end."""
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % chunk)).unflatten(1, (-1, chunk))


def _grouped(state: Tensor | None, like: Tensor, groups: int, n: int, wide: torch.dtype) -> Tensor:
    """Return the first state as ``[sequences, groups, n, heads of a group, head_dim]``."""
    sequences, _, heads, head_dim = like.shape
    if state is None:
        return like.new_zeros(sequences, groups, n, heads // groups, head_dim, dtype=wide)
    return state.to(wide).unflatten(1, (groups, -1)).movedim(-1, 2)


def _sums_between(rates: Tensor) -> Tensor:
    """Return ``[…, q, q]`` for ``[…, q]``: at [t, s] the sum over s + 1 … t; 0 for s >= t.

    It sums separately for every s: a difference of two sums from the start of the chunk would lose digits if decay is
    strong, and in backward leave only rounding errors.
    """
    chunk = rates.shape[-1]
    after = torch.ones(chunk, chunk, dtype=torch.bool, device=rates.device).tril(-1)
    return _sums_up_to(rates[..., None].expand(*rates.shape, chunk).masked_fill(~after, 0.0), -2)


def _sums_up_to(x: Tensor, dim: int) -> Tensor:
    """Return cumsum; as a matrix product if algorithms must be deterministic, since torch's on a GPU is not."""
    if not torch.are_deterministic_algorithms_enabled() or x.device.type == "cpu":
        return x.cumsum(dim)
    return _sums_by_product(x, dim)


def _sums_by_product(x: Tensor, dim: int) -> Tensor:
    lower = torch.ones(x.shape[dim], x.shape[dim], dtype=x.dtype, device=x.device).tril()
    return (x.movedim(dim, -1) @ lower.mT).movedim(-1, dim)


def _masked_exp(exponent: Tensor, mask: Tensor | None) -> Tensor:
    """Return exp where the mask ``[sequences, chunks, …]`` is set, else 0; groups and heads are between its axes.

    Factors below the third power of the dtype's eps become 0: they would only make products with subnormal numbers,
    which take a CPU many times as long (Mamba-2 of 2 layers of 768: 900 ms a step → 660).
    """
    if mask is not None:
        exponent = exponent.masked_fill(~mask[:, :, None, None], -torch.inf)
    return F.threshold(exponent, 3 * math.log(torch.finfo(exponent.dtype).eps), -torch.inf).exp()


def _among_themselves(between: Tensor, b: Tensor, c: Tensor, inputs: Tensor, documents: Tensor | None) -> Tensor:
    """Return (L ∘ C B^T) inputs, the outputs from tokens of the same chunk, ``[sequences, chunks, g, r, q, p]``."""
    chunk = between.shape[-1]
    mask = torch.ones(1, 1, chunk, chunk, dtype=torch.bool, device=between.device).tril()
    if documents is not None:
        mask = mask & (documents[..., :, None] == documents[..., None, :])
    return ((c @ b.mT)[:, :, :, None] * _masked_exp(between, mask)) @ inputs.movedim(2, -2)


def _states(
    rates: Tensor, between: Tensor, b: Tensor, inputs: Tensor, documents: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return chunks' initial states ``[sequences, chunks, g, n, r, p]``, and the last state without `chunks`."""
    left = _masked_exp(between[..., -1, :], None if documents is None else documents == documents[..., -1:])
    kept = _masked_exp(rates.sum(-1), None if documents is None else documents[..., -1] == 0)
    weighted = inputs.transpose(2, 3) * left.transpose(3, 4)[..., None]  # [sequences, chunks, g, q, r, p]
    added = (b.mT @ weighted.flatten(-2)).unflatten(-1, inputs.shape[-2:])
    begins = []
    for factor, new in zip(kept[:, :, :, None, :, None].unbind(1), added.unbind(1)):
        begins.append(state)
        state = torch.addcmul(new, factor, state)
    return torch.stack(begins, 1), state
