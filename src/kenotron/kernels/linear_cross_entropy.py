"""The head's matrix product and the cross-entropy in one function.

Logits ``[tokens, vocabulary]`` are the largest tensor of a small model; the plain composition makes four or five of
them. Here one chunk of tokens at a time is processed completely, gradients included, so that one buffer suffices:

    logits = hidden W^T                        compute dtype
    E      = exp(logits - max)                 in place; fp32 inside, a few rows that fit the cache at a time
    lse    = max + log(s),  s = sum E          fp32
    loss   = sum lse - logits[label]
    E[label] -= s                              now E / s is softmax - onehot, the gradient of the logits
    dhidden = (1/s) (E W),  dW = E^T (1/s hidden)

Dividing by s on the ``[tokens, H]`` side saves a pass over the logits. With z-loss, ``loss += z lse**2``, whose
gradient is ``2 z lse softmax``: the same with ``(1 + 2 z lse) / s`` for ``1/s``, and ``s / (1 + 2 z lse)`` for the
label's s. With a softcap c the product's s becomes ``c tanh(s / c)`` first, and its gradient is multiplied by ``1 -
tanh(s / c)**2`` at the end: a second buffer. For logits (0, ln 3) and label 0: s = 4/3, lse = ln 4, the loss is ln 4,
the gradient (-3/4, 3/4).

Under tensor parallelism each rank holds some rows of W, so some columns of the logits (`VocabularyRanks`). Two small
collectives communicate three numbers per token: max over all ranks, and the sums over ranks of s and of the label's
logit. Everything else is local, and each rank's dhidden is a partial sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kenotron.kernels.fused import fused
from kenotron.kernels.products import in_fp32, replaces_torch, rounds_once, rows_by_matrix, write_gradient
from kenotron.kernels.shortcuts import reads_are_free, row_blocks

IGNORED = -100  # the label of a token without loss
BLOCK_BYTES = 1 << 20  # rows of one elementwise pass on CPU: half of a core's L2 cache


@dataclass(frozen=True)
class VocabularyRanks:
    """The ranks that share the vocabulary: this rank's `weight` has rows `first`, `first` + 1, … of the whole matrix.

    `max` and `sum` reduce a tensor over them in place, and return it.
    """

    first: int
    max: Callable[[Tensor], Tensor]
    sum: Callable[[Tensor], Tensor]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    scale: float,
    z_loss: float = 0.0,
    valid_rows: int | None = None,
    chunk_bytes: int | None = None,
    softcap: float | None = None,
    token_weights: Tensor | None = None,
    ranks: VocabularyRanks | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``scale * sum over tokens with a label of (lse - logit[label] + z_loss * lse**2)`` and its z part,
    detached.

    Both are fp32. With `token_weights` ``[tokens]`` fp32, each token's term is multiplied by its weight.

    The matrix products have the dtype of hidden ``[tokens, H]``, to which weight ``[V, H]`` is rounded; its gradient is
    in its own. labels ``[tokens]`` int64 are -100 for tokens without a loss. Rows of `weight` from `valid_rows` on pad
    the vocabulary and are never predicted.
    `chunk_bytes` is the budget for one chunk's logits, counted in fp32; None is the measured choice. `softcap`: bound
    of the logits' absolute values; None: no bound.

    With `ranks`, `weight` is this rank's rows, `valid_rows` counts rows of the whole matrix (all ranks must pass it),
    hidden, labels and result are the same on every rank, and the gradient of hidden is this rank's partial sum.
    """
    rows = weight.shape[0] if valid_rows is None else valid_rows
    if ranks is not None:
        known = (labels >= 0) & (labels < rows) | (labels == IGNORED)
        torch._assert_async(known.all(), "a label outside the vocabulary")  # otherwise no rank would notice
        rows = min(max(rows - ranks.first, 0), weight.shape[0])
    chunk = _tokens_in_chunk(hidden, weight.shape[0], chunk_bytes)
    for_hidden, for_weight = (torch.is_grad_enabled() and each.requires_grad for each in (hidden, weight))
    options = _Options(scale, z_loss, rows, chunk, for_hidden, for_weight, softcap, token_weights, ranks)
    return _LinearCrossEntropy.apply(hidden, weight, labels, options)


@dataclass(frozen=True)
class _Options:
    scale: float
    z_loss: float
    rows: int
    chunk: int
    for_hidden: bool
    for_weight: bool
    softcap: float | None
    token_weights: Tensor | None
    ranks: VocabularyRanks | None


