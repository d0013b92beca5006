"""The inputs of a model besides the hidden states, as plain data that is made once per micro-batch.

Activations are token-flat, ``[tokens, hidden]`` with ``tokens = sequences * sequence_length``. Two sequences of
four tokens, the second holding two documents:

    tokens      7  8  9  2 | 5  2  6  4
    positions   0  1  2  3 | 0  1  0  1
    cu_seqlens  (0, 4, 6, 8)

Only layers that mix tokens (attention, recurrences) fold them back into sequences, by ``ctx.shape``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from kenotron.models.recurrent_states import RecurrentStates
    from kenotron.models.token_loss import TrainingLoss


class StatePassing(Protocol):
    """Gives layers with a recurrent state what precedes this rank's tokens, when ranks share sequences (cp)."""

    def inputs_before(self, x: Tensor, count: int) -> Tensor:
        """Return the last `count` tokens of the previous rank's x ``[sequences, length, features]``."""

    def state_before(self, added: Tensor, kept: Tensor) -> Tensor:
        """Return this rank's initial state; its tokens multiply a state by `kept` and then add `added`."""


@dataclass(eq=False)
class Context:
    """The inputs that every block may read and none may change. See docs/architecture.md for the table.

    Not frozen: torch 2.11 would recompile blocks with experts for every number of documents.
    """

    shape: tuple[int, int]
    positions: Tensor
    attention: Callable[..., Tensor]  # with the arguments of `kernels.attention.attention`
    cu_seqlens: tuple[int, ...] | None = None
    document_starts: Tensor | None = None  # `cu_seqlens` on the device, int32, for kernels and compiled code
    longest: int | None = None  # bound of the documents' lengths, rounded to few values: a constant in compiled code
    sample_ids: Tensor | None = None
    loss_scale: float = 1.0
    sequence_weights: Tensor | None = None  # [sequences] fp32, weights of their tokens' losses; None: 1
    sequence_scale: float = 0.0  # 1 / sequences of the global batch: for losses that are means over sequences
    sum_over_sequence: Callable[[Tensor], Tensor] | None = None  # in place, over the ranks that share sequences (cp)
    counted: Tensor | None = None  # 0 in a recomputation, whose tokens were counted already; else 1
    loss: TrainingLoss | None = None  # the config's training loss; None: cross entropy
    states: RecurrentStates | None = None  # states of recurrent layers in generation; None: they start at zero
    passing: StatePassing | None = None  # context parallelism of recurrent layers; None: whole sequences
    tokens: Tensor | None = None  # [tokens], for layers that look them up; `Decoder` and the pipeline's stages set it
    logits_to_keep: Tensor | None = None  # without labels: indices of the tokens to return logits of; None: all
    has_documents: bool = field(init=False)  # for compiled code, where reading cu_seqlens would guard on its length

    def __post_init__(self) -> None:
        self.has_documents = self.cu_seqlens is not None

    @property
    def token_weights(self) -> Tensor | None:
        """Return `sequence_weights` repeated for each token of this rank."""
        return None if self.sequence_weights is None else self.sequence_weights.repeat_interleave(self.shape[1])


@dataclass(frozen=True)
class MicroBatch:
    """`tokens` and `labels` are ``[sequences * sequence_length]`` int64; tokens with label -100 have no loss.

    Without labels a model returns logits.
    """

    tokens: Tensor
    labels: Tensor | None
    ctx: Context
