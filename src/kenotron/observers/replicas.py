"""`general.ignore_sanity_checks: false`: what several ranks hold alike is compared at the start and before every save.

    dp 2 x tp 2      ranks 0 and 2 hold rows 0-3 of a matrix, ranks 1 and 3 rows 4-7, all four the whole of a norm
    hashes           rank 2 has another one than rank 0 for rows 0-3: the run ends, and no checkpoint is written

Blocks are those that a checkpoint has, of weights and of the optimizer's state. Every rank hashes its own, and names,
places and hashes are gathered by rank 0: about 50 bytes for each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kenotron.config.errors import RunFailed, counted
from kenotron.models import named_parameters
from kenotron.observers.state_hash import bits_sum
from kenotron.optim.state import state_tensors
from kenotron.parallel import data as data_parallel
from kenotron.parallel.ranks import gather_on_rank0, ranks_in_words, run_on_rank0
from kenotron.training.hooks import Hook
from kenotron.training.saved_state import model_tensors, optimizer_tensors

if TYPE_CHECKING:
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult

CHUNK = 2**22  # elements that are hashed at once: the integers take 8 bytes each
NAMED = 4  # blocks that a message names

Block = tuple[str, tuple[int, ...], tuple[int, ...]]  # name, offset, shape


class ReplicaCheck(Hook):
    """See the module; on all ranks."""

    priority = -45  # before the checkpoint hook saves

    def __init__(self) -> None:
        self.checked_step = -1

    def on_train_start(self, run: Run) -> None:
        """Compare what was initialized or loaded."""
        self._check(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Compare what is going to be saved."""
        if run.config.checkpoints.saves_at(run.step):
            self._check(run)

    def on_train_end(self, run: Run) -> None:
        """Compare the final state."""
        if self.checked_step != run.step:
            self._check(run)

    def _check(self, run: Run) -> None:
        self.checked_step = run.step
        of_ranks = gather_on_rank0(block_hashes(run))
        if problem := run_on_rank0(lambda: replica_difference(of_ranks)):
            raise RunFailed(
                f"step {run.step}: replicas differ: {problem}. Suspect the machine of a rank, or code that only some "
                f"ranks run. Nothing of this step was saved; the same command resumes from the newest checkpoint."
            )


@torch.no_grad()
def block_hashes(run: Run) -> dict[Block, int]:
    """The hash of every block of weights and optimizer state that this rank holds."""
    for module in run.roots:
        data_parallel.reshard_params(module)
    moments = state_tensors(named_parameters(*run.parts), run.optimizer) if run.optimizer.state else {}
    shards = model_tensors(*run.parts) | optimizer_tensors(moments, run.parts)
    hashes = [_hash(shard.tensor).to(run.device) for shard in shards.values()]
    blocks = [(name, shard.offset, tuple(shard.tensor.shape)) for name, shard in shards.items()]
    return dict(zip(blocks, torch.stack(hashes).tolist()))


def _hash(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first in range(0, len(flat), CHUNK):
        total += bits_sum(flat[first : first + CHUNK], first)
    return total


def replica_difference(of_ranks: Sequence[dict[Block, int]]) -> str | None:
    """Which blocks have several hashes, and on which ranks; None if there is none."""
    found: dict[Block, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, hashes in enumerate(of_ranks):
        for block, value in hashes.items():
            found[block][value].append(rank)
    lines = []
    for (name, _, _), groups in sorted(found.items()):
        if len(groups) > 1:
            several, *others = sorted(groups.values(), key=len, reverse=True)
            odd = ", ".join(map(ranks_in_words, others))
            lines.append(f"{name} on {odd} differs from that on {ranks_in_words(several)}")
    more = [f"and {counted(len(lines) - NAMED, 'other block')}"] if len(lines) > NAMED else []
    return "; ".join(lines[:NAMED] + more) or None
