"""Data parallelism: ranks read different samples and may shard weights, gradients and optimizer state (ZeRO).

With four ranks and a weight matrix w in four row blocks, rank 0 holds between two steps:

    zero_stage           0           1           2           3        hybrid, groups of 2
    weights, rank 0   w0w1w2w3    w0          w0          w0          w0w1       fp32 masters
    optimizer state   w0w1w2w3    w0          w0          w0          w0w1
    gradients         w0w1w2w3    w0w1w2w3    w0          w0          w0w1       until the last micro-batch
    weights at work   w0w1w2w3    w0w1w2w3    w0w1w2w3    one block   one block  gathered, in the compute dtype
    sent, per step     all-reduce  gather +    gather +    gather in   as 3, in the group, and an all-reduce
                                   scatter     a scatter   forward     of what is left across groups
                                               a micro-    and backward, scatter, each
                                               batch       a micro-batch

Stage 0 is in this file: weights are plain, and `GradientBuckets` sums gradients in the last backward pass. The other
stages use FSDP2 (``fully_shard``), configured for which copies to keep and when to communicate:

    master fp32 ──cast, gather──▶ bf16 weights ──forward, backward──▶ bf16 gradients ──cast, sum──▶ fp32 ──▶ optimizer

Losses are sums (docs/architecture.md), so every reduction must be a plain sum in fp32. FSDP2's two settings for this do
not recurse; set only on the root, gradients would silently be wrong by the world size. `set_sum_reduction` sets them on
every FSDP module.

Ranks of one context-parallel group hold the same weights as well, so `apply` adds this axis to the sharding ranks, or
at stage 0 to the replicas. On one rank nothing is wrapped: the layers cast their fp32 weights themselves
(`models.blocks.linear`), whereas FSDP2 on a mesh of one would make three times the copies.

(ZeRO: Rajbhandari et al. 2020, arXiv 1910.02054. FSDP: Zhao et al. 2023, arXiv 2304.11277.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kenotron.config.dotted import import_dotted
from kenotron.config.errors import InputError
from kenotron.parallel.collectives import start_all_reduce
from kenotron.parallel.mesh import Mesh
from kenotron.parallel.shards import local_tensor
from kenotron.parallel.torch_internals import concatenate

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

Strategy = Callable[..., None]


def apply(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: Mesh,
    *,
    zero_stage: int = 0,
    compute_dtype: torch.dtype = torch.float32,
    cpu_offload: bool = False,
    bucket_cap_mb: float = 25,
) -> None:
    """Make `root`, the module that is called, data-parallel block by block; on one rank leave it unchanged.

    `zero_stage` 0 to 3 chooses what the ranks along dp_shard (and cp) shard; a mesh with dp_replicate larger than 1 has
    replicas of such groups (hybrid). Parameters may still be on the meta device; DTensors over tp become DTensors over
    both. `cpu_offload` keeps the sharded masters, their gradients and the optimizer's state in host memory: materialize
    them there (in a CPU run they are there anyway), but buffers and frozen weights on the device. `bucket_cap_mb`: MiB
    of gradients that stage 0 sums in one collective (25 is also the default of torch's DistributedDataParallel). Raises
    `InputError` for `cpu_offload` if nothing is sharded, or experts are not.
    """
    sharded = zero_stage > 0 and mesh.degree("shard") > 1
    if cpu_offload and not sharded:
        raise InputError(
            "parallelism.cpu_offload: it moves shards, but nothing is sharded; expected optimizer.zero_stage "
            f"1, 2, 3 or hybrid on more than one rank, found {zero_stage} on dp_shard {mesh.degree('dp_shard')}"
        )
    if cpu_offload and experts_apart(root) and mesh.degree("expert_shard") == 1:
        raise InputError(
            "parallelism.cpu_offload: it moves shards, but no other rank has the experts of this one, so they are not "
            f"sharded; expected fewer than the {mesh.degree('ep')} ranks of expert_parallel_size, or more replicas"
        )
    if sharded:
        _shard(root, blocks, mesh, zero_stage, compute_dtype, cpu_offload)
    # With expert parallelism, experts are replicated over fewer ranks than other weights.
    groups = (("gradient", False, sharded), ("expert_gradient", True, mesh.degree("expert_shard") > 1))
    replicas = [(mesh.group(name), of_experts) for name, of_experts, split in groups if not split]
    buckets = [GradientBuckets(group, bucket_cap_mb, of_experts) for group, of_experts in replicas if group is not None]
    if buckets:
        root.gradient_buckets = buckets  # type: ignore[assignment]


def load_strategy(path: str | None) -> Strategy:
    """Return the function of ``parallelism.strategy``: `apply`, or the one that a dotted path names.

    Your own function is called as ``f(root, blocks, mesh, *, zero_stage, compute_dtype, cpu_offload, bucket_cap_mb)``,
    at any degree, before weights are allocated. It must not change names, and must make gradients plain sums over the
    ranks that hold the same weights (`set_sum_reduction` for modules wrapped with FSDP2). Raises `InputError` if the
    path names no function.
    """
    if path is None or "." not in path:
        return apply
    found = import_dotted(path, "parallelism.strategy")
    if not callable(found):
        raise InputError(f"parallelism.strategy: expected a function at '{path}', found {found!r}")
    return found


def set_last_micro_batch(root: nn.Module, last: bool) -> None:
    """Defer communication until the `last` micro-batch of a step, if possible; call before each micro-batch.

    Stages 0 and 1 communicate gradients only in the last micro-batch, stage 2 in each; 1 and 2 keep the gathered
    weights until then. The last one must drop them: otherwise the next step silently trains on stale weights. With pp,
    torch's schedules do this for FSDP2, and this function is not called.
    """
    zero_stage = getattr(root, "zero_stage", None)
    for buckets in _buckets(root) if last else ():
        buckets.expect(root)
    if zero_stage not in (1, 2):
        return  # nothing is kept from one micro-batch to the next
    for module in _sharded(root):
        module.set_requires_gradient_sync(last or zero_stage == 2, recurse=False)
        module.set_reshard_after_backward(last, recurse=False)


def finish_gradients(root: nn.Module) -> None:
    """Wait until gradients are sums over ranks; call after a step's last backward, before a gradient is read."""
    for buckets in _buckets(root):
        buckets.finish(root)


def reshard_params(root: nn.Module) -> None:
    """Make ``root.parameters()`` the fp32 masters again after a forward without backward.

    Backward drops the copies in the compute dtype; after validation and sampling, which have no backward, saving the
    parameters or looking up their optimizer state would otherwise find the copies.
    """
    for module in _sharded(root):
        module.reshard()


@contextmanager
def evaluating(parts: Sequence[nn.Module], roots: Sequence[nn.Module]) -> Iterator[None]:
    """Put `parts` in eval mode; at the end, restore their modes, and reshard the `roots`, which are called."""
    training = [part.training for part in parts]
    for part in parts:
        part.eval()
    try:
        yield
    finally:
        for part, mode in zip(parts, training):
            part.train(mode)
        for root in roots:
            reshard_params(root)


def set_sum_reduction(root: nn.Module) -> None:
    """Make every FSDP module in `root` sum gradients: without a mean, and with SUM (gloo has no other operation)."""
    for module in _sharded(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


class GradientBuckets:
    """Sums, in stage 0, the gradients of weights that are replicated over the ranks of `group`.

    They are the experts of expert-parallel mixtures (`of_experts`), or all other weights.

    Gradients of the last backward pass are collected into buckets of `bucket_cap_mb` MiB; a full bucket becomes one
    buffer, which is all-reduced while backward continues, and its gradients become views of it. `finish` waits. All
    ranks fill buckets in the same order, last parameter first, independent of autograd's order on each: two gradients
    of one shape in different orders would be silently wrong.

    FSDP2 with shards of one rank (which torch's ``replicate`` is) would copy every weight and gradient in addition, and
    keep three tensors for each weight.
    """

    def __init__(self, group: dist.ProcessGroup, bucket_cap_mb: float = 25, of_experts: bool = False) -> None:
        self.group, self.bucket_bytes, self.of_experts = group, int(bucket_cap_mb * 2**20), of_experts
        self.waiting: deque[nn.Parameter] | None = None  # parameters not in a bucket yet, in order
        self.arrived: set[nn.Parameter] = set()
        self.bucket: list[nn.Parameter] = []  # the next parameters to be summed, in one collective
        self.bytes = 0  # size of the bucket
        self.sums: list[tuple[Callable[[], object], list[tuple[Tensor, Tensor]]]] = []  # (wait, copies to make then)
        self.watched: set[nn.Parameter] = set()

    def expect(self, root: nn.Module) -> None:
        """Prepare for the last backward pass of a step, which completes the gradients of `root`."""
        parameters = self._parameters(root)
        for parameter in parameters:
            if parameter not in self.watched:  # not earlier: materializing a meta parameter makes a new one
                parameter.register_post_accumulate_grad_hook(_weakly(self._has_gradient))
                self.watched.add(parameter)
        self.waiting, self.arrived = deque(reversed(parameters)), set()

    def _has_gradient(self, parameter: nn.Parameter) -> None:
        if self.waiting is None:
            return  # more micro-batches follow
        self.arrived.add(parameter)
        while self.waiting and self.waiting[0] in self.arrived:
            self._add(self.waiting.popleft())

    def _add(self, parameter: nn.Parameter) -> None:
        self.bucket.append(parameter)
        self.bytes += 4 * local_tensor(parameter.grad).numel()
        if self.bytes >= self.bucket_bytes:
            self._start()

    def _start(self) -> None:
        """Start the all-reduce of the bucket in fp32: of one gradient in place, of several as views of one buffer."""
        if not self.bucket:
            return
        gradients = [local_tensor(parameter.grad) for parameter in self.bucket]
        summed = (gradients[0] if len(gradients) == 1 else torch.cat([g.reshape(-1) for g in gradients])).float()
        copies: list[tuple[Tensor, Tensor]] = []
        if summed is not gradients[0]:
            parts = summed.split([gradient.numel() for gradient in gradients])
            for parameter, gradient, part in zip(self.bucket, gradients, parts):
                if parameter.grad is gradient and part.dtype == gradient.dtype:
                    parameter.grad = part.view_as(gradient)  # frees the gradient's memory
                else:
                    copies.append((gradient, part.view_as(gradient)))
        self.sums.append((start_all_reduce(summed, self.group), copies))
        self.bucket, self.bytes = [], 0

    def finish(self, root: nn.Module) -> None:
        """Start the remaining sums (all of them under pp, which does not call `expect`), and wait for all."""
        waiting = deque(reversed(self._parameters(root))) if self.waiting is None else self.waiting
        for parameter in waiting:
            if parameter.grad is not None:  # the parameter was used on no rank in this step
                self._add(parameter)
        self._start()
        for wait, copies in self.sums:
            wait()
            for gradient, part in copies:
                gradient.copy_(part)
        self.waiting, self.sums = None, []

    def _parameters(self, root: nn.Module) -> list[nn.Parameter]:
        experts = {parameter for module in experts_apart(root) for parameter in module.parameters()}
        return [p for p in root.parameters() if p.requires_grad and (p in experts) == self.of_experts]


def experts_apart(root: nn.Module) -> list[nn.Module]:
    """Return the modules of `root` with experts laid out over ranks differently from other weights (`experts`)."""
    return [module for module in root.modules() if getattr(module, "on_expert_mesh", False)]


def _shard(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: Mesh,
    zero_stage: int,
    compute_dtype: torch.dtype,
    cpu_offload: bool,
) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # cast_forward_inputs would round the fp32 RoPE tables; the embedding already emits the compute dtype.
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Weights outside of blocks are gathered in fp32 and cast by their layers: an embedding row's gradient sums many
    # tokens, and in bf16 small contributions to frequent tokens would be lost.
    outside_blocks = MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32, cast_forward_inputs=False)
    shards = _sharding_mesh(mesh, "dp_replicate", "shard")
    of_experts = _sharding_mesh(mesh, "expert_replicate", "expert_shard")
    assert shards is not None
    offload = CPUOffloadPolicy() if cpu_offload and shards.device_type != "cpu" else OffloadPolicy()
    options: dict[str, Any] = {"mp_policy": precision, "offload_policy": offload}
    options["reshard_after_forward"] = zero_stage == 3
    # Biases of routers, which no gradient reaches, stay whole and in fp32, as do experts that are not sharded.
    apart = {parameter for parameter in root.parameters() if not parameter.requires_grad}
    for experts in experts_apart(root):
        if of_experts is None:
            apart.update(experts.parameters())
        else:
            fully_shard(experts, mesh=of_experts, shard_placement_fn=_even_split_over(of_experts), **options)
    options |= {"mesh": shards, "ignored_params": apart, "shard_placement_fn": _even_split_over(shards)}
    for block in blocks:
        fully_shard(block, **options)
    # The root's weights are needed from the first forward to the last backward: dropping them in between saves nothing.
    fully_shard(root, **options | {"mp_policy": outside_blocks, "reshard_after_forward": False})
    root.zero_stage = zero_stage  # type: ignore[assignment]
    set_sum_reduction(root)
    if shards.device_type != "cpu":  # on CPUs a gather blocks, and an early one would only hold more weights
        gather_ahead(root, blocks, zero_stage)


def gather_ahead(root: nn.Module, blocks: Sequence[nn.Module], zero_stage: int) -> None:
    """Start to gather a block's weights, including its experts', when the previous block starts to compute.

    FSDP2 itself starts when the host reaches the block: too late if the host waits in every layer for the numbers of
    tokens that experts on other ranks get, and after the wait at the end of a step.
    """
    modules: list[list[Any]] = [_sharded(block) for block in blocks]
    for (module, *_), following in pairwise([[root], *modules]):
        module.set_modules_to_forward_prefetch(following)
    if zero_stage == 3:  # the other stages still have them
        for (module, *_), previous in pairwise([[root], *reversed(modules)]):
            module.set_modules_to_backward_prefetch(previous)


def _sharding_mesh(mesh: Mesh, replicate: str, shard: str) -> DeviceMesh | None:
    """Return the mesh ``[shard]``, or with replicas ``[replicate, shard]``; None if nothing is sharded.

    It is a submesh of the run's mesh, so that FSDP2 can combine its placements with those of tp's DTensors.
    """
    shards, copies = mesh.submesh(shard), mesh.submesh(replicate)
    return shards if copies is None or shards is None else concatenate([copies, shards])


def _even_split_over(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Return FSDP2's placement function for stacked weights of experts, over the ranks of the mesh's last axis.

    With 8 experts over 64 ranks, FSDP2 would give a rank one expert or none, and pad every gather and sum to 64. It
    pads only the first dimension, and sharding another costs a copy of the gathered weights: another dimension is used
    if it divides evenly and the first does not.
    """
    from torch.distributed.tensor import Shard

    ranks = mesh.shape[-1]  # size(-1) of flattened axes fails in torch 2.11

    def dimension(parameter: nn.Parameter) -> Shard | None:
        shape = local_tensor(parameter).shape
        if len(shape) < 3:
            return None
        return next((Shard(dim) for dim, size in enumerate(shape) if size % ranks == 0), None)

    return dimension


def _weakly(method: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    """Return `method` with a weak reference to its object: Python's collector sees no cycles through C++ hooks."""
    found = WeakMethod(method)

    def call(parameter: nn.Parameter) -> None:
        bound = found()
        if bound is not None:
            bound(parameter)

    return call


def _buckets(root: nn.Module) -> list[GradientBuckets]:
    return getattr(root, "gradient_buckets", [])


def _sharded(root: nn.Module) -> list[Any]:
    """Return the FSDP modules of `root`, none if it is plain, without importing FSDP."""
    return [module for module in root.modules() if hasattr(module, "set_requires_gradient_sync")]
