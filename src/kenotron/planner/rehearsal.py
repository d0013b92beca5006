"""A rank of any layout, built and stepped by the code of training, without memory and without the other ranks.

    with on_fake_rank(config, 7, device) as mesh:      # of 2,048
        run = build_on(config, mesh, device, attention)
        train_step(run, [batch_of(config)])

The model, its layout, the weights' places, the optimizer and the step are those of a run. What is missing are values (a
loss is 1), the data, logs and checkpoints, and the other ranks: torch's "fake" process group sends nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import kenotron.kernels.experts as experts_kernels
import kenotron.parallel.experts as experts_over_ranks
from kenotron.checkpoint.checkpoints import Checkpoints
from kenotron.config.errors import InputError
from kenotron.config.model import Distillation
from kenotron.data.batch import TokenBatch
from kenotron.kernels import linear_cross_entropy, rms_norm, swiglu
from kenotron.kernels.shortcuts import row_blocks
from kenotron.models import skeleton
from kenotron.parallel.mesh import Mesh, axes, build_mesh
from kenotron.planner import stand_in
from kenotron.planner.trace import Transfer
from kenotron.training import step
from kenotron.training.build import factors_of, optimizer_of
from kenotron.training.model_parts import build_parts
from kenotron.training.run import Run

if TYPE_CHECKING:
    from kenotron.config import Config


@contextlib.contextmanager
def on_fake_rank(config: Config, rank: int, device: torch.device, ranks_on_machine: int = 1) -> Iterator[Mesh]:
    """Within, this process is `rank` of the config's layout, and tensors have no memory."""
    ranks = config.parallelism.world_size
    if ranks > 1:
        dist.Backend.backend_capability["fake"] = ["cpu", device.type]
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        mesh = build_mesh(axes(config, ranks_on_machine), ranks, device.type)
        send = patch.object(dist.ProcessGroup, "send", lambda group, tensors, *args: Transfer(tensors))
        # Counts of tokens are summed by hosts, in a list of as many tensors as ranks.
        sums = patch.object(step, "sum_over_ranks", lambda count, group, device: count)
        with stand_in.memoryless(), send, sums:
            yield mesh
    finally:
        if ranks > 1:
            dist.destroy_process_group()


@contextlib.contextmanager
def routing_in_balance() -> Iterator[None]:
    """Within, every expert gets as many tokens, and every rank of ep sends and gets as many."""

    def counts_on_host(counts: torch.Tensor, total: int) -> Any:
        stand_in.StandInStream.current.synchronize()
        *others, parts = counts.shape
        equal = [total // parts + (number < total % parts) for number in range(parts)]
        return [equal for _ in range(others[0])] if others else equal

    with (
        patch.object(experts_kernels, "counts_on_host", counts_on_host),
        patch.object(experts_over_ranks, "counts_on_host", counts_on_host),
    ):
        yield


@contextlib.contextmanager
def two_blocks() -> Iterator[None]:
    """Within, a kernel's loop over blocks of rows on a CPU does two of them: it never holds more than in the second."""

    def two_of_rows(rows: int, step: int) -> Iterator[slice]:
        return islice(row_blocks(rows, step), 2)

    with (
        patch.object(linear_cross_entropy, "row_blocks", two_of_rows),
        patch.object(rms_norm, "row_blocks", two_of_rows),
        patch.object(swiglu, "_blocks", lambda *tensors: 2 * [[each.view(-1)[: swiglu.BLOCK] for each in tensors]]),
    ):
        yield


def build_on(config: Config, mesh: Mesh, device: torch.device, attention: Callable[..., torch.Tensor]) -> Run:
    """Run `training.build.build_run` without data, logs, checkpoints and initial values."""
    if isinstance(config.model.loss, Distillation):
        raise InputError("model.loss: the memory and time of a teacher are not planned; expected another loss")
    if config.doremi is not None and config.doremi.ref_model_resume_checkpoint_path is not None:
        raise InputError("doremi: the memory and time of a reference are not planned; expected no path of it")
    whole = skeleton(config.model)
    parts, pipeline = build_parts(config, mesh, device)
    optimizer = optimizer_of(config, whole, parts, factors_of(whole, config))
    return Run(
        config=config,
        mesh=mesh,
        device=device,
        skeleton=whole,
        parts=parts,
        optimizer=optimizer,
        data=cast(Any, None),
        hooks=[],
        pipeline=pipeline,
        attention=attention,
        loss_scale=2.0 if config.model.dtype == "float16" else 1.0,
        checkpoints=Checkpoints(config),
    )


def batch_of(config: Config) -> TokenBatch:
    """Make a micro-batch of the longest sequences, each of one document."""
    shape = config.tokens.micro_batch_size, max(config.sequence_lengths.values())
    tokens = np.arange(prod(shape)).reshape(shape) % config.model.decoder.vocab_size
    return TokenBatch(tokens, tokens, np.arange(shape[0]))


def micro_batches_to_follow(config: Config) -> int:
    """Return as many micro-batches as a step needs until it holds the most at once."""
    layout, count = config.parallelism, config.tokens.batch_accumulation_per_replica
    if layout.pp == 1:  # stages 1 and 2 gather weights in the first one and sum gradients in the last one
        return min(count, 3 if config.zero_stage in (1, 2) else 2)
    if layout.pp_engine == "afab":
        return count
    return min(count, (2 * layout.stages_per_rank + 1) * layout.pp)
