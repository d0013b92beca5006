"""Functions that all layers with a recurrent state share, for documents and for states in generation.

In training, tokens fold into sequences by ``ctx.shape``, states start at zero, and a document that begins inside a
sequence resets them. In generation, ``ctx.states`` folds instead: each text is a row, and its state continues from the
last step. If ranks share sequences, ``ctx.passing`` receives inputs and states from the previous ranks.
"""

import torch
from torch import Tensor

from kenotron.models.context import Context

State = tuple[Tensor, ...]


def fold(x: Tensor, ctx: Context) -> Tensor:
    """Return ``[sequences, length, features]``; in generation, shorter texts have zeros before them."""
    return x.view(*ctx.shape, -1) if ctx.states is None else ctx.states.fold(x)


def unfold(x: Tensor, ctx: Context) -> Tensor:
    """Return ``[tokens, features]``, the inverse of `fold`."""
    return x.flatten(0, 1) if ctx.states is None else ctx.states.unfold(x)


def document_starts(ctx: Context) -> Tensor | None:
    """Return ``[sequences, length]``, True where a document begins; None: only at the start of sequences."""
    if not ctx.has_documents or ctx.states is not None:
        return None
    return ctx.positions.view(ctx.shape) == 0


def recall(ctx: Context, layer: object) -> State | None:
    """Return the states that the module `layer` stored, or None if there are none."""
    return None if ctx.states is None else ctx.states.recall(layer)


def inputs_before(x: Tensor, count: int, ctx: Context, remembered: Tensor | None) -> Tensor | None:
    """Return the `count` inputs before x ``[sequences, length, features]``; None means zeros.

    They are the `remembered` ones, or the previous rank's. Inputs of another document are zeros; the position of this
    rank's first token says how many belong to the same one.
    """
    if ctx.passing is None:
        return remembered
    before = ctx.passing.inputs_before(x, count)
    same = ctx.positions.view(ctx.shape)[:, :1] >= torch.arange(count, 0, -1, device=x.device)
    return before * same[..., None]


def remember(ctx: Context, layer: object, state: State) -> None:
    """Store states for the next call; does nothing in training."""
    if ctx.states is not None:
        ctx.states.remember(layer, state)


def kept(exponent: Tensor, starts: Tensor | None) -> Tensor:
    """Return the factor by which a sequence's tokens multiply a state, exp(exponent); exponent ``[sequences, …]``.

    It is 0 if a document begins among the tokens.
    """
    if starts is not None:
        begins = starts.any(1).view(-1, *[1] * (exponent.dim() - 1))
        exponent = exponent.masked_fill(begins, -torch.inf)
    return exponent.exp()
