"""The code that every decoder-only model shares, around the blocks of its family.

    tokens ── embed ── block 0 ── … ── block n ── final norm ── head ── logits, or loss
              └────── one pipeline stage holds consecutive layers ────────┘

This file handles pipeline stages, recomputation, weight tying, vocabulary padding, the head and the compute dtype. What
a block computes and how it may be split is defined by the family (`models.family`).

Parameters have the same names in every family: ``model.embed_tokens.weight``, ``model.layers.7.…``,
``model.norm.weight``, ``lm_head.weight``; layers keep their global numbers in every part.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kenotron.config.decoder import DecoderArchitecture
from kenotron.config.errors import InputError
from kenotron.models.blocks.head import LMHead, WithLoss
from kenotron.models.blocks.linear import Embedding
from kenotron.models.context import Context
from kenotron.models.family import EMBEDDING, HEAD, Family, family_of
from kenotron.models.init_rules import InitRule
from kenotron.models.part import ModelPart
from kenotron.models.plan import Plan, modules
from kenotron.models.recomputation import Recompute, checkpoint_options


class Body(nn.Module):
    """The model without its head: tokens ``[tokens]`` → hidden states ``[tokens, hidden]``.

    A part without the embedding reads hidden states; a part without the final norm returns them for the next part.
    """

    def __init__(self, family: Family[DecoderArchitecture], rows: int, part: ModelPart) -> None:
        super().__init__()
        self.embed_tokens = Embedding(rows, family.config.hidden_size) if part.first else None
        self.numbers = part.layers
        further = family.config.next_token_layers if part.last else ()
        self.layers = nn.ModuleDict({str(layer): family.block(layer) for layer in (*part.layers, *further)})
        self.norm = family.final_norm() if part.last else None
        self.rope = family.positions()
        self.recompute: Recompute = False
        self.how: dict[str, Any] = {}  # options of `checkpoint` for recomputation
        self.again = _again
        self.compute_dtype = torch.float32

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Return hidden states; x is tokens ``[tokens]`` in the first part, else hidden states ``[tokens, hidden]``."""
        if self.embed_tokens is not None:
            x = self.embed_tokens(x).to(self.compute_dtype)
        rope = self._positions(ctx)
        for number in self.numbers:
            x = self._through(number, x, rope, ctx)
        return x if self.norm is None else self.norm(x).to(self.compute_dtype)

    def further(self, layer: int, next_tokens: Tensor, hidden: Tensor, ctx: Context) -> Tensor:
        """Apply block `layer`, which predicts further tokens, to hidden states and their next tokens (`next_token`)."""
        assert self.embed_tokens is not None, "the config refuses several stages"
        embedded = self.embed_tokens(next_tokens).to(hidden.dtype)
        return self._through(layer, torch.cat((embedded, hidden), dim=-1), self._positions(ctx), ctx)

    def _positions(self, ctx: Context) -> Any:
        return None if self.rope is None else self.rope(ctx.positions.view(ctx.shape))

    def _through(self, layer: int, x: Tensor, rope: Any, ctx: Context) -> Tensor:
        block = self.layers[str(layer)]
        if self.recompute and self.training:
            return self.again(block, x, rope, ctx, self.how)
        return block(x, rope, ctx)


def _again(
    block: nn.Module, x: Tensor, rope: tuple[Tensor, Tensor] | None, ctx: Context, how: dict[str, Any]
) -> Tensor:
    """Return block(x, rope, ctx) and recompute it in backward. When compiled, both passes are in one graph."""
    call = partial(block, ctx=ctx) if torch.compiler.is_compiling() else _Recomputed(block, ctx)
    return checkpoint(call, x, rope, **how)


class _Recomputed:
    """A block for `checkpoint`, whose context marks every call after the first as a recomputation (`counted`).

    The mark is a tensor: when compiled, both passes have to be the same graph, which saves the same tensors.
    """

    def __init__(self, block: nn.Module, ctx: Context) -> None:
        self.block, self.ctx, self.counted = block, ctx, 1.0

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        ctx, self.counted = replace(self.ctx, counted=x.new_full((), self.counted)), 0.0
        return self.block(x, rope, ctx)


def check_positions(config: DecoderArchitecture, ctx: Context) -> None:
    """Raise InputError if the sequence is so long that packed documents would change each other's rotary angles."""
    if ctx.has_documents and ctx.states is None and (problem := config.document_problem(ctx.shape[1])):
        raise InputError(f"tokens.sequence_length: {problem}")


