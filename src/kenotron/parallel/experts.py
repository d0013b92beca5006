"""Tensor and expert parallelism of mixtures of experts.

Tensor parallelism splits every expert like a plain MLP; routing is the same on all ranks:

    x ─ all-gather or copy_to ─▶ router ─▶ [ gate up ] rows, [ down ] columns of all experts ─▶ sum or reduce-scatter

All collectives are before and after the layer, also for the shared expert. In between, a rank's gradients of router and
x are partial sums: those through the routing weights because a rank has a shard of the experts, those of the router's
losses because each rank adds its share of them (`MixtureOfExperts.equal_ranks`).

Expert parallelism gives each of ep ranks some whole experts, and sends tokens to them. The ep ranks read different
tokens (they are data- and context-parallel ranks), so ep needs no additional ranks. With two ranks and four experts:

    rank 0   token a for experts 0 and 3, b for 1 and 2     sends  a→0 b→1 │ b→2 a→3     computes experts 0 and 1
    rank 1   token c for experts 1 and 2, d for 0 and 1     sends  d→0 c→1 d→1 │ c→2     computes experts 2 and 3

and the outputs come back the same way (`exchange`). An expert's gradient then includes the tokens of all ep ranks; it
is summed only over the ranks that hold the same expert, `mesh.group("expert_gradient")`, over which ZeRO shards it.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.func import functional_call

from kenotron.kernels.experts import counts_on_host, slots_by_expert
from kenotron.kernels.products import linear
from kenotron.kernels.token_slots import Collect, Spread
from kenotron.models.blocks.linear import Linear
from kenotron.models.plan import Plan, modules
from kenotron.parallel.collectives import exchange_rows
from kenotron.parallel.mesh import Mesh
from kenotron.parallel.tensor_labels import Replicated, TensorParallelSettings, local_part

INSIDE = {"gate_proj.weight": Shard(1), "up_proj.weight": Shard(1), "down_proj.weight": Shard(2)}  # of each expert


# Tensor parallelism ---------------------------------------------------------------------------------


def split_experts(moe: Any, settings: TensorParallelSettings, name: str) -> None:
    """Split the `MixtureOfExperts` `moe` over tp, in place; weights keep their names.

    Raises InputError if tp does not divide the width of an expert or of the shared one.
    """
    shared = moe.shared_expert
    weights = {
        path: settings.parameter(parameter, INSIDE[path], name=f"{name}.experts.{path}")
        for path, parameter in moe.experts.named_parameters()
    }
    moe.gate = Replicated(moe.gate, settings, on_shards=False, per_head=True)
    moe.experts = ExpertShards(moe.experts, weights)
    for path, module in [] if shared is None else list(shared.named_children()):
        dim = 1 if path == "down_proj" else 0
        setattr(shared, path, LocalLinear(module, settings, f"{name}.shared_expert.{path}", dim))
    if moe.shared_expert_gate is not None:
        moe.shared_expert_gate = Replicated(moe.shared_expert_gate, settings, on_shards=False, per_head=True)
    moe.equal_ranks = settings.degree
    moe.enter, moe.leave = settings.enter, settings.leave


class LocalLinear(Linear):
    """A linear without bias or communication that computes with this rank's rows (`dim` 0) or columns (1)."""

    def __init__(self, linear: Any, settings: TensorParallelSettings, name: str, dim: int) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = settings.parameter(linear.weight, Shard(dim), name=name), None

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's output features of x ``[tokens, in]``, or a partial sum of all from its columns of x."""
        return linear(x, local_part(self.weight).to(x.dtype))


class ExpertShards(nn.Module):
    """The `Experts` of a mixture on this rank: shards of all experts (tp), some experts (ep), or shards of some.

    `weights` are DTensors by name. With a group of ep ranks as `exchange_over`, tokens are sent to their experts.
    """

    def __init__(
        self, experts: Any, weights: dict[str, nn.Parameter], exchange_over: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.exchange_over = exchange_over
        # The module that computes with weights it is called with; in a tuple, so that its names are not the model's.
        self.maths = (copy.deepcopy(experts).to("meta"),)
        for path, weight in weights.items():
            owner, _, leaf = path.rpartition(".")
            self.add_module(owner, nn.Module())
            self.get_submodule(owner).register_parameter(leaf, weight)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """As in `Experts`."""
        tensors = {path: local_part(parameter) for path, parameter in self.named_parameters()}

        def compute(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
            return functional_call(self.maths[0], tensors, (x, experts, weights))

        if self.exchange_over is None:
            return compute(x, experts, weights)
        here = next(iter(tensors.values())).shape[0]
        # Communication is not traced: if it were compiled by torch 2.11, experts would get no gradients.
        return torch.compiler.disable(exchange)(compute, x, experts, weights, here, self.exchange_over)


# Expert parallelism ---------------------------------------------------------------------------------


def apply(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Keep only this rank's experts, in place; called after tensor parallelism, before weights are allocated.

    If experts are laid out like all other weights, nothing changes. The config has checked that ep divides the experts.
    """
    if mesh.expert_mesh is not None:
        for _, moe in modules(model, *plan.experts):
            moe.experts = _some_of(moe.experts, mesh, mesh.expert_mesh)
            moe.experts.on_expert_mesh = True  # type: ignore[assignment]


def _some_of(experts: Any, mesh: Mesh, expert_mesh: DeviceMesh) -> nn.Module:
    """Return this rank's experts: rows of the stacked weights, with placements on the axes ep and tp if they exist."""
    split_inside = isinstance(experts, ExpertShards)
    axes = (*mesh.larger("ep"), *(mesh.larger("tp") if split_inside else ()))
    if not axes:
        return experts
    weights = {}
    for path, parameter in experts.named_parameters():
        local = local_part(parameter) if split_inside else parameter
        rows = local.detach().chunk(mesh.degree("ep"))[mesh.rank("ep")].clone()
        placements: list[Placement] = [Shard(0) if axis == "ep" else INSIDE[path] for axis in axes]
        label = DTensor.from_local(rows, expert_mesh[axes], placements, run_check=False)
        weights[path] = nn.Parameter(label, parameter.requires_grad)
    return ExpertShards(experts.maths[0] if split_inside else experts, weights, mesh.group("ep"))


def exchange(
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    here: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """Send each token to the ranks of its experts, `compute` there, and sum the results that come back.

    x ``[tokens, hidden]``, experts and weights ``[tokens, k]``; rank r has `here` experts, from ``r * here`` on. Slots
    of expert ``here * ranks`` are dropped. `compute` is called with rows ``[rows, hidden]``, their local expert
    ``[rows, 1]`` and the weight ``[rows, 1]``. Returns x's shape. The host waits for the counts, which are the sizes of
    the messages.
    """
    slots, ranks = experts.shape[1], group.size()
    order, counts = slots_by_expert(experts, here * ranks + 1)
    counts = counts[:-1].contiguous()
    arriving = torch.empty_like(counts)  # [ranks, here]: rows from each rank for each local expert
    dist.all_to_all_single(arriving, counts, group=group)
    send, receive = counts_on_host(torch.stack((counts, arriving)).view(2, ranks, here).sum(2), len(order))
    order = order[: sum(send)]
    local = torch.arange(here, device=x.device).repeat(ranks).repeat_interleave(arriving, output_size=sum(receive))
    rows = exchange_rows(Spread.apply(x, order, slots), send, receive, group)
    row_weights = exchange_rows(weights.reshape(-1, 1).index_select(0, order), send, receive, group)
    y = compute(rows, local[:, None], row_weights)
    return Collect.apply(exchange_rows(y, receive, send, group), order, x.shape[0], slots)
