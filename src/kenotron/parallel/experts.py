"""Mixtures of experts over ranks.

Tensor parallelism splits every expert inside, as it splits a plain MLP; routing is the same on all ranks:

    x ─ all-gather or copy_to ─▶ router ─▶ [ gate up ] rows, [ down ] columns of all experts ─▶ sum or reduce-scatter

All collectives are at the two ends, also for the shared expert. Between them a rank's gradients of router and x are
summands: of the routing weights because its part of the experts is one, of the router's losses because each rank adds
its share of them (`MixtureOfExperts.equal_ranks`).

Expert parallelism gives each of ep ranks some of the experts, whole, and sends tokens to them. The ep ranks read
different tokens (they are data- and context-parallel ranks), so the world does not grow. Two ranks, four experts:

    rank 0   token a for experts 0 and 3, b for 1 and 2     sends  a→0 b→1 │ b→2 a→3     computes experts 0 and 1
    rank 1   token c for experts 1 and 2, d for 0 and 1     sends  d→0 c→1 d→1 │ c→2     computes experts 2 and 3

and the outputs come back the same way (`exchange`). An expert's gradient then holds the tokens of all ep ranks; what
is left to sum are the ranks that hold it too, `mesh.group("expert_gradient")`, among which ZeRO splits it.
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

INSIDE = {"gate_proj.weight": Shard(1), "up_proj.weight": Shard(1), "down_proj.weight": Shard(2)}  # of every expert


# Tensor parallelism ---------------------------------------------------------------------------------


def split_experts(moe: Any, settings: TensorParallelSettings, name: str) -> None:
    """Split the `MixtureOfExperts` `moe` over tp, in place; weights keep their names.

    Raises InputError: tp does not divide the width of an expert or of the shared one.
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
    """A linear without bias that computes with this rank's rows (`dim` 0) or columns (1), and sends nothing."""

    def __init__(self, linear: Any, settings: TensorParallelSettings, name: str, dim: int) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = settings.parameter(linear.weight, Shard(dim), name=name), None

    def forward(self, x: Tensor) -> Tensor:
        """x ``[tokens, in]`` or its columns here → ``[tokens, out]``, features here or a summand of all."""
        return linear(x, local_part(self.weight).to(x.dtype))


class ExpertShards(nn.Module):
    """The `Experts` of a mixture on this rank: parts of all (tp), some of them (ep), or parts of some.

    `weights` are DTensors by name. With a group of ep ranks as `exchange_over`, tokens go to where their experts are.
    """

    def __init__(
        self, experts: Any, weights: dict[str, nn.Parameter], exchange_over: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.exchange_over = exchange_over
        # What computes, given weights; in a tuple: its names and weights are not the model's.
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
        # Communication is not traced: compiled by torch 2.11, experts would get no gradients.
        return torch.compiler.disable(exchange)(compute, x, experts, weights, here, self.exchange_over)


# Expert parallelism ---------------------------------------------------------------------------------


def apply(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Leave this rank its part of the experts, in place; after tensor parallelism, before weights have memory.

    Where experts are laid out as all weights, nothing changes. The config has checked that ep divides the experts.
    """
    if mesh.expert_mesh is not None:
        for _, moe in modules(model, *plan.experts):
            moe.experts = _some_of(moe.experts, mesh, mesh.expert_mesh)
            moe.experts.on_expert_mesh = True  # type: ignore[assignment]


def _some_of(experts: Any, mesh: Mesh, expert_mesh: DeviceMesh) -> nn.Module:
    """The experts of this rank: rows of the stacked weights, labelled on the axes ep and tp where those are there."""
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
    """Send each token to the ranks of its experts, `compute` there, and add up what comes back.

    x ``[tokens, hidden]``, experts and weights ``[tokens, k]``; rank r has the experts from ``r * here`` on, `here` of
    them. Slots of expert ``here * ranks`` are dropped. `compute` is called with rows ``[rows, hidden]``, their expert
    among those here ``[rows, 1]`` and the weight ``[rows, 1]``. Returns x's shape. The host waits for the counts: it
    has to know how much to send and to receive.
    """
    slots, ranks = experts.shape[1], group.size()
    order, counts = slots_by_expert(experts, here * ranks + 1)
    counts = counts[:-1].contiguous()
    arriving = torch.empty_like(counts)  # [ranks, here]: rows from each rank for each expert here
    dist.all_to_all_single(arriving, counts, group=group)
    send, receive = counts_on_host(torch.stack((counts, arriving)).view(2, ranks, here).sum(2), len(order))
    order = order[: sum(send)]
    local = torch.arange(here, device=x.device).repeat(ranks).repeat_interleave(arriving, output_size=sum(receive))
    rows = exchange_rows(Spread.apply(x, order, slots), send, receive, group)
    row_weights = exchange_rows(weights.reshape(-1, 1).index_select(0, order), send, receive, group)
    y = compute(rows, local[:, None], row_weights)
    return Collect.apply(exchange_rows(y, receive, send, group), order, x.shape[0], slots)
