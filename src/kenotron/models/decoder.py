"""What every decoder-only model shares, around the blocks of its family.

    tokens ── embed ── block 0 ── … ── block n ── final norm ── head ── logits, or loss
              └────── a part of it is what one pipeline stage holds ──────┘

This file has the parts of a pipeline, recomputation, weight tying, vocabulary padding, the head and the compute dtype.
What a block computes and how it may be split is defined by the family (`models.family`).

Parameters carry one set of names in every family: ``model.embed_tokens.weight``, ``model.layers.7.…``,
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
    """Everything below the head: tokens ``[tokens]`` → hidden states ``[tokens, hidden]``.

    A part without the embedding reads hidden states; one without the final norm returns them as the next part reads
    them.
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
        self.how: dict[str, Any] = {}  # to recompute: the options of `checkpoint`
        self.again = _again
        self.compute_dtype = torch.float32

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """x: tokens ``[tokens]`` in the first part, hidden states ``[tokens, hidden]`` in the others."""
        if self.embed_tokens is not None:
            x = self.embed_tokens(x).to(self.compute_dtype)
        rope = self._positions(ctx)
        for number in self.numbers:
            x = self._through(number, x, rope, ctx)
        return x if self.norm is None else self.norm(x).to(self.compute_dtype)

    def further(self, layer: int, next_tokens: Tensor, hidden: Tensor, ctx: Context) -> Tensor:
        """What the block `layer` makes of hidden states and the tokens after theirs (`blocks.next_token`)."""
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
    """block(x, rope, ctx), computed again in backward. Compiled, both passes are parts of one graph."""
    call = partial(block, ctx=ctx) if torch.compiler.is_compiling() else _Recomputed(block, ctx)
    return checkpoint(call, x, rope, **how)


class _Recomputed:
    """A block for `checkpoint`: every call after the first is a recomputation, and its context says so.

    By a tensor: compiled, both passes have to be one graph, which saves the same tensors.
    """

    def __init__(self, block: nn.Module, ctx: Context) -> None:
        self.block, self.ctx, self.counted = block, ctx, 1.0

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        ctx, self.counted = replace(self.ctx, counted=x.new_full((), self.counted)), 0.0
        return self.block(x, rope, ctx)


def check_positions(config: DecoderArchitecture, ctx: Context) -> None:
    """Raise InputError for packed documents of a length at which they would change each other's rotary angles."""
    if ctx.has_documents and ctx.states is None and (problem := config.document_problem(ctx.shape[1])):
        raise InputError(f"tokens.sequence_length: {problem}")


class Decoder(nn.Module):
    """``model(tokens, ctx)`` → logits ``[tokens, vocab]``; ``model(tokens, ctx, labels)`` → (loss, its z part).

    `config` names the family. The vocabulary is padded to a multiple of `vocab_multiple` rows. A `part` (of a pipeline)
    that is not first takes hidden states in the place of tokens (which are in ``ctx.tokens``), one that is not last
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
        self.further_loss: Tensor | None = None  # of predicting further tokens, since somebody read it
        self.tie_weights()
        if self.is_complete:
            self.plan.check(self)

    @property
    def is_complete(self) -> bool:
        """Whether this is the model, not one of several parts of it."""
        return self.part == ModelPart.whole(self.config.num_hidden_layers)

    def complete(self) -> Decoder:
        """The model that this is, or is a part of; as a part's it has no memory, names only."""
        if self.is_complete:
            return self
        with torch.device("meta"):
            return Decoder(self.config)

    def forward(self, tokens: Tensor, ctx: Context, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """tokens, labels ``[tokens]``; see the class for what comes back."""
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
        """The mean over the blocks that predict further tokens, each a sum over tokens like the model's own loss."""
        losses = []
        for layer in self.config.next_token_layers:
            tokens = one_further(tokens, ctx.positions, 0)
            labels = one_further(labels, ctx.positions, -100)
            hidden = self.model.further(layer, tokens, hidden, ctx)
            losses.append(self.lm_head(hidden, ctx, labels)[0])  # type: ignore[misc]
        return torch.stack(losses).mean()

    @property
    def plan(self) -> Plan:
        """How the model may be split."""
        return self.family.plan

    @property
    def vocab_parameters(self) -> tuple[str, ...]:
        """Parameters with a row for every token: padded in memory, saved without the padding."""
        return tuple(f"{pattern}.weight" for pattern in self.plan.vocab)

    def init_rules(self, std: float, scaling: str) -> list[InitRule]:
        """Distributions of fresh weights, first match wins."""
        return self.family.init_rules(std, scaling)

    def tie_weights(self) -> None:
        """Share what the config ties; called again whenever parameters were replaced."""
        if self.config.tie_word_embeddings and self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.tie(self.model.embed_tokens.weight)

    def reset_buffers(self, device: torch.device | str) -> None:
        """Buffers (counters) as they begin, on `device`; called when they have been given memory there."""
        for buffer in self.buffers():
            buffer.zero_()

    def saved_buffers(self) -> dict[str, Tensor]:
        """Buffers that a checkpoint holds, beside the weights: none of those here."""
        return {}

    def ties(self) -> dict[str, str]:
        """Names that stand for one weight, and the name that owns it; the same in every part of a model."""
        return {HEAD: EMBEDDING} if self.config.tie_word_embeddings else {}

    def tied_copies(self) -> dict[str, str]:
        """Parameters here that only mirror one of another part, and that one's name."""
        return self.ties() if self.part.last and not self.part.first else {}

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """The dtype of activations from the embedding on; every product runs in it, weights stay fp32."""
        self.weight_dtype = dtype  # that of the weights which data parallelism gathers
        for module in (self.model, *self.model.layers.values()):
            module.compute_dtype = dtype  # type: ignore[assignment]

    @property
    def stream_dtype(self) -> torch.dtype:
        """Dtype of the hidden states between blocks: the compute dtype, or fp32 where the family keeps them so."""
        return torch.float32 if getattr(self.config, "residual_in_fp32", False) else self.model.compute_dtype

    def compile_blocks(self) -> None:
        """Let torch compile the blocks one by one."""
        if self.model.recompute and not self.plan.experts:  # a graph with experts breaks, and their tokens are counted
            self.model.again = torch.compile(_again)
        for _, block in modules(self, self.plan.blocks):
            block.compile()

    def set_recompute(self, recompute: Recompute, tp: int = 1, attention: bool = True) -> None:
        """What blocks compute again in backward (`models.recomputation`); `attention`: keep its results."""
        self.model.recompute = recompute
        self.model.how = checkpoint_options(recompute, self.config, tp, attention)


def one_further(x: Tensor, positions: Tensor, at_end: int) -> Tensor:
    """The values of x ``[tokens]`` one place further in the same document; `at_end` where there is none."""
    ends = positions.roll(-1) != positions + 1
    return x.roll(-1).masked_fill(ends, at_end)
