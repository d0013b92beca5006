"""Keep buffers that the forward pass of a foreign module writes in the run's state, and equal on all ranks.

    a step                                        the first data-parallel rank's buffers are copied to all ranks
    a skipped step                                buffers are restored
    validation, generation, a repeated step       buffers are restored

Writes of ranks other than the first are lost, as with DistributedDataParallel: a module that counts over the whole
batch has to sum over the ranks in its forward pass.
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

    priority = 70  # before any hook that reads the model or repeats the step

    def on_train_start(self, run: Run) -> None:
        """Raise InputError, before the first save, if a buffer has a dtype that checkpoints do not support."""
        for name, buffer in saved_buffers(run).items():
            try:
                dtype_name(buffer.dtype)
            except CheckpointError as error:
                raise InputError(
                    f"model.model_config: buffer '{name}': {error}; a constant is not saved with register_buffer(…, "
                    "persistent=False)"
                ) from None

    def before_step(self, run: Run) -> None:
        """Copy the buffers, in case the step is skipped."""
        self.before = _copies(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Restore the buffers after a skipped step, and copy the first rank's to all ranks."""
        if result.skipped:
            _restore(run, self.before)
        _broadcast(list(saved_buffers(run).values()), run.mesh.group("batch"))


def saved_buffers(run: Run) -> dict[str, Tensor]:
    """Return name → buffer; Kénotron's own families have none."""
    return {name: buffer for part in run.parts for name, buffer in part.saved_buffers().items()}


@contextmanager
def buffers_kept(run: Run) -> Iterator[None]:
    """Restore the buffers at the end of the block."""
    copies = _copies(run)
    try:
        yield
    finally:
        _restore(run, copies)


def _copies(run: Run) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in saved_buffers(run).items()}


@torch.no_grad()
def _restore(run: Run, copies: dict[str, Tensor]) -> None:
    for name, buffer in saved_buffers(run).items():
        buffer.copy_(copies[name])


@torch.no_grad()
def _broadcast(buffers: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Copy the first rank's buffers to all ranks of `group`, in one message of bytes."""
    if group is None or not buffers:
        return
    packed = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in buffers])
    dist.broadcast(packed, group=group, group_src=0)
    for buffer, piece in zip(buffers, packed.split([buffer.nbytes for buffer in buffers])):
        buffer.copy_(piece.clone().view(buffer.dtype).view(buffer.shape))
