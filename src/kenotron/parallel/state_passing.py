"""Context parallelism of a recurrence: ranks hold consecutive parts of every sequence and pass its state on.

What a recurrence makes of some tokens is linear in the state before them, so every rank can work at once:

    rank 0   tokens  0 … 99     adds S0     keeps P0 of a state       begins at 0
    rank 1   tokens 100 … 199   adds S1     keeps P1                  begins at S0
    rank 2   tokens 200 … 299   adds S2     keeps P2                  begins at P1 S0 + S1

Each scans its tokens once from a state of zero, which gives S; all gather the S and P of all; then each scans again
from where it really begins. A convolution of width w sees the last w - 1 tokens of the rank before. What is sent is a
state and w - 1 tokens a layer, whatever the length of the sequence. (LASP, arXiv 2404.02882, does so for linear
attention, around a ring.)
"""

import torch
import torch.distributed as dist
from torch import Tensor

from kenotron.config.errors import InputError
from kenotron.parallel.collectives import gather_tokens


class StatesOfRanks:
    """`models.context.StatePassing` over the ranks of `group`, in the order of their tokens.

    Every rank takes part in every collective, forward and backward, also where it uses nothing of it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def inputs_before(self, x: Tensor, count: int) -> Tensor:
        """The last `count` rows of what the rank before has in the place of x ``[sequences, length, features]``.

        Zeros on the first rank. Raises InputError: a rank has fewer tokens.
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
        """The state in which this rank's tokens begin, from what they add to one and what they keep of one.

        `added`: the state after them, had they begun at zero; `kept` broadcasts to it. The first rank begins at zero.
        """
        earlier = torch.arange(self.group.size(), device=added.device) < self.group.rank()
        state = torch.zeros_like(added)
        for here, new, factor in zip(earlier, self._gathered(added), self._gathered(kept)):
            state = torch.where(here, factor * state + new, state)
        return state

    def _gathered(self, x: Tensor) -> Tensor:
        """x of every rank, ``[ranks, …]``; backward sums what the ranks made of this rank's."""
        return gather_tokens(x.contiguous(), self.group).unflatten(0, (self.group.size(), -1))
