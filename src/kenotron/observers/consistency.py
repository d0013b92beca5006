"""Three hooks that check consistency between ranks and between runs.

`SameData`, at the start. Machines may have separate copies of the files, and one may be old or truncated. Samples are
counted, not compared:

    data_stages: rank 8 on node2 has 9,000 samples of tokens/web, and rank 0 50,000

`Replicas`, with `general.ignore_sanity_checks: false`: replicas on several ranks are compared at the start and before
every save. The blocks are those of a checkpoint: of weights and of the optimizer's state. Rank 0 gathers names,
positions and hashes, about 50 bytes for each block:

    dp 2 x tp 2      ranks 0 and 2 hold rows 0-3 of a matrix, ranks 1 and 3 rows 4-7, and all four a whole norm
    hashes           rank 2's of rows 0-3 differs from rank 0's: the run ends, and no checkpoint is written

`StateHash`: a hash of the weights in every step's metrics, to compare two runs of one layout, such as a run and its
`kenotron replay`, bit by bit:

    before step 7    slice 6 of 64 of every rank's weights ──▶ 281474976710655 of metrics.jsonl's `state_hash`
    before step 8    slice 7 …                                  after 64 steps every weight was in one

The weights are hashed before the step, not after it: so the hash is on the host by the time the step's loss is, and the
host does not wait for the optimizer's work on the device. One slice per step costs 1/64 of reading the weights once. As
a rule a weight that differs in a bit differs in all later steps, since gradients depend on all weights; otherwise the
hash of its slice detects it within 64 steps. Another layout shards the weights differently and has other hashes.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from kenotron.config.errors import InputError, RunFailed, counted
from kenotron.data.stage_plan import SPLITS
from kenotron.models import named_parameters
from kenotron.optim.state import state_tensors
from kenotron.parallel import data as data_parallel
from kenotron.parallel.ranks import gather, gather_on_rank0, ranks_in_words, run_on_rank0
from kenotron.parallel.shards import shard_of
from kenotron.training.hooks import Hook
from kenotron.training.saved_state import model_tensors, optimizer_tensors

if TYPE_CHECKING:
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult

SLICES = 64
PIECE = 1 << 23  # elements hashed at once: their int64 copies take 64 MiB, instead of 1 GB for an 8B model
BITS = 48  # JSON readers keep integers of this size exactly
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NAMED = 4  # the most blocks that a message names

Block = tuple[str, tuple[int, ...], tuple[int, ...]]  # name, offset, shape


class SameData(Hook):
    """Ends a run whose ranks have different numbers of samples; on all ranks."""

    def on_train_start(self, run: Run) -> None:
        """Compare the numbers of samples in the first stage's sources, and in those of validation and test."""
        stage = run.data.stage_of(run.step + 1)
        sizes = [("data_stages", spec.label, len(source)) for spec, source in zip(stage.stage.sources, stage.sources)]
        for split, sources in run.data.evaluated.items():
            sizes += [(SPLITS[split], spec.label, len(source.held_out)) for spec, source in sources]
        ranks = gather((socket.gethostname(), [count for _, _, count in sizes]))
        for rank, (machine, counts) in enumerate(ranks):
            for (key, label, _), count, first in zip(sizes, counts, ranks[0][1], strict=True):
                if count != first:
                    raise InputError(
                        f"{key}: rank {rank} on {machine} has {count:,} samples of {label}, and rank 0 {first:,}"
                    )


