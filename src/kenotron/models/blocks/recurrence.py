"""What layers with a recurrent state share: where documents begin, and the state that generation keeps between tokens.

In training tokens fold into sequences by ``ctx.shape``, states begin at zero, and a document that begins inside a
sequence resets them. In generation ``ctx.states`` folds instead: each text is a row of its own, and its state continues
from where the last step left it. Where ranks share sequences, ``ctx.passing`` brings what the ranks before have.
"""

import torch
from torch import Tensor

from kenotron.models.context import Context

State = tuple[Tensor, ...]


def fold(x: Tensor, ctx: Context) -> Tensor:
    """``[tokens, features]`` → ``[sequences, length, features]``; a shorter text of generation has zeros before it."""
    return x.view(*ctx.shape, -1) if ctx.states is None else ctx.states.fold(x)


def unfold(x: Tensor, ctx: Context) -> Tensor:
    """The inverse of `fold`."""
    return x.flatten(0, 1) if ctx.states is None else ctx.states.unfold(x)


def document_starts(ctx: Context) -> Tensor | None:
    """``[sequences, length]``: True where a document begins; None: at the first token of a sequence alone."""
    if not ctx.has_documents or ctx.states is not None:
        return None
    return ctx.positions.view(ctx.shape) == 0


def recall(ctx: Context, layer: object) -> State | None:
    """The states that the module `layer` left behind; None: it has read nothing yet."""
    return None if ctx.states is None else ctx.states.recall(layer)


def inputs_before(x: Tensor, count: int, ctx: Context, remembered: Tensor | None) -> Tensor | None:
    """The `count` inputs before x ``[sequences, length, features]``: remembered, or of the rank before; None: zeros.

    Of the rank before only those of the same document: as many as the position of this rank's first token says.
    """
    if ctx.passing is None:
        return remembered
    before = ctx.passing.inputs_before(x, count)
    same = ctx.positions.view(ctx.shape)[:, :1] >= torch.arange(count, 0, -1, device=x.device)
    return before * same[..., None]


def remember(ctx: Context, layer: object, state: State) -> None:
    """Leave states for the next call; training needs none."""
    if ctx.states is not None:
        ctx.states.remember(layer, state)


def kept(exponent: Tensor, starts: Tensor | None) -> Tensor:
    """What the tokens of a sequence leave of a state: exp of their exponents' sum ``[sequences, …]``.

    Nothing where a document begins among them.
    """
    if starts is not None:
        begins = starts.any(1).view(-1, *[1] * (exponent.dim() - 1))
        exponent = exponent.masked_fill(begins, -torch.inf)
    return exponent.exp()
