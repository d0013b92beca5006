"""Pipeline parallelism: every rank holds consecutive layers, and micro-batches flow through the ranks.

Two ranks and four micro-batches with 1f1b (F forward, B backward, · idle):

    rank 0   F0 F1 ·  B0 F2 B1 F3 B2 ·  B3       embedding, layers 0 … 3
    rank 1   ·  F0 B0 F1 B1 F2 B2 F3 B3 ·        layers 4 and 5, norm, head, loss

Hidden states ``[tokens, hidden]`` are sent to the next stage in the compute dtype, and their gradients back, by send
and receive over the pp group. Every rank already has everything else of a micro-batch (tokens, labels, positions,
document borders), because the data order is arithmetic. Schedules are torch's
(`torch.distributed.pipelining.schedules`); `parallel.pipeline_layout` assigns layers to ranks.

A tied head is on another rank than the embedding, or at least in another part. The embedding owns the weight; the head
has a copy:

    after backward   copy's gradient ──▶ added to the owner's and set to None: clipping and the optimizer see one weight
    after an update  owner's weight  ──▶ the copy

The zero-bubble engines split a backward pass into two halves: gradients of inputs at once, because another rank waits
for them, and gradients of weights when the rank is idle. Autograd splits the graph node by node. If a node is more than
one product, both halves compute all of it: a compiled block or tp's split linears cost two backward passes, a
recomputed block a forward pass for every weight (11 instead of 2, measured). In these cases the backward pass is not
split; the schedule is the same, and a rank idles about as long as with interleaved_1f1b.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from kenotron.config.parallelism import ZERO_BUBBLE_ENGINES, Parallelism
from kenotron.kernels import products
from kenotron.models import MicroBatch
from kenotron.models.decoder import Decoder
from kenotron.parallel.mesh import Mesh
from kenotron.parallel.pipeline_layout import bubble, parts_here, rank_of_stage, stage_numbers
from kenotron.parallel.shards import shard_of

__all__ = ["Pipeline", "StageModule", "parts_here"]

SCHEDULES: dict[str, Any] = {
    "afab": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}

logger = logging.getLogger("kenotron")
LARGE_BUBBLE = 0.2  # share of a step from which a warning is logged
# Torch up to 2.11 cannot defer autograd functions written in Python, such as Kénotron's kernels, to the second half.
HALVES_ANY_FUNCTION = torch.__version__ >= (2, 12)  # type: ignore[operator]  # torch's versions compare with tuples


class StageModule(nn.Module):
    """A stage of the model: maps hidden states to hidden states, or in the last stage to the model's result.

    Data parallelism wraps this module. The micro-batch is set before every call (torch's schedules would pass
    anything but tensors to each micro-batch unsplit).
    """

    def __init__(self, part: Decoder) -> None:
        super().__init__()
        self.part = part
        self.micro_batch: MicroBatch | None = None

    def forward(self, hidden: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the next hidden states, or in the last stage (loss, z_loss) or logits; hidden: None in the first."""
        micro_batch = self.micro_batch
        assert micro_batch is not None
        x = micro_batch.tokens if hidden is None else hidden
        return self.part(x, replace(micro_batch.ctx, tokens=micro_batch.tokens), micro_batch.labels)