class Replicas(Hook):
    """Ends a run whose replicas of a block differ, before it is saved; on all ranks."""

    priority = -45  # before the checkpoint hook saves
    checked_step = -1

    def on_train_start(self, run: Run) -> None:
        """Compare the initial or loaded state."""
        self._check(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Compare the state that is saved after this step."""
        if run.config.checkpoints.saves_at(run.step):
            self._check(run)

    def on_train_end(self, run: Run) -> None:
        """Compare the final state."""
        if self.checked_step != run.step:
            self._check(run)

    def _check(self, run: Run) -> None:
        self.checked_step = run.step
        hashes = gather_on_rank0(block_hashes(run))
        if problem := run_on_rank0(lambda: replica_difference(hashes)):
            raise RunFailed(
                f"step {run.step}: replicas differ: {problem}. Suspect the machine of a rank, or code that only some "
                f"ranks run. Nothing of this step was saved; the same command resumes from the newest checkpoint."
            )


@torch.no_grad()
def block_hashes(run: Run) -> dict[Block, int]:
    """Return the hash of every block of weights and optimizer state that this rank holds."""
    for module in run.roots:
        data_parallel.reshard_params(module)
    moments = state_tensors(named_parameters(*run.parts), run.optimizer) if run.optimizer.state else {}
    shards = model_tensors(*run.parts) | optimizer_tensors(moments, run.parts)
    hashes = [bits_sum(shard.tensor.reshape(-1), 0).to(run.device) for shard in shards.values()]
    blocks = [(name, shard.offset, tuple(shard.tensor.shape)) for name, shard in shards.items()]
    return dict(zip(blocks, torch.stack(hashes).tolist()))


def replica_difference(rank_hashes: Sequence[dict[Block, int]]) -> str | None:
    """Describe the blocks with different hashes on different ranks; None if all replicas agree."""
    holders: dict[Block, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # block → hash → ranks
    for rank, hashes in enumerate(rank_hashes):
        for block, value in hashes.items():
            holders[block][value].append(rank)
    lines = []
    for (name, _, _), groups in sorted(holders.items()):
        if len(groups) > 1:
            majority, *others = sorted(groups.values(), key=len, reverse=True)
            minority = ", ".join(map(ranks_in_words, others))
            lines.append(f"{name} on {minority} differs from that on {ranks_in_words(majority)}")
    more = [f"and {counted(len(lines) - NAMED, 'other block')}"] if len(lines) > NAMED else []
    return "; ".join(lines[:NAMED] + more) or None


class StateHash(Hook):
    """Records `state_hash`; on all ranks."""

    priority = -5
    hash: Tensor

    def before_step(self, run: Run) -> None:
        """Start to hash a slice of the weights."""
        self.hash = state_hash(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Record the hash, which was copied to the host before the loss was."""
        run.record_metric("state_hash", int(self.hash), on_console=False)


def state_hash(run: Run) -> Tensor:
    """Return the hash of slice ``run.step % 64`` of all ranks' weights, in CPU memory. All ranks call it.

    A GPU copies it asynchronously: read it only after a synchronization.
    """
    tensors = [shard_of(parameter.detach()).tensor for _, parameter in named_parameters(*run.parts)]
    total = torch.zeros((), dtype=torch.int64, device=run.device)
    for first, flat in slice_of(tensors, run.step % SLICES):
        total += bits_sum(flat, first)
    if run.mesh.world_size > 1:
        total *= 2 * dist.get_rank() + 1
        dist.all_reduce(total)
    return (total & (2**BITS - 1)).to("cpu", non_blocking=True)


def slice_of(tensors: Sequence[Tensor], number: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the parts of slice `number` of the concatenated tensors: (index of the first element, flat elements)."""
    size = -(-sum(tensor.numel() for tensor in tensors) // SLICES)
    begin = 0
    for tensor in tensors:
        first = max(number * size, begin)
        flat = tensor.reshape(-1)[first - begin : max((number + 1) * size - begin, 0)]
        if len(flat):
            yield first, flat
        begin += tensor.numel()


def bits_sum(flat: Tensor, first: int) -> Tensor:
    """Sum the bits of a flat tensor's elements as integers times odd weights; `first` is the first element's index.

    Modulo 2^64, a change of any one element changes the sum.
    """
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for piece in flat.split(PIECE):
        weights = torch.arange(2 * first + 1, 2 * (first + len(piece)) + 1, 2, device=piece.device)
        total += (piece.contiguous().view(INTEGERS[piece.element_size()]) * weights).sum()
        first += len(piece)
    return total
