"""Make the dropout of foreign modules a function of the sample and the element in it, the same on every layout.

    with CounterDropout("layers.3", ctx):
        block(x)         # its F.dropout(…, training=True) drops the same elements of a sample on any rank

Torch's dropout draws from a generator: what it drops depends on how samples are distributed over ranks and
micro-batches, on other draws, and in recomputation on the generator's saved state. Here the n-th dropout call of a
block has its own random stream for each sample (`kernels.random`); one hash gives the bits of four elements.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kenotron.config.errors import InputError
from kenotron.kernels.hashing import derive_key
from kenotron.kernels.random import hash_counters
from kenotron.models.context import Context

LEVELS = 1 << 16


class CounterDropout(TorchFunctionMode):
    """Within this mode, dropout draws from the samples' streams, for tensors that begin with the sequences of `ctx`.

    The first dimension may also be a multiple of the sequences. `name` is the module that the mode is entered for.
    Attention with dropout is computed by its formula.
    """

    def __init__(self, name: str, ctx: Context) -> None:
        super().__init__()
        self.name, self.ctx, self.calls = name, ctx, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace `func` if it is a dropout, or attention with one."""
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout):
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0):
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not p:
            return input
        ids = self.ctx.sample_ids
        assert ids is not None, "data give every sample a number"
        if input.shape[0] % len(ids):
            raise InputError(
                f"model.model_config.training_dropout: expected dropout of tensors that begin with the {len(ids)} "
                f"sequences of a micro-batch, found one of shape {list(input.shape)} in {self.name or 'the model'}"
            )
        key = derive_key("dropout", self.name, self.calls)
        self.calls += 1
        sample_size, dropped = input.numel() // len(ids), round(p * LEVELS)
        counters = torch.arange(-(-sample_size // 4), device=input.device)
        bits = hash_counters(key, hash_counters(key, ids)[:, None] + counters)
        levels = bits.view(torch.int16)[:, :sample_size].to(torch.int32)  # -LEVELS / 2 to LEVELS / 2 - 1
        kept = (levels >= dropped - LEVELS // 2).view(input.shape)
        return input * kept * (LEVELS / max(1, LEVELS - dropped))

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute the same as torch's function, none of whose kernels accepts a dropout mask."""
        if enable_gqa:
            key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
        if attn_mask is not None:
            masked = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if masked else scores + attn_mask
        return self._dropout(scores.softmax(-1).to(value.dtype), dropout_p) @ value
