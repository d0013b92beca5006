"""A cache of keys and values, so that a new token costs one token's work instead of the whole text's.

The cache is an attention function with state. Models pass the calling layer to every attention function, so they need
no change: they receive a `Context` whose `attention` is the cache. On several ranks, each has a cache for its own
layers and heads.

    cache = KVCache(rows=2, capacity=8)
    logits = model(tokens_of_both, cache.prefill([3, 2]))      # 5 tokens, packed like documents
    logits = model(one_token_each, cache.step([3, 2]))         # positions of the new tokens

    slot      0  1  2  3  4 …
    row 0     a  b  c  d            the key of position p is in slot p, so a row's length is enough
    row 1     x  y  z               to mask the slots beyond it

Prompts of different lengths need no padding: prefill packs them with document borders, and every row then
grows independently.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.kernels.attention import attention
from kenotron.kernels.attentions.masked import eager
from kenotron.models import Context
from kenotron.models.blocks.head import bounded
from kenotron.models.recurrent_states import RecurrentStates


class KVCache:
    """Keys and values of `rows` texts of at most `capacity` tokens.

    They are ``[rows, kv_heads, capacity, head_dim]`` per layer; on a CPU in fp32 if the model is in bf16. Without
    `remembers` nothing is cached, for prompts that no step follows.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device | str = "cpu", remembers: bool = True) -> None:
        self.rows, self.capacity, self.device, self.remembers = rows, capacity, device, remembers
        self.keys: dict[object, Tensor] = {}
        self.values: dict[object, Tensor] = {}
        self.states = RecurrentStates(device)  # states of layers without attention
        self._together: int | None = None

    def prefill(self, lengths: Sequence[int]) -> Context:
        """Return the context of the concatenated prompts: ``[sum(lengths)]`` tokens in one sequence.

        It requests only the logits of each prompt's last token; others are never computed.
        """
        borders = list(accumulate(lengths, initial=0))
        self._row = torch.arange(self.rows).repeat_interleave(torch.tensor(lengths)).to(self.device)
        self._position = torch.cat([torch.arange(length) for length in lengths]).to(self.device)
        self._together = None
        last = torch.tensor(borders[1:], device=self.device) - 1
        self.states.prefill(lengths)
        return Context(
            (1, borders[-1]), self._position, self, cu_seqlens=tuple(borders), states=self.states, logits_to_keep=last
        )

    def step(self, positions: Sequence[int]) -> Context:
        """Return the context of one new token per row at `positions`: ``[rows]`` tokens in as many sequences."""
        self._row = torch.arange(self.rows, device=self.device)
        self._position = torch.tensor(positions, device=self.device)
        self._shortest, self._longest = min(positions) + 1, max(positions) + 1
        self._together = positions[0] if self._shortest == self._longest else None  # the position of all new tokens
        self._masks: dict[int | None, Tensor] = {}  # by window, made at first use
        self.states.step()
        return Context((self.rows, 1), self._position, self, states=self.states)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        index = torch.tensor(rows, device=self.device)
        self.rows = len(rows)
        self.states.keep(index)
        for memory in (self.keys, self.values):
            for layer, tensor in memory.items():
                memory[layer] = tensor[index]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ctx: Context,
        layer: object,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attend with q ``[sequences, heads, length, head_dim]``, and cache k and v (kv_heads); returns q's shape."""
        if self.remembers:
            keys, values = self._remember(self.keys, k, layer), self._remember(self.values, v, layer)
        if ctx.cu_seqlens is not None:
            if softcap is not None:
                return eager(q, k, v, ctx, layer, scale, window, softcap)
            return attention(q, k, v, ctx, layer, scale, window)  # type: ignore[arg-type]
        # Query heads that share a key head are computed together, like several queries of one head.
        grouped = q.view(self.rows, k.shape[1], -1, q.shape[-1]).to(keys.dtype)
        first = 0 if window is None else max(0, self._shortest - window)
        seen = slice(first, self._longest)
        keys, values, mask = keys[:, :, seen], values[:, :, seen], self._mask(first, window)
        if softcap is None:
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        else:
            scores = (grouped @ keys.mT).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
            scores = bounded(scores, softcap)
            scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
            out = scores.softmax(-1).to(values.dtype) @ values
        return out.reshape(q.shape).to(q.dtype)  # kernels differ in the strides of what they return

    def _mask(self, first: int, window: int | None) -> Tensor | None:
        """Return which slots from `first` on each row's new token sees, ``[rows, 1, 1, slots]``; None: all of them."""
        if self._shortest == self._longest:
            return None
        if window in self._masks:
            return self._masks[window]
        slots, position = torch.arange(first, self._longest, device=self.device), self._position[:, None]
        seen = slots <= position
        if window is not None:
            seen &= slots > position - window
        self._masks[window] = seen[:, None, None]
        return self._masks[window]

    def _remember(self, memory: dict[object, Tensor], new: Tensor, layer: object) -> Tensor:
        if layer not in memory:
            # Zeros, not garbage: masked values are still multiplied by 0, and 0 times NaN is NaN.
            shape = self.rows, new.shape[1], self.capacity, new.shape[-1]
            # On a CPU fp32: one query a row in bfloat16 takes 4 to 6 times as long (12 heads, 500 keys, 8 rows: 3 ms).
            dtype = torch.float32 if new.device.type == "cpu" and new.dtype == torch.bfloat16 else new.dtype
            memory[layer] = torch.zeros(shape, dtype=dtype, device=new.device)
        if self._together is None:
            memory[layer][self._row, :, self._position] = new.transpose(1, 2).flatten(0, 1).to(memory[layer].dtype)
        else:
            memory[layer][:, :, self._together] = new[:, :, 0]
        return memory[layer]
