"""What flows through a model besides the hidden states: plain data, made once a micro-batch.

Activations are token-flat, ``[tokens, hidden]`` with ``tokens = sequences * sequence_length``. Two sequences of
four tokens, the second holding two documents:

    tokens      7  8  9  2 | 5  2  6  4
    positions   0  1  2  3 | 0  1  0  1
    cu_seqlens  (0, 4, 6, 8)

Only attention folds the tokens back into sequences, by ``ctx.shape``.
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
    """How layers with a recurrent state reach the tokens before this rank's, where ranks share sequences."""

    def inputs_before(self, x: Tensor, count: int) -> Tensor:
        """The last `count` rows of what the rank before has in the place of x ``[sequences, length, features]``."""

    def state_before(self, added: Tensor, kept: Tensor) -> Tensor:
        """The state to begin in, from what this rank's tokens add to one and what they keep of one."""


@dataclass(eq=False)
class Context:
    """What every block may read, and none changes. See docs/architecture.md for the table.

    Not frozen: torch 2.11 would recompile blocks with experts for every number of documents.
    """

    shape: tuple[int, int]
    positions: Tensor
    attention: Callable[..., Tensor]  # with the arguments of `kernels.attention.attention`
    cu_seqlens: tuple[int, ...] | None = None
    document_starts: Tensor | None = None  # the same on the device, int32, for kernels and compiled code
    longest: int | None = None  # a bound of the documents' lengths, of few values: compiled code has it as a constant
    sample_ids: Tensor | None = None
    loss_scale: float = 1.0
    sequence_weights: Tensor | None = None  # [sequences] fp32, of the losses of each one's tokens; None: 1
    sequence_scale: float = 0.0  # 1 / sequences of the global batch: for losses that are means over sequences
    sum_over_sequence: Callable[[Tensor], Tensor] | None = None  # in place, over the ranks that share sequences (cp)
    counted: Tensor | None = None  # 0 in recomputation, whose tokens were counted before, 1 in the pass before it
    loss: TrainingLoss | None = None  # the config's training loss; None: cross entropy
    states: RecurrentStates | None = None  # generation's memory of recurrent layers; None: they begin at zero
    passing: StatePassing | None = None  # context parallelism of recurrent layers; None: whole sequences
    tokens: Tensor | None = None  # [tokens], for layers that look them up; `Decoder` and the pipeline's stages set it
    logits_to_keep: Tensor | None = None  # without labels: the tokens whose logits are asked for, by index; None: all
    has_documents: bool = field(init=False)  # for compiled code: to look at cu_seqlens guards on how many there are

    def __post_init__(self) -> None:
        self.has_documents = self.cu_seqlens is not None

    @property
    def token_weights(self) -> Tensor | None:
        """`sequence_weights` for each token of this rank."""
        return None if self.sequence_weights is None else self.sequence_weights.repeat_interleave(self.shape[1])


@dataclass(frozen=True)
class MicroBatch:
    """`tokens` and `labels` are ``[sequences * sequence_length]`` int64; label -100 carries no loss.

    Without labels a model gives logits.
    """

    tokens: Tensor
    labels: Tensor | None
    ctx: Context
