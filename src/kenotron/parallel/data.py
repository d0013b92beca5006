"""Data parallelism: ranks read different samples, act as one, and split what need not be replicated.

Four ranks, one weight matrix w in four row blocks; what rank 0 holds between two steps:

    zero_stage           0           1           2           3        hybrid, groups of 2
    weights, rank 0   w0w1w2w3    w0          w0          w0          w0w1       fp32 masters
    optimizer state   w0w1w2w3    w0          w0          w0          w0w1
    gradients         w0w1w2w3    w0w1w2w3    w0          w0          w0w1       until the last micro-batch
    weights at work   w0w1w2w3    w0w1w2w3    w0w1w2w3    one block   one block  gathered, in the compute dtype
    sent, per step     all-reduce  gather +    gather +    gather in   as 3, in the group, and an all-reduce
                                   scatter     a scatter   forward     of what is left across groups
                                               a micro-    and backward, scatter, each
                                               batch       a micro-batch

Stage 0 is in this file: plain weights, and `GradientBuckets` sums gradients during the last backward pass. The other
stages are FSDP2 (``fully_shard``), configured for what to keep and when to communicate:

    master fp32 ──cast, gather──▶ bf16 weights ──forward, backward──▶ bf16 gradients ──cast, sum──▶ fp32 ──▶ optimizer

Losses are sums (docs/architecture.md), so every reduction must be a plain sum in fp32. Neither of FSDP2's two settings
for that recurses, and set on the root alone gradients are silently off by the world size: `set_sum_reduction` sets them
on every FSDP module.

Ranks of one context-parallel group hold the same weights too, so `apply` folds that axis in: into the sharding
ranks, or at stage 0 into the replicas. On one rank nothing is wrapped: the layers cast their fp32 weights themselves
(`models.blocks.linear`), where FSDP2 on a mesh of one would make three times the copies.

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
    """Make `root`, the module that is called, data-parallel block by block; on one rank leave it as it is.

    `zero_stage` 0 to 3 says what the ranks along dp_shard (and cp) split among them; a mesh with dp_replicate larger
    than 1 keeps copies of such groups (hybrid). Parameters may still be on the meta device; those that are DTensors
    over tp become DTensors over both. `cpu_offload` keeps the sharded masters, their gradients and the optimizer's
    state in host memory: materialize them there (on a CPU run they are there anyway), but buffers and frozen weights on
    the device. `bucket_cap_mb`: MiB of gradients that stage 0 sums in one collective (25 is also torch's choice in
    DistributedDataParallel). Raises `InputError` for `cpu_offload` where nothing is sharded, or the experts are not.
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
    # Experts that other ranks do not have are replicated over fewer ranks than other weights.
    groups = (("gradient", False, sharded), ("expert_gradient", True, mesh.degree("expert_shard") > 1))
    replicas = [(mesh.group(name), of_experts) for name, of_experts, split in groups if not split]
    buckets = [GradientBuckets(group, bucket_cap_mb, of_experts) for group, of_experts in replicas if group is not None]
    if buckets:
        root.gradient_buckets = buckets  # type: ignore[assignment]


def load_strategy(path: str | None) -> Strategy:
    """The function behind ``parallelism.strategy``: `apply`, or what a dotted path names instead of it.

    A function of your own is called as ``f(root, blocks, mesh, *, zero_stage, compute_dtype, cpu_offload,
    bucket_cap_mb)``, at any degree, before the weights have memory. It must leave every name as it is and make
    gradients plain sums over the ranks that hold the same weights (`set_sum_reduction` for modules it wrapped with
    FSDP2). Raises `InputError`.
    """
    if path is None or "." not in path:
        return apply
    found = import_dotted(path, "parallelism.strategy")
    if not callable(found):
        raise InputError(f"parallelism.strategy: expected a function at '{path}', found {found!r}")
    return found


