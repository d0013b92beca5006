"""What a step asks of a GPU, in order: operators on its queues, and what it exchanges with other ranks.

    with Trace(mesh, ranks_on_machine=8) as trace:
        train_step(run, batches)
    trace.events                  # [Began("micro-batch"), Ran(0, Operator("mm", …)), Communicated(2, "gather", …), …]

Queues are the GPU's streams, 0 the one of computation. It records on the stand-in, whose streams and events tell what
waits for what; `timeline` says how long it takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kenotron.parallel.mesh import AXES, GROUPS
from kenotron.planner import stand_in
from kenotron.planner.ledger import PLAIN, site_of_caller

if TYPE_CHECKING:
    from kenotron.parallel.mesh import Mesh

# They make no kernel: views, memory, and what Python asks of a tensor.
NAMES_OF_FREE = """
    view _unsafe_view t transpose permute expand slice select split split_with_sizes unsqueeze squeeze detach alias
    as_strided unbind chunk empty empty_like new_empty empty_strided new_empty_strided lift_fresh view_as reshape
    _reshape_alias set_ record_stream unfold narrow movedim resize_ is_pinned _pin_memory device _local_scalar_dense
    stride size is_contiguous storage_offset sym_size numel dim layout wait_tensor"""
FREE = frozenset(NAMES_OF_FREE.split())
OVERWRITING = {"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"}  # in place, and not read before
ADAM_NUMBERS = 7  # fp32: reads weight, gradient and two moments; writes weight and moments
NAMES_OF_COLLECTIVES = {  # torch's operators and the methods of its process groups
    "sum": "all_reduce all_reduce_ allreduce",
    "gather": "all_gather_into_tensor _allgather_base all_gather_single allgather",
    "scatter": "reduce_scatter_tensor _reduce_scatter_base reduce_scatter_single reduce_scatter",
    "exchange": "all_to_all_single alltoall_base alltoall",
    "broadcast": "broadcast",
    "send": "send",
    "receive": "recv",
}
COLLECTIVES = {name: kind for kind, names in NAMES_OF_COLLECTIVES.items() for name in names.split()}

LABELS = {name: name for name in ("pp", "cp", "ep", "tp")} | dict.fromkeys(("loss", "model", "world"), "all")


class Operator(NamedTuple):
    """A kernel: `moved` bytes, each argument read once and each result written once, and FLOPs.

    `kind`: "product" of `shape` (rows, inner, columns), "attention" of heads of `shape[0]`, or "memory". `site`: the
    function of ours that asked for it.
    """

    kind: str
    site: str
    moved: float
    flops: float = 0.0
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32


class Group(NamedTuple):
    """Ranks that exchange something, `on_machine` of them on one machine. `name`: pp, dp, cp, ep, tp or all."""

    name: str
    size: int
    on_machine: int


class Began(NamedTuple):
    """Here begins a "micro-batch", or the "update" after the last one."""

    what: str


class Ran(NamedTuple):
    """An operator on a queue, asked for by autograd or not."""

    queue: int
    operator: Operator
    backward: bool = False


class Marked(NamedTuple):
    """A place in a queue."""

    queue: int
    mark: int


class Waited(NamedTuple):
    """A queue, or the host (None), goes on when a mark is reached."""

    queue: int | None
    mark: int


class Communicated(NamedTuple):
    """A transfer of `moved` bytes that begins at this place of a queue; its end is a mark.

    What is sent goes to, and what is received comes from, the `peer`: its number in the group.
    """

    queue: int
    kind: str
    moved: float
    group: Group
    mark: int
    peer: int = 0


Event = Began | Ran | Marked | Waited | Communicated


class Transfer:
    """The work that a collective returns. It holds what it sends for as long as gloo's and NCCL's do."""

    def __init__(self, tensors: Sequence[Any], wait: Callable[[], None] = lambda: None) -> None:
        self.tensors, self._wait = tensors, wait

    def wait(self, *args: object) -> bool:
        """Make the current queue wait, not the host."""
        self._wait()
        return True


class Trace(TorchDispatchMode):
    """Records what a rank of `mesh` does on `device` within it; `ranks_on_machine` ranks share a machine."""

    def __init__(self, mesh: Mesh, ranks_on_machine: int, device: str = stand_in.NAME) -> None:
        super().__init__()
        self.device = device
        self.events: list[Event] = []
        self.marks = 0
        self.of_results: dict[int, int] = {}  # address of a storage → the mark of the transfer that fills it
        self.groups = _groups(mesh, ranks_on_machine)
        self.ranks_on_machine = ranks_on_machine
        self.operators: dict[Operator, Operator] = {}
        self.patches = contextlib.ExitStack()

    def __enter__(self) -> Trace:
        for name in COLLECTIVES:
            if hasattr(dist.ProcessGroup, name):
                self.patches.enter_context(patch.object(dist.ProcessGroup, name, self._method(name)))
        self.patches.enter_context(stand_in.watched_by(self))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.patches.close()

    def begin(self, what: str) -> None:
        """Record that a "micro-batch" or the "update" begins."""
        self.events.append(Began(what))

    # ---- what the stand-in tells ----

    def mark(self, queue: int) -> int:
        """Record a place in a queue and return its number."""
        self.marks += 1
        self.events.append(Marked(queue, self.marks))
        return self.marks

    def wait(self, queue: int | None, mark: int) -> None:
        """Record that a queue or the host waits for a place."""
        self.events.append(Waited(queue, mark))

    def launch(self, tensors: Sequence[Tensor]) -> None:
        """Record a kernel in Triton, which reads or writes each of `tensors` once."""
        self._run(Operator("memory", "", _bytes(tensors)))

    # ---- operators ----

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not PLAIN.issuperset(types):
            return NotImplemented
        out = function(*args, **(kwargs or {}))
        space, name = function.namespace, function.overloadpacket.__name__
        if space == "_c10d_functional":
            self._functional(name, args, out)
        elif name not in FREE:
            tensors = tensors_moved(name, args, kwargs, out)
            if any(each.device.type == self.device for each in tensors):
                if space == "c10d":
                    raise ValueError(f"{name}: no time is known for this collective; expected {', '.join(COLLECTIVES)}")
                self._run(_operator(name, tensors, args, kwargs or {}))
        return out

    def _run(self, operator: Operator) -> None:
        if (site := site_of_caller()) is not None:
            operator = operator._replace(site=site[0])
            backward = torch._C._current_autograd_node() is not None
            self.events.append(Ran(stand_in.current_queue(), self.operators.setdefault(operator, operator), backward))

    # ---- between ranks ----

    def _functional(self, name: str, args: Any, out: Tensor) -> None:
        if name == "wait_tensor":
            mark = self.of_results.pop(args[0].untyped_storage()._cdata, None)
            if mark is not None:
                self.wait(stand_in.current_queue(), mark)
        elif args[0].device.type == self.device:
            mark = self._communicate(COLLECTIVES[name], [args[0], out], args[-1])
            self.of_results[out.untyped_storage()._cdata] = mark

    def _method(self, name: str) -> Callable[..., Transfer]:
        """Return what takes the place of a method of torch's process groups."""

        def method(group: dist.ProcessGroup, *args: Any, **options: Any) -> Transfer:
            tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
            if not tensors or tensors[0].device.type != self.device:
                return Transfer(tensors)
            peer = args[1] if name in ("send", "recv") else 0
            if group.group_name not in self.groups:  # several axes of a parameter's mesh
                self.groups[group.group_name] = _described(group, "all", self.ranks_on_machine)
            mark = self._communicate(COLLECTIVES[name], args[:2], group.group_name, peer)
            return Transfer(tensors, lambda: self.wait(stand_in.current_queue(), mark))

        return method

    def _communicate(self, kind: str, sides: Sequence[Any], group: str, peer: int = 0) -> int:
        self.marks += 1
        moved = max(_bytes([each for each in tree_leaves(side) if isinstance(each, Tensor)]) for side in sides)
        event = Communicated(stand_in.current_queue(), kind, moved, self.groups[group], self.marks, peer)
        self.events.append(event)
        return self.marks