class _Scheduled(PipelineStage):
    """The stage that torch's schedules run; it sets the next micro-batch.

    Receive buffers of a micro-batch are allocated from its forward until its backward pass. Torch would keep them for
    all micro-batches: for 64 of 4,096 tokens at a width of 4,096, 2 GiB per rank and direction.
    """

    micro_batches: Sequence[MicroBatch] = ()

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_backward_infra(*args, **kwargs)
        for received in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
            _place(received, "meta")
        return prepared

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _place(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        _place(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        _place((*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]), "meta")

    def finish(self) -> None:
        """Wait, after a step, for all sends that have not been waited for."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.submod.micro_batch = self.micro_batches[fwd_chunk_id]  # type: ignore[assignment]
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Call forward directly: torch 2.11's FSDP fails on a GPU in the first stage's call, without arguments."""
        return super().forward_maybe_with_nosync(*args, **(kwargs if args else {"hidden": None}))

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return none: torch 2.11 would greet neighbours first, in a V also this rank itself, which gloo cannot."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


class _OneOfSeveral(_Scheduled):
    """A stage for schedules with several stages per rank, in which torch keeps sent tensors until the end of a step.

    It sends itself, and frees a tensor when it must have arrived: an activation when its gradient comes back, a
    gradient when a later activation of the previous stage comes, which has fewer than `2 * num_stages` micro-batches in
    flight.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sent: dict[tuple[str, int], list[dist.Work]] = {}

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send("activation", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send("gradient", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._let_go("gradient", fwd_chunk_id - 2 * self.num_stages)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._let_go("activation", bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def finish(self) -> None:
        for each in list(self.sent):
            self._let_go(*each)

    def _send(self, what: str, number: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        if ops:  # none if the other stage is on the same rank
            self.sent[what, number] = dist.batch_isend_irecv(ops)
        return []

    def _let_go(self, what: str, number: int) -> None:
        for work in self.sent.pop((what, number), []):
            work.wait()


def _place(received: Iterable[Any], device: torch.device | str) -> None:
    """Replace receive buffers by new ones on `device`; "meta" frees their memory. The first stage has none."""
    for each in received:
        if isinstance(buffer := getattr(each, "buffer", None), Tensor):
            each.buffer = torch.empty_like(buffer, device=device, requires_grad=buffer.requires_grad)


class Pipeline:
    """Runs the parts of all ranks of the pp group as one model.

    `parts` are this rank's, in the order of the model; `stages` are the modules around them, which data parallelism
    wraps. `dtype` is the dtype of hidden states; `compiled`: whether blocks are compiled.
    """

    def __init__(
        self,
        parts: Sequence[Decoder],
        mesh: Mesh,
        layout: Parallelism,
        device: torch.device,
        dtype: torch.dtype,
        compiled: bool = False,
    ) -> None:
        self.engine, self.pp, self.rank = layout.pp_engine, layout.pp, mesh.rank("pp")
        self.group, self.device = mesh.group("pp"), device
        self.count = layout.pp * layout.stages_per_rank
        self.numbers = stage_numbers(self.engine, self.pp, layout.stages_per_rank, self.rank)
        self.stages = [StageModule(part) for part in parts]
        self.width = parts[0].config.hidden_size
        self.dtype = dtype
        self.sequence_shards = mesh.degree("tp") if layout.tp_mode == "REDUCE_SCATTER" else 1
        self.split_backward_prevented = _prevents_split_backward(layout, compiled) is not None
        self.in_halves = layout.pp_engine in ZERO_BUBBLE_ENGINES and not self.split_backward_prevented
        self._schedule: Any = None
        self._scheduled: list[_Scheduled] = []
        self._shape: tuple[int, int] | None = None
        self._total = torch.zeros(2, device=device)

    # ---- training ----

    def step(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Run forward and backward of all micro-batches; gradients are in ``.grad``.

        Returns ``[2]``: the sums of the losses and of their z parts; zeros on ranks without the last stage.
        """
        tokens = {micro_batch.tokens.numel() for micro_batch in micro_batches}
        if len(tokens) != 1:
            raise ValueError(f"the micro-batches of a step must be of one size, found {sorted(tokens)} tokens")
        self._prepare(len(micro_batches), tokens.pop())
        for scheduled in self._scheduled:
            scheduled.micro_batches = micro_batches
        self._total = torch.zeros(2, device=self.device)
        # target: torch requires one for the loss function, which has the labels already
        with products.backward_in_halves(self.in_halves):
            self._schedule.step(target=torch.zeros(len(micro_batches)), return_outputs=False)
        for scheduled in self._scheduled:
            scheduled.finish()
            scheduled.micro_batches, scheduled.submod.micro_batch = (), None  # type: ignore[assignment]
        return self._total

    def _prepare(self, count: int, tokens: int) -> None:
        """Create a schedule for `count` micro-batches of `tokens`, with receive buffers of this shape."""
        if self._shape == (count, tokens):
            return
        rows = tokens // self.sequence_shards
        hidden = torch.empty(rows, self.width, dtype=self.dtype, device="meta", requires_grad=True)
        losses = (torch.empty((), device="meta", requires_grad=True), torch.empty((), device="meta"))
        kind: Any = schedule_of(self.engine, self.count, count)
        alone = issubclass(kind, PipelineScheduleSingle)
        self._scheduled = [
            (_Scheduled if alone else _OneOfSeveral)(
                stage,
                number,
                self.count,
                self.device,
                input_args=() if number == 0 else (hidden,),
                output_args=losses if number == self.count - 1 else (hidden,),
                group=self.group,
                dw_builder=(lambda: lambda: None) if self.split_backward_prevented else None,  # no second half
            )
            for number, stage in zip(self.numbers, self.stages)
        ]
        stages = self._scheduled[0] if alone else self._scheduled
        self._schedule = kind(stages, count, loss_fn=self._add_loss, scale_grads=False)
        self._shape = count, tokens

    def _add_loss(self, output: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
        """Add up a micro-batch's loss, and return the loss that backward starts from."""
        loss, z_loss = output
        self._total += torch.stack((loss.detach(), z_loss.detach()))
        return loss

    # ---- validation and generation ----

    @torch.no_grad()
    def forward(self, micro_batch: MicroBatch) -> Tensor | tuple[Tensor, Tensor] | None:
        """Run one micro-batch through all stages in order, with any engine; every rank of the group calls it.

        Returns the last stage's result, (loss, z_loss), or logits ``[tokens, vocab]`` if ``labels`` is None; on ranks
        without the last stage, None.
        """
        shards = self.sequence_shards if self.stages[0].part.training else 1  # tensor.py: only training has shards
        rows = micro_batch.tokens.numel() // shards
        x: Any = None
        for number, stage in zip(self.numbers, self.stages):
            before, after = self._rank(number - 1), self._rank(number + 1)
            if before not in (None, self.rank):
                x = torch.empty(rows, self.width, dtype=self.dtype, device=self.device)
                dist.recv(x, group=self.group, group_src=before)
            stage.micro_batch = micro_batch
            x = stage() if before is None else stage(x)
            stage.micro_batch = None
            if after not in (None, self.rank):
                dist.send(x.contiguous(), group=self.group, group_dst=after)
        return x if self.numbers[-1] == self.count - 1 else None

    def _rank(self, number: int) -> int | None:
        """Return the rank of the pp group that holds stage `number`; None beyond the ends of the model."""
        return rank_of_stage(self.engine, self.pp, number) if 0 <= number < self.count else None

    # ---- tied weights ----

    @torch.no_grad()
    def sum_tied_gradients(self) -> None:
        """Add the gradient of every copy of a tied weight to its owner's, and set the copy's to None."""
        for owner, copy in self._ties():
            to = None if owner is None else _gradient(owner)
            arrived = self._carry(None if copy is None else _gradient(copy), self.head_at, 0, to)
            if to is not None and arrived is not None:
                to += arrived.to(to.device)
            if copy is not None:
                copy.grad = None

    @torch.no_grad()
    def share_tied_weights(self) -> None:
        """Give every copy of a tied weight its owner's value, after weights were filled, loaded or updated."""
        for owner, copy in self._ties():
            to = None if copy is None else shard_of(copy).tensor
            arrived = self._carry(None if owner is None else shard_of(owner).tensor, 0, self.head_at, to)
            if to is not None and arrived is not None:
                to.copy_(arrived)

    @property
    def head_at(self) -> int:
        """The rank of the pp group with the last stage. (The first stage is always on rank 0.)"""
        return rank_of_stage(self.engine, self.pp, self.count - 1)

    def _ties(self) -> Iterator[tuple[nn.Parameter | None, nn.Parameter | None]]:
        """Yield (owner, copy) of every tied weight, the same ties on every rank; None for those on other ranks."""
        first = self.stages[0].part if self.numbers[0] == 0 else None
        last = self.stages[-1].part if self.numbers[-1] == self.count - 1 else None
        for copy, owner in self.stages[0].part.ties().items():
            owned = None if first is None else first.get_parameter(owner)
            yield owned, None if last is None else last.get_parameter(copy)

    def _carry(self, tensor: Tensor | None, source: int, destination: int, like: Tensor | None) -> Tensor | None:
        """Send `tensor` from rank `source` to `destination`, and return it there, shaped like `like`; else None."""
        if self.rank == source == destination:
            return tensor
        if self.rank == source and tensor is not None and tensor.numel():
            dist.send(tensor.to(self.device).contiguous(), group=self.group, group_dst=destination)
        if self.rank == destination and like is not None and like.numel():
            arrived = torch.empty(like.shape, dtype=like.dtype, device=self.device)
            dist.recv(arrived, group=self.group, group_src=source)
            return arrived
        return None


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of the gradient; zeros if backward left none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return shard_of(parameter.grad).tensor


def schedule_of(
    engine: str, stages: int, micro_batches: int
) -> type[PipelineScheduleSingle] | type[PipelineScheduleMulti]:
    """Return torch's class for `engine`. With fewer micro-batches than stages, torch requires afab for 1f1b."""
    return SCHEDULES["afab" if engine == "1f1b" and micro_batches < stages else engine]


def _prevents_split_backward(layout: Parallelism, compiled: bool) -> str | None:
    """Return what prevents a zero-bubble engine from splitting backward, a config key or torch's version, or None."""
    if layout.pp_engine not in ZERO_BUBBLE_ENGINES:
        return None
    keys = {
        "parallelism.recompute_layer": layout.recompute_layer,
        "model.compile": compiled,
        "parallelism.tp": layout.tp > 1,
        "parallelism.expert_parallel_size": layout.expert_parallel_size > 1,
        f"torch {torch.__version__}": not HALVES_ANY_FUNCTION,
    }
    return next((key for key, prevents in keys.items() if prevents), None)


def warn_of_idle_ranks(layout: Parallelism, count: int, compiled: bool) -> None:
    """Log a warning if `count` micro-batches do not fill the pipeline, or a schedule cannot split backward."""
    key = _prevents_split_backward(layout, compiled)
    share = bubble(layout.pp_engine, layout.pp, count, layout.stages_per_rank, split=key is None)
    if key is not None:
        logger.warning(
            "%s: with it the backward pass of pp_engine %s is not split: each rank waits about %.0f%% of a step",
            key,
            layout.pp_engine,
            100 * share,
        )
    elif share > LARGE_BUBBLE:
        logger.warning(
            "tokens.batch_accumulation_per_replica: %d micro-batches do not fill %d pipeline ranks: with pp_engine %s "
            "each waits about %.0f%% of a step",
            count,
            layout.pp,
            layout.pp_engine,
            100 * share,
        )
