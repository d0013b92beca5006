"""Attention over blocks of keys, whose results are merged.

Softmax needs the sum over all keys, but this sum can be kept as one number per query, the log-sum-exp of its scores.
Two blocks of the same query, with outputs o1, o2 and log-sum-exps l1, l2, merge exactly
(Milakov and Gimelshein 2018, arXiv 1805.02867; FlashAttention, arXiv 2205.14135):

    l = log(e^l1 + e^l2)        o = o1 e^(l1 - l) + o2 e^(l2 - l)

    scores (0, 0) with values (1, 3)  →  o1 = 2, l1 = log 2
    score  (0)    with value  (8)     →  o2 = 8, l2 = 0         o = 2 * 2/3 + 8 * 1/3 = 4 = (1 + 3 + 8) / 3

Backward needs no merge: given the final output and log-sum-exp, each block's contributions to dq, dk and dv are
independent sums. Torch's kernels for one block are used if they exist, else the formulas.
"""

import torch
from torch import Tensor

aten = torch.ops.aten


def block_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention of q ``[sequences, heads, queries, head_dim]`` over k, v ``[sequences, kv_heads, keys,
    head_dim]``.

    Returns out, like q, and the log-sum-exp of the scores ``[sequences, heads, queries]``, fp32 (fp64 for fp64).
    `causal`: there are as many keys as queries, and query i attends to keys 0 … i. kv_heads is a divisor of heads.
    Strides are arbitrary except head_dim's, which must be 1 (`unit_stride`): torch's kernels assume this, and are
    silently wrong otherwise.
    """
    kernel = _kernel(q)
    if kernel == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    return plain_block_attention(q, k, v, causal, scale)


def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's contributions to (dq, dk, dv); `out`, `grad` and `lse` are those over all keys."""
    kernel = _kernel(q)
    if kernel == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
    if kernel == "flash":
        lengths = (None, None, q.shape[2], k.shape[2])  # no packed sequences; numbers of queries and keys
        state, offset = (torch.zeros(shape, dtype=torch.uint64, device=q.device) for shape in (2, ()))  # of no dropout
        backward = aten._scaled_dot_product_flash_attention_backward
        return backward(grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, state, offset, scale=scale)
    return plain_block_backward(grad, q, k, v, out, lse, causal, scale)


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a further block into `out` and `lse` (fp32, in place). A query without keys has lse -inf."""
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def _kernel(q: Tensor) -> str:
    """Return which of torch's kernels supports such a block; all of them return the log-sum-exp."""
    head_dim = q.shape[-1]
    if q.device.type == "cpu":
        return "cpu" if q.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16) else "plain"
    if q.dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256:
        return "flash"
    return "plain"


# The formulas -------------------------------------------------------------------------------------


def plain_block_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute `block_attention` by formulas, with the scores as one matrix, at least in fp32."""
    scores, _ = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    values = v.to(scores.dtype).unsqueeze(2)
    return ((scores - lse.unsqueeze(-1)).exp() @ values).flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def plain_block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `block_backward`: P = e^(scores - lse), dV = P^T dO, dS = P (dO V^T - rowsum(dO O)), dQ = dS K."""
    scores, grouped = _scores(q, k, causal, scale)
    p = (scores - lse.unflatten(1, grouped).unsqueeze(-1)).exp()
    wide_grad, wide_out, wide_q = (x.to(p.dtype).unflatten(1, grouped) for x in (grad, out, q))
    wide_k, wide_v = k.to(p.dtype).unsqueeze(2), v.to(p.dtype).unsqueeze(2)
    ds = p * (wide_grad @ wide_v.mT - (wide_grad * wide_out).sum(-1, keepdim=True)) * scale
    dq, dk, dv = (ds @ wide_k).flatten(1, 2), (ds.mT @ wide_q).sum(2), (p.mT @ wide_grad).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> tuple[Tensor, tuple[int, int]]:
    """Return scores ``[sequences, kv_heads, group, queries, keys]``, and (kv_heads, group)."""
    grouped = (k.shape[1], q.shape[1] // k.shape[1])
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(dtype).unflatten(1, grouped) @ k.to(dtype).unsqueeze(2).mT * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores, grouped