def _groups(mesh: Mesh, ranks_on_machine: int) -> dict[str, Group]:
    """Return the groups of the mesh, by torch's names of them."""
    groups: dict[str, Group] = {}
    for name in (*(axis.name for axis in AXES), *GROUPS):
        if (group := mesh.group(name)) is not None and group.group_name not in groups:
            groups[group.group_name] = _described(group, LABELS.get(name, "dp"), ranks_on_machine)
    return groups


def _described(group: dist.ProcessGroup, name: str, ranks_on_machine: int) -> Group:
    ranks, here = dist.get_process_group_ranks(group), dist.get_rank() // ranks_on_machine
    return Group(name, len(ranks), sum(rank // ranks_on_machine == here for rank in ranks))


def tensors_moved(name: str, args: Any, kwargs: Any, out: Any) -> list[Tensor]:
    """Return the tensors that an operator reads and writes; those that it changes in place twice."""
    inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    known = set(map(id, inputs))  # `out=` and tensors in place are results, too
    made = [each for each in tree_leaves(out) if isinstance(each, Tensor) and id(each) not in known]
    changed = args[:1] if name.endswith("_") and name not in OVERWRITING else ()
    return [*inputs, *made, *(each for each in tree_leaves(changed) if isinstance(each, Tensor))]


def _bytes(tensors: Sequence[Tensor]) -> float:
    return float(sum(each.numel() * each.element_size() for each in tensors))


def _operator(name: str, tensors: list[Tensor], args: Any, kwargs: Any) -> Operator:
    """Causal attention does half of the square; its backward pass has five products for the two of forward."""
    moved, dtype = _bytes(tensors), tensors[0].dtype
    if name in ("mm", "addmm", "addmm_", "bmm", "baddbmm"):
        a, b = [each for each in tensors if each.dim() > 1][:2] if name in ("mm", "bmm") else tensors[1:3]
        shape = (prod(a.shape[:-1]), a.shape[-1], b.shape[-1])
        return Operator("product", "", moved, 2.0 * prod(shape), shape, a.dtype)
    if name == "_grouped_mm":  # rows of experts by a matrix each, or by rows, which gives a matrix each
        rows, inner, columns = tensors[0].shape[0], tensors[0].shape[1], tensors[1].shape[-1]
        return Operator("product", "", moved, 2.0 * rows * inner * columns, (rows, inner, columns), dtype)
    backward = 2.5 if "backward" in name else 1.0
    if "varlen_attn" in name:
        tokens, heads, head_dim = tensors[1 if backward > 1 else 0].shape
        given = *args, *kwargs.values()
        longest = next(each for each in given if isinstance(each, int))
        window = (1 + each[0] for each in given if isinstance(each, list | tuple) and each[0] >= 0)
        seen = min((longest, *window))
        pairs = tokens * heads * (seen - seen**2 / (2 * longest))
        return Operator("attention", "", moved, 4.0 * backward * pairs * head_dim, (head_dim,), dtype)
    if "flash_attention" in name:
        q, k = tensors[1:3] if backward > 1 else tensors[:2]
        batch, heads, length, head_dim = q.shape
        pairs = batch * heads * length * k.shape[2] / (2 if any(each is True for each in args) else 1)  # causal or not
        return Operator("attention", "", moved, 4.0 * backward * pairs * head_dim, (head_dim,), dtype)
    if name.startswith("_fused_adam"):
        moved = 4.0 * ADAM_NUMBERS * sum(each.numel() for each in args[0])
    return Operator("memory", "", moved)