def _tokens_in_chunk(hidden: Tensor, rows: int, chunk_bytes: int | None) -> int:
    """Return the measured choice. On CPU, milliseconds (1 thread, forward and gradients) at logits ``[2048, 8192]``:

    fp32: chunks of 16 MiB 249, 32 MiB 259, one of 64 MiB 274 (fresh pages cost), and less memory; at
          ``[1024, 32768]`` 16 MiB (128 tokens) 1104, 32 MiB 985, one chunk 1009: at least 256 tokens.
    bf16: one chunk; the weight gradients of several would have to add up in fp32, at ``[1024, 32768]`` 301
          in one chunk, 645 in four. If products of bf16 are computed in fp32, as in fp32.
    """
    if chunk_bytes is not None:
        return max(1, chunk_bytes // (4 * rows))
    if hidden.device.type == "cpu" and (hidden.dtype == torch.float32 or in_fp32(hidden, hidden)):
        return max(256, (1 << 25) // (4 * rows))
    if hidden.device.type == "cpu":
        return max(256, (1 << 28) // (4 * rows))
    return max(256, (1 << 30) // (4 * rows) // 256 * 256)  # whole tiles of the product's kernels


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients in forward, while the logits exist; backward returns them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, options: _Options) -> Any:
        loss, z_part, grad_hidden, grad_weight = _loss_and_gradients(hidden, weight, labels, options)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(z_part)
        return loss, z_part

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        factor = upstream[0]
        grads = ctx.saved_tensors
        if not reads_are_free(factor) or factor.item() != 1.0:  # 1.0 in training saves a pass over both gradients
            grads = [None if g is None else g * factor.to(g.dtype) for g in grads]
        return *grads, None, None


def _loss_and_gradients(
    hidden: Tensor, master: Tensor, labels: Tensor, options: _Options
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    tokens, weight = hidden.shape[0], master.to(hidden.dtype)
    valid = weight[: max(options.rows, 1)]  # a rank with only padding keeps one row, which does not count
    chunk = min(tokens, options.chunk)
    buffer = None if replaces_torch(hidden, valid) else hidden.new_empty(chunk, len(valid))
    grad_hidden = torch.empty_like(hidden) if options.for_hidden else None
    wide = chunk < tokens or (master.dtype != hidden.dtype and rounds_once(hidden))
    grad_weight = torch.empty_like(weight, dtype=torch.float32 if wide else None) if options.for_weight else None
    if grad_weight is not None:
        grad_weight[len(valid) :] = 0
    sums = torch.zeros(2, dtype=torch.float32, device=hidden.device)
    for piece in row_blocks(tokens, chunk):
        x = hidden[piece]
        logits = rows_by_matrix(x, valid, out=None if buffer is None else buffer[: len(x)])
        slopes = None if options.softcap is None else _bound_(logits, options.softcap)
        if options.rows == 0:
            logits.fill_(torch.finfo(logits.dtype).min)
        losses, factors = _exponentials_(logits, labels[piece], options)
        if options.token_weights is not None:
            losses, factors = (each * options.token_weights[piece, None] for each in (losses, factors))
        sums += losses.sum(0)
        if slopes is not None:
            logits.mul_(slopes)
        if grad_hidden is not None:
            torch.mul(rows_by_matrix(logits, valid.t(), out=grad_hidden[piece]), factors, out=grad_hidden[piece])
        if grad_weight is not None:
            write_gradient(logits, (x * factors).to(x.dtype), grad_weight[: len(valid)], add=piece.start > 0)
        del logits  # the next chunk reuses its memory
    sums *= options.scale
    return sums[0] + sums[1], sums[1], grad_hidden, None if grad_weight is None else grad_weight.to(master.dtype)


def _bound_(logits: Tensor, softcap: float) -> Tensor:
    """Compute ``c tanh(logits / c)`` in place; return its derivative, in the same dtype."""
    bounded = torch.tanh(logits.float() / softcap)
    logits.copy_(bounded * softcap)
    return (1.0 - bounded.square_()).to(logits.dtype)


def _exponentials_(logits: Tensor, labels: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    """Turn logits ``[n, rows]`` into E of the module's docstring, in place.

    Returns (cross-entropy, z-loss) of each token ``[n, 2]`` and the factors ``[n, 1]`` (with the scale; 0 for
    tokens without loss) that make E the gradient of the logits, all fp32.
    """
    ranks, real = options.ranks, labels != IGNORED
    if ranks is None:
        here, index = real, torch.where(real, labels, 0)
    else:
        here = real & (labels >= ranks.first) & (labels < ranks.first + options.rows)
        index = torch.where(here, labels - ranks.first, 0)
    row = torch.arange(len(index), device=index.device)
    picked = logits[row, index].float()[:, None]
    own_largest, total = _exp_rows_(logits)
    largest, shrink = own_largest, torch.ones_like(own_largest)
    if ranks is not None:
        largest = ranks.max(own_largest.clone())
        shrink = (own_largest - largest).exp()  # rescales E from this rank's maximum to the maximum of all ranks
        picked, total = ranks.sum(torch.cat((torch.where(here[:, None], picked, 0.0), total * shrink), 1)).split(1, 1)
        shrink = torch.where(here[:, None], shrink.clamp(min=1e-20), shrink)  # the label's entry is divided by it
    lse = largest + total.log()
    slope = shrink * (1.0 + 2.0 * options.z_loss * lse)
    label_entry = ((picked - own_largest).exp() - total / slope).to(logits.dtype)[:, 0]
    logits[row, index] = label_entry if ranks is None else torch.where(here, label_entry, logits[row, index])
    factors = torch.where(real[:, None], options.scale * slope / total, 0.0)
    losses = torch.where(real[:, None], torch.cat((lse - picked, options.z_loss * lse * lse), 1), 0.0)
    return losses, factors


def _exp_rows_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``logits[i] = exp(logits[i] - max_i)`` in place, in fp32; return max and the sums, ``[n, 1]``."""
    if kernel := fused("cross_entropy.exp_rows_", logits):
        return kernel(logits)
    n, rows = logits.shape
    largest, total = torch.empty(2, n, 1, dtype=torch.float32, device=logits.device)
    step = BLOCK_BYTES // (4 * rows) if logits.device.type == "cpu" else n
    narrow = logits.dtype != torch.float32
    wide = torch.empty(min(max(step, 1), n) if narrow else 0, rows, dtype=torch.float32, device=logits.device)
    for part in row_blocks(n, step):
        block = wide[: part.stop - part.start].copy_(logits[part]) if narrow else logits[part]
        torch.amax(block, 1, keepdim=True, out=largest[part])
        block.sub_(largest[part]).exp_()
        torch.sum(block, 1, keepdim=True, out=total[part])
        if narrow:
            logits[part] = block
    return largest, total