def set_last_micro_batch(root: nn.Module, last: bool) -> None:
    """Call before each micro-batch: is it the `last` of the step? Communication that can wait until then is deferred.

    Stages 0 and 1 communicate gradients only in the last one, stage 2 in each; 1 and 2 keep the gathered weights until
    then. The last one must drop them: otherwise the next step silently trains on stale weights. Under pp torch's
    schedules do this for FSDP2, and this function is not called.
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
    """Call after the last backward of a step and before a gradient is read: all are sums over ranks from here on."""
    for buckets in _buckets(root):
        buckets.finish(root)


def reshard_params(root: nn.Module) -> None:
    """Make ``root.parameters()`` the fp32 masters again after a forward without backward.

    Backward drops the copies in the compute dtype; validation and sampling have no backward, and saving the parameters
    or looking up their optimizer state would find the copies.
    """
    for module in _sharded(root):
        module.reshard()


@contextmanager
def evaluating(parts: Sequence[nn.Module], roots: Sequence[nn.Module]) -> Iterator[None]:
    """Within, `parts` are in eval mode; afterwards as before, and `roots`, which are called, have their masters."""
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
    """Every FSDP module in `root` adds gradients up: no mean, and no operation but SUM (gloo has no other)."""
    for module in _sharded(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


class GradientBuckets:
    """Stage 0: sums the gradients of weights that are replicated over the ranks of `group`.

    Those are the experts of expert-parallel mixtures (`of_experts`), or all others.

    Gradients of the last backward pass are collected into buckets of `bucket_cap_mb` MiB; a full bucket becomes one
    buffer, which is all-reduced while backward continues, and its gradients become views of it. `finish` waits. All
    ranks fill buckets in the same order, last parameter first, whatever order autograd has on each: two gradients of
    one shape in the wrong order would be silently wrong.

    FSDP2 on shards of one (and torch's ``replicate``, which is that) would copy every weight and gradient besides, and
    keep three tensors for each weight.
    """

    def __init__(self, group: dist.ProcessGroup, bucket_cap_mb: float = 25, of_experts: bool = False) -> None:
        self.group, self.bucket_bytes, self.of_experts = group, int(bucket_cap_mb * 2**20), of_experts
        self.waiting: deque[nn.Parameter] | None = None  # not in a bucket yet, in the order of the sums
        self.arrived: set[nn.Parameter] = set()
        self.bucket: list[nn.Parameter] = []  # the next to be summed, in one collective
        self.bytes = 0  # of the bucket
        self.sums: list[tuple[Callable[[], object], list[tuple[Tensor, Tensor]]]] = []  # and what to copy where then
        self.watched: set[nn.Parameter] = set()

    def expect(self, root: nn.Module) -> None:
        """Call before the last backward pass of a step: it completes the gradients of `root`."""
        parameters = self._parameters(root)
        for parameter in parameters:
            if parameter not in self.watched:  # not at the start: giving a meta parameter memory makes another of it
                parameter.register_post_accumulate_grad_hook(_weakly(self._has_gradient))
                self.watched.add(parameter)
        self.waiting, self.arrived = deque(reversed(parameters)), set()

    def _has_gradient(self, parameter: nn.Parameter) -> None:
        if self.waiting is None:
            return  # micro-batches are still to come
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
                    parameter.grad = part.view_as(gradient)  # which frees the gradient's memory
                else:
                    copies.append((gradient, part.view_as(gradient)))
        self.sums.append((start_all_reduce(summed, self.group), copies))
        self.bucket, self.bytes = [], 0

    def finish(self, root: nn.Module) -> None:
        """Start what has not been started (all, when nothing was expected: under pp) and wait for everything."""
        waiting = deque(reversed(self._parameters(root))) if self.waiting is None else self.waiting
        for parameter in waiting:
            if parameter.grad is not None:  # took no part in this step, on no rank
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
    """The modules of `root` with experts that lie over ranks in another way than other weights (`parallel.experts`)."""
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
    # What no block holds stays fp32 at work and is cast by its layer: an embedding row's gradient is a sum over many
    # tokens, and in bf16 frequent tokens would swallow theirs.
    outside_blocks = MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32, cast_forward_inputs=False)
    shards = _sharding_mesh(mesh, "dp_replicate", "shard")
    of_experts = _sharding_mesh(mesh, "expert_replicate", "expert_shard")
    assert shards is not None
    offload = CPUOffloadPolicy() if cpu_offload and shards.device_type != "cpu" else OffloadPolicy()
    options: dict[str, Any] = {"mp_policy": precision, "offload_policy": offload}
    options["reshard_after_forward"] = zero_stage == 3
    # Biases of routers, which no gradient reaches, stay whole and in fp32, and so do experts that no ranks split.
    apart = {parameter for parameter in root.parameters() if not parameter.requires_grad}
    for experts in experts_apart(root):
        if of_experts is None:
            apart.update(experts.parameters())
        else:
            fully_shard(experts, mesh=of_experts, shard_placement_fn=_even_split_over(of_experts), **options)
    options |= {"mesh": shards, "ignored_params": apart, "shard_placement_fn": _even_split_over(shards)}
    for block in blocks:
        fully_shard(block, **options)
    # The root's weights are needed from the first forward to the last backward: dropping them between buys nothing.
    fully_shard(root, **options | {"mp_policy": outside_blocks, "reshard_after_forward": False})
    root.zero_stage = zero_stage  # type: ignore[assignment]
    set_sum_reduction(root)
    if shards.device_type != "cpu":  # where a gather is a wait, and would only hold one block's weights more
        gather_ahead(root, blocks, zero_stage)


def gather_ahead(root: nn.Module, blocks: Sequence[nn.Module], zero_stage: int) -> None:
    """Begin to gather a block's weights, and those of its experts, when the block before it begins to compute.

    By itself torch begins as soon as the host gets there: too late where the host waits in every layer, for the number
    of tokens that experts on other ranks get, and after the wait at the end of a step.
    """
    modules: list[list[Any]] = [_sharded(block) for block in blocks]
    for (module, *_), following in pairwise([[root], *modules]):
        module.set_modules_to_forward_prefetch(following)
    if zero_stage == 3:  # the other stages still have them
        for (module, *_), previous in pairwise([[root], *reversed(modules)]):
            module.set_modules_to_backward_prefetch(previous)


def _sharding_mesh(mesh: Mesh, replicate: str, shard: str) -> DeviceMesh | None:
    """``[shard]``, or with copies of those groups ``[replicate, shard]``; None: nothing is split.

    A part of the run's mesh, so that FSDP2 can combine its placements with those of tp's DTensors.
    """
    shards, copies = mesh.submesh(shard), mesh.submesh(replicate)
    return shards if copies is None or shards is None else concatenate([copies, shards])


def _even_split_over(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """FSDP2's choice of a dimension for stacked weights of experts, over the ranks of the mesh's last axis.

    Of 8 experts over 64 ranks FSDP2 would give a rank one or none, and pad every gather and every sum to 64. It pads
    only the first dimension, and the others cost a copy of the gathered weights: they serve where the first does not
    divide evenly and they do.
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
    """`method` as long as its object exists. A parameter's hook is in C++, where Python's collector finds no cycles."""
    found = WeakMethod(method)

    def call(parameter: nn.Parameter) -> None:
        bound = found()
        if bound is not None:
            bound(parameter)

    return call


def _buckets(root: nn.Module) -> list[GradientBuckets]:
    return getattr(root, "gradient_buckets", [])


def _sharded(root: nn.Module) -> list[Any]:
    """The FSDP modules of `root`; none when it is plain (and FSDP is never imported to find that out)."""
    return [module for module in root.modules() if hasattr(module, "set_requires_gradient_sync")]
