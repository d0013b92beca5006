"""Dropout of a module that others wrote, with bits that are a function of the sample and the place in it.

    with CounterDropout("layers.3", ctx):
        block(x)         # its F.dropout(…, training=True) drops the same elements of a sample, whoever computes it

Torch's own draws from a generator: what it drops depends on how samples are spread over ranks and micro-batches, on
what else was drawn, and in recomputation on how the generator was kept. Here the n-th dropout of a block has a stream
of its own for each sample (`kernels.random`), of which a hash serves four elements.
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
    """Within, dropout of tensors whose first dimension is that of the sequences of `ctx`, or folds it, draws so.

    `name` is the part of the model that it is entered for. Attention with dropout is computed by its formula.
    """

    def __init__(self, name: str, ctx: Context) -> None:
        super().__init__()
        self.name, self.ctx, self.calls = name, ctx, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """In the place of `func`, where that draws."""
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
        of_a_sample, dropped = input.numel() // len(ids), round(p * LEVELS)
        counters = torch.arange(-(-of_a_sample // 4), device=input.device)
        bits = hash_counters(key, hash_counters(key, ids)[:, None] + counters)
        levels = bits.view(torch.int16)[:, :of_a_sample].to(torch.int32)  # of -LEVELS / 2 to LEVELS / 2 - 1
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
        """As torch's function, of whose kernels none lets its bits be given."""
        if enable_gqa:
            key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
        if attn_mask is not None:
            masked = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if masked else scores + attn_mask
        return self._dropout(scores.softmax(-1).to(value.dtype), dropout_p) @ value
