"""Context parallelism of a recurrence: ranks hold consecutive chunks of every sequence and pass its state on.

The state after some tokens is linear in the state before them, so all ranks can work at the same time:

    rank 0   tokens  0 … 99     adds S0     multiplies a state by P0  starts at 0
    rank 1   tokens 100 … 199   adds S1     multiplies by P1          starts at S0
    rank 2   tokens 200 … 299   adds S2     multiplies by P2          starts at P1 S0 + S1

Each rank scans its tokens once from a state of zero, which gives S; S and P of all ranks are gathered; then each scans
again from its true initial state. A convolution of width w reads the last w - 1 tokens of the previous rank. A layer
sends a state and w - 1 tokens, independent of the sequence length. (LASP, arXiv 2404.02882, does so for linear
attention around a ring.)
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kenotron.config.errors import InputError
from kenotron.parallel.collectives import gather_tokens


class StatesOfRanks:
    """`models.context.StatePassing` over the ranks of `group`, in the order of their tokens.

    Every rank takes part in every collective, forward and backward, even if it does not use the result.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def inputs_before(self, x: Tensor, count: int) -> Tensor:
        """Return the last `count` tokens of the previous rank's x ``[sequences, length, features]``.

        They are zeros on the first rank. Raises InputError if a rank has fewer tokens.
        """
        if x.shape[1] < count:
            raise InputError(
                f"parallelism.context_parallel_size: expected at least {count} tokens of a sequence on every rank (a "
                f"convolution sees as many before its own), found {x.shape[1]}"
            )
        tails = self._gathered(x[:, x.shape[1] - count :])
        rank = self.group.rank()
        return tails[rank - 1] if rank else tails[0].mul(0)

    def state_before(self, added: Tensor, kept: Tensor) -> Tensor:
        """Return this rank's initial state, zero on the first rank.

        `added` is the state after this rank's tokens if they start at zero; `kept`, which broadcasts to it, is the
        factor by which they multiply a state.
        """
        earlier = torch.arange(self.group.size(), device=added.device) < self.group.rank()
        state = torch.zeros_like(added)
        for here, new, factor in zip(earlier, self._gathered(added), self._gathered(kept)):
            state = torch.where(here, factor * state + new, state)
        return state

    def _gathered(self, x: Tensor) -> Tensor:
        """Return x of every rank, ``[ranks, …]``; backward sums all ranks' gradients of this rank's x."""
        return gather_tokens(x.contiguous(), self.group).unflatten(0, (self.group.size(), -1))


def no_attention(*args: Any, **kwargs: Any) -> Tensor:
    """Raise: with `state_passing`, layers have no attention."""
    raise InputError("parallelism.context_parallel_method: state_passing: this model has attention")
