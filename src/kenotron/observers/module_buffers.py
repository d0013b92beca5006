"""Buffers that the forward pass of a foreign module writes: part of the run's state, and the same on all ranks.

    a step                                        they are those of the first data-parallel rank, on all of them
    a step that is skipped                        they are as before it
    validation, generation, a step done again     what forward writes is undone

What ranks other than the first have written is lost, as with DistributedDataParallel: a module that counts over the
whole batch sums over the ranks in its forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from kenotron.checkpoint.tensors import dtype_name
from kenotron.config.errors import CheckpointError, InputError
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult


class ModuleBuffers(Hook):
    """See the module; on all ranks."""

    priority = 70  # before anything looks at the model or computes the step again

    def on_train_start(self, run: Run) -> None:
        """Refuse what no checkpoint holds, now and not at the first save. Error (InputError)."""
        for name, buffer in saved_buffers(run).items():
            try:
                dtype_name(buffer.dtype)
            except CheckpointError as error:
                raise InputError(
                    f"model.model_config: buffer '{name}': {error}; a constant is not saved with register_buffer(…, "
                    "persistent=False)"
                ) from None

    def before_step(self, run: Run) -> None:
        """Copy them: the step may be skipped."""
        self.before = _copies(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Take back those of a skipped step, and share the others."""
        if result.skipped:
            _put_back(run, self.before)
        _share(list(saved_buffers(run).values()), run.mesh.group("batch"))


def saved_buffers(run: Run) -> dict[str, Tensor]:
    """By name; there are none in the families that have a file here."""
    return {name: buffer for part in run.parts for name, buffer in part.saved_buffers().items()}


@contextmanager
def buffers_kept(run: Run) -> Iterator[None]:
    """Undo what is written meanwhile."""
    copies = _copies(run)
    try:
        yield
    finally:
        _put_back(run, copies)


def _copies(run: Run) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in saved_buffers(run).items()}


@torch.no_grad()
def _put_back(run: Run, copies: dict[str, Tensor]) -> None:
    for name, buffer in saved_buffers(run).items():
        buffer.copy_(copies[name])


@torch.no_grad()
def _share(buffers: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Give all ranks of `group` the first one's, in one message of bytes."""
    if group is None or not buffers:
        return
    packed = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in buffers])
    dist.broadcast(packed, group=group, group_src=0)
    for buffer, piece in zip(buffers, packed.split([buffer.nbytes for buffer in buffers])):
        buffer.copy_(piece.clone().view(buffer.dtype).view(buffer.shape))
