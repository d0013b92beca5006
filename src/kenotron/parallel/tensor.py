"""Tensor and sequence parallelism split matrices over ranks, with explicit collectives.

    ALL_REDUCE: every rank holds all of the residual stream x

      x ─ norm ─ copy_to ──▶ [ W_q W_k W_v ] ▶ attention ▶ [ W_o ] ──▶ sum ──▶ (+) x        sum back in copy_to
                                 columns                      rows

    REDUCE_SCATTER: a rank holds tokens / tp rows of x, and norms work on these

      x ─ norm ─ all-gather ▶ [ W_q W_k W_v ] ▶ attention ▶ [ W_o ] ──▶ reduce-scatter ──▶ (+) x

Column-parallel layers hold some of the output features, row-parallel ones some of the input features, so the pair
needs one sum forward and one backward (Shoeybi et al. 2019, arXiv 1909.08053). A sum is a reduce-scatter and an
all-gather: with the norms between the two, nothing is computed twice and activations shrink by tp (Korthikanti et al.
2022, arXiv 2205.05198). Linears that share their input (q, k, v; gate, up) share its collective:
`ColumnParallelLinear.grouped`.

Two ranks hold these shards of an MLP with hidden 4 and intermediate 6:

    gate_proj, up_proj [6, 4]   rank 0: rows 0-2      rank 1: rows 3-5         Shard(0)
    down_proj          [4, 6]   rank 0: columns 0-2   rank 1: columns 3-5      Shard(1)
    norm               [4]      both: all of it                                Replicate()

`apply` replaces the modules that a plan names. All parameters become DTensors on the mesh's tp axis, but only as
labels, which FSDP2, checkpoints and clipping read; computation uses local tensors. If a rank's gradient is a partial
sum (of a norm that saw only its tokens, or its heads), its placement is Partial(); FSDP2 and `optim.clip` sum it once
per step.

Tokens are sharded only in training. In eval mode (validation, generation: any number of tokens) REDUCE_SCATTER computes
like ALL_REDUCE, with whole hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from kenotron.config.errors import InputError
from kenotron.kernels.linear_cross_entropy import VocabularyRanks
from kenotron.kernels.products import Exchange, Linears, itself, linear
from kenotron.models import Plan
from kenotron.models.blocks.head import LMHead, bounded
from kenotron.models.blocks.linear import Embedding, Linear
from kenotron.models.blocks.norm import GroupRMSNorm, RMSNorm
from kenotron.models.decoder import Decoder
from kenotron.models.plan import modules
from kenotron.parallel.collectives import (
    Started,
    all_reduce,
    copy_to,
    finish,
    reduce_from,
    start_gather,
    start_reduce_scatter,
    start_sum,
    unshard_columns,
)
from kenotron.parallel.experts import split_experts
from kenotron.parallel.mesh import Mesh
from kenotron.parallel.tensor_labels import (
    ChannelParallel,
    Replicated,
    TensorParallelSettings,
    local_part,
    rows_here,
    split_by_heads,
)


def apply(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    *,
    mode: str = "ALL_REDUCE",
    asynchronous: bool = False,
    recompute_allgather: bool = True,
) -> None:
    """Split `model` over the tp axis of `mesh` by `plan`, in place; at tp 1 nothing changes.

    `model` may be on the meta device (then the parallel modules' weights are empty), or have weights that are the same
    on every rank, which keeps its shard. It may be a part of a pipeline: patterns without a match then belong to
    another part. A module that the plan does not name keeps whole weights and must see whole activations;
    `parallel.partial_gradients` refuses models in which it does not, before anything is built.

    `mode`: ALL_REDUCE or REDUCE_SCATTER, as shown above. `asynchronous`: backward computes weight gradients while the
    gradient of their input is being summed. `recompute_allgather`: REDUCE_SCATTER keeps only the rank's own tokens of
    column layers' inputs, and gathers the others again in backward.

    Raises InputError if tp does not divide a weight or its heads, or a module has no parallel version.
    """
    if mesh.degree("tp") == 1:
        return
    plan.check(model.complete() if isinstance(model, Decoder) else model)
    if mode not in ("ALL_REDUCE", "REDUCE_SCATTER"):
        raise InputError(f"parallelism.tp_mode: expected ALL_REDUCE or REDUCE_SCATTER, found {mode!r}")
    group, ranks = mesh.group("tp"), mesh.submesh("tp")
    assert group is not None
    assert ranks is not None
    settings = TensorParallelSettings(ranks, group, mode == "REDUCE_SCATTER", asynchronous, recompute_allgather)
    kv = {name for name, _ in modules(model, *plan.kv)}
    on_shards = {name for name, _ in modules(model, *plan.sequence)}
    per_head = {name for name, _ in modules(model, *plan.per_head)}
    for patterns, by_columns in ((plan.column, _column_parallel), (plan.channels, ChannelParallel)):
        for name, module in modules(model, *patterns):
            _replace(model, name, by_columns(module, settings, name, _head_dim(model, name), name in kv))
    for patterns, by_rows in ((plan.row, RowParallelLinear), (plan.inner_row, InnerRowParallelLinear)):
        for name, module in modules(model, *patterns):
            _replace(model, name, by_rows(module, settings, name, _head_dim(model, name)))
    for name, module in modules(model, *plan.experts):
        split_experts(module, settings, name)
    tied: dict[Any, nn.Parameter] = {}
    for name, module in modules(model, *plan.vocab):
        vocabulary = _vocab_parallel(module, settings, name)
        vocabulary.weight = tied.setdefault(module.weight, vocabulary.weight)
        _replace(model, name, vocabulary)
    for name, module in list(model.named_modules()):
        if any(not isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            _check_is_a_leaf(name, module)
            _replace(model, name, Replicated(module, settings, name in on_shards, name in per_head))
    if isinstance(model, Decoder):
        model.tie_weights()


def _replace(model: nn.Module, name: str, parallel: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, parallel)


def _head_dim(model: nn.Module, name: str) -> int:
    """Return how many features stay on one rank: the module's `together`, an attention head's, or 1."""
    own = getattr(model.get_submodule(name), "together", 0)
    return own or getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", 1)


def _column_parallel(
    module: Any, settings: TensorParallelSettings, name: str, head_dim: int, kv: bool
) -> ColumnParallelLinear | ColumnParallelRMSNorm | ColumnParallelEmbedding | ChannelParallel:
    if isinstance(module, Embedding):
        return ColumnParallelEmbedding(module, settings, name, head_dim, kv)
    if not isinstance(module, RMSNorm):
        return ColumnParallelLinear(module, settings, name, head_dim, kv)
    if isinstance(module, GroupRMSNorm) and module.groups > 1:  # a rank has whole groups
        return ChannelParallel(module, settings, name, module.group_size, kv)
    return ColumnParallelRMSNorm(module, settings, name, head_dim, kv)


def _vocab_parallel(
    module: nn.Module, settings: TensorParallelSettings, name: str
) -> VocabParallelHead | VocabParallelEmbedding:
    if isinstance(module, LMHead):
        return VocabParallelHead(module, settings, name)
    plain = getattr(module, "padding_idx", None) is None and getattr(module, "max_norm", None) is None
    if isinstance(module, Embedding | nn.Embedding) and plain:
        return VocabParallelEmbedding(module, settings, name)
    raise InputError(
        f"plan.vocab: {name}: expected an embedding without padding_idx and max_norm, or a "
        f"kenotron.models.blocks.head.LMHead, found {module}"
    )


def _check_is_a_leaf(name: str, module: nn.Module) -> None:
    if name and not list(module.children()):
        return
    own = ", ".join(n for n, p in module.named_parameters(recurse=False) if not isinstance(p, DTensor))
    raise InputError(
        f"parallelism.tp: {name or type(module).__name__} holds parameters ({own}) beside other modules: give them a "
        "module of their own, so that it can run on local tensors"
    )


# Columns and rows ---------------------------------------------------------------------------------


class ColumnParallelLinear(Linear):
    """A linear with ``out_features / tp`` rows of W on each rank, whose output is ``[tokens, out / tp]``.

    x is ``[tokens, in]``, whole on every rank, or with REDUCE_SCATTER in training this rank's ``[tokens / tp, in]``.

    There may be fewer key-value heads (`kv`) than ranks: 2 heads over tp 4 go to ranks as 0 0 1 1. Then every rank
    holds all of W (it is small) and uses the rows of its head; the gradients, zero elsewhere, are summed.
    """

    def __init__(self, linear: Any, settings: TensorParallelSettings, name: str, head_dim: int, kv: bool) -> None:
        nn.Module.__init__(self)
        self.settings = settings
        placement, self.rows = split_by_heads(linear, settings, head_dim, kv)
        self.weight = settings.parameter(linear.weight, placement, head_dim, name)
        self.bias = None if linear.bias is None else settings.parameter(linear.bias, placement, head_dim, name)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's output features, ``[tokens, out / tp]``."""
        return self.grouped(x, self)[0]

    @staticmethod
    def grouped(x: Tensor, *linears: ColumnParallelLinear) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return the outputs of several column-parallel linears for one x, with one collective in each direction."""
        settings, sequence = linears[0].settings, linears[0].settings.sequence and linears[0].training
        x = _under_autocast(x)
        weights = [rows_here(each.weight, each.rows) for each in linears]
        biases = [None if each.bias is None else rows_here(each.bias, each.rows) for each in linears]
        return Linears.apply(x, _exchange(settings, sequence), *weights, *biases)


class ColumnParallelRMSNorm(nn.Module):
    """RMSNorm over all output features of a column-parallel linear, x ``[tokens, features / tp]``.

    Ranks sum their sums of squares in forward, and the gradients of the sum in backward. Key-value heads that several
    ranks hold (0 0 1 1) all count equally often, so the mean over ranks is still the mean over features.
    """

    def __init__(self, norm: Any, settings: TensorParallelSettings, name: str, head_dim: int, kv: bool) -> None:
        super().__init__()
        self.settings, self.eps = settings, norm.eps
        placement, self.rows = split_by_heads(norm, settings, head_dim, kv)
        self.weight = settings.parameter(norm.weight, placement, head_dim, name)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x, computed in fp32."""
        group, wide = self.settings.group, x.float()
        squares = wide.square().sum(-1, keepdim=True)
        squares = copy_to(reduce_from(squares, group), group)  # every rank uses the sum for its own features
        scale = torch.rsqrt(squares / (x.shape[-1] * group.size()) + self.eps)
        return (wide * scale * rows_here(self.weight, self.rows)).to(x.dtype)


class ColumnParallelEmbedding(nn.Module):
    """An embedding with ``width / tp`` columns on each rank; its output ``[tokens, width / tp]`` needs no collective.

    There may be fewer key-value heads (`kv`) than ranks, as in `ColumnParallelLinear`. A rank always sees all tokens.
    """

    def __init__(self, embedding: Any, settings: TensorParallelSettings, name: str, head_dim: int, kv: bool) -> None:
        super().__init__()
        placement, self.columns = split_by_heads(embedding, settings, head_dim, kv, dim=1)
        self.weight = settings.parameter(embedding.weight, placement, head_dim, name)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return this rank's columns of the rows of tokens int64."""
        if self.columns is None:
            return F.embedding(tokens, local_part(self.weight))
        return F.embedding(tokens, local_part(self.weight, partial=True))[:, self.columns]


def _under_autocast(x: Tensor) -> Tensor:
    """Return x in autocast's dtype: transformers' models run under autocast, but their backward pass does not."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _exchange(settings: TensorParallelSettings, sequence: bool) -> Exchange:
    start = _started if settings.asynchronous else _at_once
    gather = partial(start, start_gather, settings.group) if sequence else itself
    reduce = partial(start, start_reduce_scatter if sequence else start_sum, settings.group)
    return Exchange(gather, reduce, keep=not (sequence and settings.recompute_allgather))


def _started(collective: Callable[..., Started], group: dist.ProcessGroup, x: Tensor) -> Started:
    return collective(x, group)


def _at_once(collective: Callable[..., Started], group: dist.ProcessGroup, x: Tensor) -> Started:
    return itself(finish(collective(x, group)))


class RowParallelLinear(Linear):
    """A linear with ``in_features / tp`` columns of W on each rank; it sums products of x ``[tokens, in / tp]``.

    The sum is ``[tokens, out]`` on every rank, or with REDUCE_SCATTER in training this rank's ``[tokens / tp, out]``.
    """

    def __init__(self, linear: Any, settings: TensorParallelSettings, name: str, head_dim: int) -> None:
        nn.Module.__init__(self)
        self.settings = settings
        self.weight = settings.parameter(linear.weight, Shard(1), head_dim, name)
        self.bias = None if linear.bias is None else settings.parameter(linear.bias, Replicate())

    def forward(self, x: Tensor) -> Tensor:
        """Return the product summed over ranks, all of it or this rank's tokens."""
        x = _under_autocast(x)
        y = self.settings.leave(linear(x, local_part(self.weight).to(x.dtype)), self.training)
        if self.bias is None:
            return y
        sequence = self.settings.sequence and self.training
        return y + local_part(self.bias, partial=sequence).to(x.dtype)  # once, after the sum


class InnerRowParallelLinear(RowParallelLinear):
    """A row-parallel linear whose whole sum every rank needs, for x ``[tokens, in / tp]``.

    Every rank has the whole sum in every mode (Mamba's x_proj has a few dozen outputs per token); its gradients are
    summed over ranks.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the product summed over ranks, ``[tokens, out]``."""
        group = self.settings.group
        y = copy_to(reduce_from(linear(x, local_part(self.weight).to(x.dtype)), group), group)
        return y if self.bias is None else y + local_part(self.bias, partial=True).to(x.dtype)


# Vocabulary ---------------------------------------------------------------------------------------


class _VocabParallel(nn.Module):
    """A module with ``rows / tp`` vocabulary rows on each rank, from `first` on."""

    def __init__(self, module: Any, settings: TensorParallelSettings, name: str) -> None:
        nn.Module.__init__(self)
        self.settings = settings
        self.weight = settings.parameter(module.weight, Shard(0), name=name)
        self.rows = module.weight.shape[0] // settings.degree
        self.first = self.rows * settings.rank


class VocabParallelEmbedding(_VocabParallel):
    """Embeds tokens ``[tokens]`` to ``[tokens, hidden]``: each rank looks up its own rows, and the results are summed.

    With REDUCE_SCATTER in training each rank gets its ``[tokens / tp, hidden]`` of the sum.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens int64. A token outside the vocabulary fails on the device."""
        torch._assert_async(
            ((tokens >= 0) & (tokens < self.weight.shape[0])).all(), "a token outside the vocabulary's rows"
        )
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.rows)
        rows = F.embedding(local.masked_fill(elsewhere, 0), local_part(self.weight))
        return self.settings.leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.training)


class VocabParallelHead(_VocabParallel, LMHead):
    """A head whose logits are sharded; the loss communicates a maximum, a sum of exponentials and a logit per token.

    The loss is the same on every rank. If logits are requested, every rank gathers those of the whole vocabulary.
    """

    def __init__(self, head: LMHead, settings: TensorParallelSettings, name: str) -> None:
        super().__init__(head, settings, name)
        self.vocab_size, self.z_loss, self.softcap = head.vocab_size, head.z_loss, head.softcap
        largest = partial(all_reduce, group=settings.group, op=dist.ReduceOp.MAX)
        self.ranks = VocabularyRanks(self.first, largest, partial(all_reduce, group=settings.group))

    def operands(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As in `LMHead`, for all tokens."""
        return self.settings.enter(hidden, self.training), local_part(self.weight)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return logits ``[tokens, vocab]`` on every rank."""
        logits = unshard_columns(linear(hidden, weight.to(hidden.dtype)), self.settings.group)
        return bounded(logits[:, : self.vocab_size], self.softcap)
