"""Which values of a block recomputation keeps, where it does not compute all of them again.

    a layer of Llama 3.1 8B     numbers a token     selective     elementwise
    q, k, v, o                  10,240              kept          kept
    attention                    4,096              kept          kept
    gate, up                    28,672              again         kept
    norms, RoPE, SwiGLU         27,648              again         again

Every number of q costs as many FLOPs as one of gate, two for each feature of the input. So the memory decides for
selective: products are kept that are no wider than the residual stream, or all heads. (Korthikanti et al. 2022, arXiv
2205.05198, recompute the attention, which held its scores then.) elementwise keeps every product that backward needs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import kenotron.kernels.products  # for its operator  # noqa: F401

if TYPE_CHECKING:
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
    """Arguments of `checkpoint` for blocks that are split over `tp` ranks; `attention`: its results are kept.

    With tp no product is kept that a sum over ranks then overwrites: it is as wide as the residual stream.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if isinstance(recompute, str):
        width, summed = _width(config), config.hidden_size if tp > 1 else None
        policy = partial(_policy, width, width // tp if recompute == "selective" else None, summed, attention)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    return options


def _policy(
    wide: int, narrow: int | None, summed: int | None, attention: bool, _: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Keep products of rows up to `wide` whose result has up to `narrow` features (None: any), but not `summed`."""
    if op in _PRODUCTS:
        rows, matrix = args[_PRODUCTS[op] :][:2]
        features = matrix.numel() // rows.shape[-1]
        kept = rows.shape[-1] <= wide and (features != summed if narrow is None else features <= narrow)
    else:  # torch's, those of packages, and flex's
        kept = attention and ("attention" in str(op) or "attn" in str(op))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _width(config: DecoderArchitecture) -> int:
    """Of the residual stream, or of all heads where they are wider."""
    return max(config.hidden_size, getattr(config, "num_attention_heads", 0) * getattr(config, "head_dim", 0))


def flops_again(
    block: nn.Module, config: DecoderArchitecture, recompute: Recompute, length: int, causal: bool
) -> float:
    """FLOPs of one token's forward pass through `block` that are done a second time."""
    width = _width(config) if isinstance(recompute, str) else 0
    parts = (
        part
        for part in block.modules()
        if hasattr(part, "flops_per_token") and not _is_kept(part, width, any_result=recompute == "elementwise")
    )
    return sum(part.flops_per_token(length, causal) for part in parts) if recompute else 0.0  # type: ignore[operator]


def _is_kept(part: nn.Module, width: int, any_result: bool) -> bool:
    weight = getattr(part, "weight", None)
    if weight is None:
        return width > 0 and hasattr(part, "o_proj")  # attention itself
    return weight.dim() == 2 and (weight.shape[1] if any_result else max(weight.shape)) <= width
