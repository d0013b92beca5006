"""A hash of the weights in every step's metrics, so that two runs of one layout can be compared bit by bit.

    before step 7    slice 6 of 64 of every rank's weights ──▶ 281474976710655 of metrics.jsonl's `state_hash`
    before step 8    slice 7 …                                  after 64 steps every weight was in one

Of the weights before the step, not after it: the hash is on the host by the time the step's loss is, and the host
does not wait for the optimizer's work on the device.

One slice a step costs 1/64 of reading the weights once. A weight that differs in a bit differs in all later steps as
a rule, since gradients depend on all weights; where it does not, the hash of its slice finds it within 64 steps.

The hash depends on the layout: on how weights are cut over the ranks. `kenotron replay` compares it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from kenotron.models import named_parameters
from kenotron.parallel.shards import shard_of
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult

SLICES = 64
PIECE = 1 << 23  # numbers hashed at a time: their int64 copies take 64 MiB, not 1 GB of an 8B model
BITS = 48  # a number that JSON's readers keep exactly
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StateHash(Hook):
    """Records `state_hash`; on all ranks."""

    priority = -5
    found: Tensor

    def before_step(self, run: Run) -> None:
        """Begin to hash a slice of the weights."""
        self.found = state_hash(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Record the hash: the device had it before the loss, which was read."""
        run.record_metric("state_hash", int(self.found), on_console=False)


def state_hash(run: Run) -> Tensor:
    """The hash of slice ``run.step % 64`` of all ranks' weights, on the CPU, which a GPU may have yet to fill.

    Every rank makes the call.
    """
    tensors = [shard_of(parameter.detach()).tensor for _, parameter in named_parameters(*run.parts)]
    total = torch.zeros((), dtype=torch.int64, device=run.device)
    for first, piece in _slice(tensors, run.step % SLICES):
        total += bits_sum(piece, first)
    if run.mesh.world_size > 1:
        total *= 2 * dist.get_rank() + 1
        dist.all_reduce(total)
    return (total & (2**BITS - 1)).to("cpu", non_blocking=True)


def bits_sum(piece: Tensor, first: int) -> Tensor:
    """The bits of a flat tensor's elements as integers, times odd weights; `first` is the number of the first one.

    Modulo 2^64, any other value of one element changes the sum.
    """
    weights = torch.arange(2 * first + 1, 2 * (first + len(piece)) + 1, 2, device=piece.device)
    return (piece.contiguous().view(INTEGERS[piece.element_size()]) * weights).sum()


def _slice(tensors: list[Tensor], number: int) -> Iterator[tuple[int, Tensor]]:
    """The elements of slice `number` of all tensors end to end, in pieces: number of the first one, and they, flat."""
    size = -(-sum(tensor.numel() for tensor in tensors) // SLICES)
    first, last, begin = number * size, (number + 1) * size, 0
    for tensor in tensors:
        end = begin + tensor.numel()
        here, stop = max(first, begin), min(last, end)
        for start in range(here, stop, PIECE):
            yield start, tensor.reshape(-1)[start - begin : min(start + PIECE, stop) - begin]
        begin = end
