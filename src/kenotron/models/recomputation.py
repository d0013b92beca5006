"""Choose the values of a block that are kept for backward when the others are recomputed.

    a layer of Llama 3.1 8B      values per token    selective     elementwise
    q, k, v, o, attention        14,336              kept          kept
    gate, up                     28,672              recomputed    kept
    norms, RoPE, SwiGLU          27,648              recomputed    recomputed

A value of q costs as many FLOPs as a value of gate, two per input feature, so memory decides. (Korthikanti et al. 2022,
arXiv 2205.05198, recompute the attention, which stored its scores then.)
"""

from functools import partial
from math import inf
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import kenotron.kernels.products  # registers its operator  # noqa: F401
from kenotron.config.decoder import DecoderArchitecture

Recompute = bool | Literal["selective", "elementwise"]
_PRODUCTS = {  # operator → index of the rows among its arguments; the matrix is the next argument
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.kenotron.rows_by_matrix.default: 0,
}


def checkpoint_options(
    recompute: Recompute, config: DecoderArchitecture, tp: int = 1, attention: bool = True
) -> dict[str, Any]:
    """Return the arguments of `checkpoint` for blocks split over `tp` ranks; `attention` keeps its results."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if isinstance(recompute, str):
        wide, widest = _widest(recompute, config)
        summed = config.hidden_size if tp > 1 else None  # width of outputs that a sum over ranks overwrites later
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
    else:  # attention kernels of torch, of packages, and flex attention
        kept = attention and ("attention" in str(op) or "attn" in str(op))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _widest(recompute: Recompute, config: DecoderArchitecture) -> tuple[float, float]:
    """Return the largest widths of rows and of results up to which a product is kept."""
    width = max(config.hidden_size, getattr(config, "num_attention_heads", 0) * getattr(config, "head_dim", 0))
    return {"selective": (width, width), "elementwise": (width, inf)}.get(str(recompute), (0, 0))


def flops_again(
    block: nn.Module, config: DecoderArchitecture, recompute: Recompute, length: int, causal: bool
) -> float:
    """Return the FLOPs of one token's forward pass through `block` that are recomputed."""
    counted = [module for module in block.modules() if hasattr(module, "flops_per_token")]
    again = [module for module in counted if recompute and not _is_kept(module, *_widest(recompute, config))]
    return sum(module.flops_per_token(length, causal) for module in again)  # type: ignore[operator]


def _is_kept(module: nn.Module, wide: float, widest: float) -> bool:
    weight = getattr(module, "weight", None)
    if weight is None:
        return wide > 0 and hasattr(module, "o_proj")  # attention itself
    return weight.dim() == 2 and weight.shape[1] <= wide and weight.shape[0] <= widest
