"""Which values of a block recomputation keeps, where it does not compute all of them again.

    a layer of Llama 3.1 8B      numbers a token     selective     elementwise
    q, k, v, o, attention        14,336              kept          kept
    gate, up                     28,672              again         kept
    norms, RoPE, SwiGLU          27,648              again         again

Every number of q costs as many FLOPs as one of gate, two for each feature of the input, so memory decides. (Korthikanti
et al. 2022, arXiv 2205.05198, recompute the attention, which held its scores then.)
"""

from functools import partial
from math import inf
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import kenotron.kernels.products  # for its operator  # noqa: F401
from kenotron.config.decoder import DecoderArchitecture

Recompute = bool | Literal["selective", "elementwise"]
_PRODUCTS = {  # and the place of the rows among the arguments; the matrix follows them
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.kenotron.rows_by_matrix.default: 0,
}


def checkpoint_options(
    recompute: Recompute, config: DecoderArchitecture, tp: int = 1, attention: bool = True
) -> dict[str, Any]:
    """Arguments of `checkpoint` for blocks that are split over `tp` ranks; `attention`: its results are kept."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if isinstance(recompute, str):
        wide, widest = _widest(recompute, config)
        summed = config.hidden_size if tp > 1 else None  # features of what a sum over ranks overwrites later
        policy = partial(_policy, wide, widest / tp, summed, attention)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    return options


def _policy(
    wide: float, widest: float, summed: int | None, attention: bool, _: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if op in _PRODUCTS:
        rows, matrix = args[_PRODUCTS[op] :][:2]
        features = matrix.numel() // rows.shape[-1]
        kept = rows.shape[-1] <= wide and features <= widest and features != summed
    else:  # torch's, those of packages, and flex's
        kept = attention and ("attention" in str(op) or "attn" in str(op))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _widest(recompute: Recompute, config: DecoderArchitecture) -> tuple[float, float]:
    """Features of the rows, and of the result, up to which a product is kept."""
    width = max(config.hidden_size, getattr(config, "num_attention_heads", 0) * getattr(config, "head_dim", 0))
    return {"selective": (width, width), "elementwise": (width, inf)}.get(str(recompute), (0, 0))


def flops_again(
    block: nn.Module, config: DecoderArchitecture, recompute: Recompute, length: int, causal: bool
) -> float:
    """FLOPs of one token's forward pass through `block` that are done a second time."""
    parts = [part for part in block.modules() if hasattr(part, "flops_per_token")]
    again = [part for part in parts if recompute and not _is_kept(part, *_widest(recompute, config))]
    return sum(part.flops_per_token(length, causal) for part in again)  # type: ignore[operator]


def _is_kept(part: nn.Module, wide: float, widest: float) -> bool:
    weight = getattr(part, "weight", None)
    if weight is None:
        return wide > 0 and hasattr(part, "o_proj")  # attention itself
    return weight.dim() == 2 and weight.shape[1] <= wide and weight.shape[0] <= widest