class Decoder(nn.Module):
    """``model(tokens, ctx)`` → logits ``[tokens, vocab]``; ``model(tokens, ctx, labels)`` → (loss, its z part).

    `config` names the family. The vocabulary is padded to a multiple of `vocab_multiple` rows. A `part` (of a pipeline)
    that is not first takes hidden states instead of tokens (which are in ``ctx.tokens``); a part that is not last
    returns hidden states.
    """

    def __init__(self, config: DecoderArchitecture, vocab_multiple: int = 1, part: ModelPart | None = None) -> None:
        super().__init__()
        self.config, self.part = config, part or ModelPart.whole(config.num_hidden_layers)
        self.family = family_of(config)
        rows = math.ceil(config.vocab_size / vocab_multiple) * vocab_multiple
        z_loss = config.z_loss_coefficient if config.z_loss_enabled else 0.0
        self.model = Body(self.family, rows, self.part)
        softcap = getattr(config, "final_logit_softcapping", None)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, rows, z_loss, softcap) if self.part.last else None
        self.further_loss: Tensor | None = None  # of predicting further tokens, summed since it was last read
        self.tie_weights()
        if self.is_complete:
            self.plan.check(self)

    @property
    def is_complete(self) -> bool:
        """Whether this is the whole model, not one of its parts."""
        return self.part == ModelPart.whole(self.config.num_hidden_layers)

    def complete(self) -> Decoder:
        """Return the whole model: this one, or for a part, a model on the meta device, of which only names are used."""
        if self.is_complete:
            return self
        with torch.device("meta"):
            return Decoder(self.config)

    def forward(self, tokens: Tensor, ctx: Context, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits, hidden states, or a loss, as described for the class; tokens and labels ``[tokens]``."""
        check_positions(self.config, ctx)
        if self.part.first:
            ctx = replace(ctx, tokens=tokens)
        hidden = self.model(tokens, ctx)
        if self.lm_head is None:
            return hidden
        result: Tensor | tuple[Tensor, Tensor] = self.lm_head(hidden, ctx, labels)
        if labels is None or not self.training or not self.config.next_token_layers:
            return result
        further = self._loss_of_further_tokens(tokens, hidden, labels, ctx)
        self.further_loss = further.detach() + (0.0 if self.further_loss is None else self.further_loss)
        loss, z_loss = result
        weight = self.config.next_token_loss_weight  # type: ignore[attr-defined]
        return WithLoss.apply(loss, weight * further), z_loss

    def _loss_of_further_tokens(self, tokens: Tensor, hidden: Tensor, labels: Tensor, ctx: Context) -> Tensor:
        """Return the mean over the blocks that predict further tokens of their losses, which are sums over tokens."""
        losses = []
        for layer in self.config.next_token_layers:
            tokens = one_further(tokens, ctx.positions, 0)
            labels = one_further(labels, ctx.positions, -100)
            hidden = self.model.further(layer, tokens, hidden, ctx)
            losses.append(self.lm_head(hidden, ctx, labels)[0])  # type: ignore[misc]
        return torch.stack(losses).mean()

    @property
    def plan(self) -> Plan:
        """Return how the model may be split."""
        return self.family.plan

    @property
    def vocab_parameters(self) -> tuple[str, ...]:
        """Return the names of parameters with a row per token, which are padded in memory but saved without padding."""
        return tuple(f"{pattern}.weight" for pattern in self.plan.vocab)

    def init_rules(self, std: float, scaling: str) -> list[InitRule]:
        """Return the distributions of fresh weights; the first rule that matches applies."""
        return self.family.init_rules(std, scaling)

    def tie_weights(self) -> None:
        """Share the weights that the config ties; called again whenever parameters were replaced."""
        if self.config.tie_word_embeddings and self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.tie(self.model.embed_tokens.weight)

    def reset_buffers(self, device: torch.device | str) -> None:
        """Reset buffers (counters) to their initial values; called after they were allocated on `device`."""
        for buffer in self.buffers():
            buffer.zero_()

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that a checkpoint saves besides the weights; a `Decoder` has none."""
        return {}

    def ties(self) -> dict[str, str]:
        """Return tied name → name of the parameter that it shares; the same in every part of a model."""
        return {HEAD: EMBEDDING} if self.config.tie_word_embeddings else {}

    def tied_copies(self) -> dict[str, str]:
        """Return the parameters of this part that are copies of another part's → the name of the original."""
        return self.ties() if self.part.last and not self.part.first else {}

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of activations from the embedding on; products are computed in it, weights stay fp32."""
        self.weight_dtype = dtype  # the dtype in which data parallelism gathers weights
        for module in (self.model, *self.model.layers.values()):
            module.compute_dtype = dtype  # type: ignore[assignment]

    @property
    def stream_dtype(self) -> torch.dtype:
        """Return the dtype of hidden states between blocks: the compute dtype, or fp32 if the family keeps them so."""
        return torch.float32 if getattr(self.config, "residual_in_fp32", False) else self.model.compute_dtype

    def compile_blocks(self) -> None:
        """Compile the blocks one by one with torch.compile."""
        if self.model.recompute and not self.plan.experts:  # a graph with experts breaks, and their tokens are counted
            self.model.again = torch.compile(_again)
        for _, block in modules(self, self.plan.blocks):
            block.compile()

    def set_recompute(self, recompute: Recompute, tp: int = 1, attention: bool = True) -> None:
        """Set what blocks recompute in backward (`models.recomputation`); `attention` keeps its results."""
        self.model.recompute = recompute
        self.model.how = checkpoint_options(recompute, self.config, tp, attention)


def one_further(x: Tensor, positions: Tensor, at_end: int) -> Tensor:
    """Return x ``[tokens]`` shifted to the next token of the same document; the last token of each gets `at_end`."""
    ends = positions.roll(-1) != positions + 1
    return x.roll(-1).masked_fill(ends, at_end)
