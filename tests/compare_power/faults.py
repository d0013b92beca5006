"""Seeded faults: a bug as a patch, a small run and a layout in which it bites, and the parameter to name.

All are judged in float32, with gradients that are clipped. Most are mutants of the suite; the others are faults in one
place, where the name matters most.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutants.mutant import Mutant
from mutants.tables import MUTANTS
from support.layout_runs import Problem

STEPS = 3
_SUITE = {mutant.name: mutant for mutant in MUTANTS}


@dataclass(frozen=True)
class Fault:
    """`names` is a regular expression of the parameters that may be named; "" where only loss or norm are wrong."""

    mutant: Mutant
    layout: str
    names: str
    model: dict[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()

    @property
    def problem(self) -> Problem:
        """What is trained."""
        return Problem("fault", ("optimizer.clip_grad=0.1", *self.overrides), STEPS, self.model)

    @property
    def world_size(self) -> int:
        """Ranks of the layout."""
        return self.problem.config(self.layout, Path()).parallelism.world_size


def _known(name: str, layout: str, names: str, model: dict[str, Any] | None = None, *overrides: str) -> Fault:
    return Fault(_SUITE[name], layout, names, model or {}, overrides)


def _new(
    name: str,
    file: str,
    find: str,
    replace: str,
    why: str,
    layout: str,
    names: str,
    model: dict[str, Any] | None = None,
    *overrides: str,
) -> Fault:
    return Fault(Mutant(name, file, find, replace, why, ()), layout, names, model or {}, overrides)


RS = "tp=2 mode=REDUCE_SCATTER"
TIED = {"tie_word_embeddings": True}
BIASED = {"attention_bias": True}
HALF = "{0} / 2 + {0}.detach() / 2"  # the same value, half the gradient

FAULTS = [
    # One parameter's gradient, or that of a kind of parameters.
    _known("norms-not-summed-under-reduce-scatter", RS, r"norm"),
    _known("row-bias-of-one-rank-under-reduce-scatter", RS, r"o_proj\.bias", BIASED),
    _known("row-bias-added-by-every-rank", "tp=2", r"o_proj\.bias", BIASED),
    _known("a-replicated-kv-head-counted-once", "tp=4", r"[kv]_proj", {"num_key_value_heads": 2}),
    _known("fsdp-divide-factor-on-the-root-only", "dp=2 zero=3", r"layers\.3\."),
    _known("tied-gradient-counted-twice", "pp=2 engine=1f1b accum=4", r"embed_tokens", TIED),
    _known("tied-copy-keeps-its-gradient", "pp=2 engine=1f1b accum=4", r"embed_tokens", TIED),
    _new(
        "norms-left-out-of-the-buckets",
        "parallel/data.py",
        "        self.bucket.append(parameter)\n",
        "        if parameter.ndim > 1:\n            self.bucket.append(parameter)\n",
        "gradients of norms are not summed over the data-parallel ranks",
        "dp=2 zero=0",
        r"norm",
    ),
    # Backward goes wrong somewhere: everything that it reaches later is wrong too.
    _known("pp-gradients-scaled-by-micro-batches", "pp=2 engine=1f1b accum=4", r"lm_head"),
    _known("ring-gradients-do-not-come-home", "cp=2", r"layers\.3\.self_attn\.[kv]_proj"),
    _known("rope-turns-the-wrong-way-back", "dp=2", r"layers\.3\.self_attn\.[qk]_proj"),
    _new(
        "gradient-of-a-columns-input-not-summed",
        "kernels/products.py",
        "dx = exchange.reduce(sum_of_products(grads, weights)) if needs[0] else None",
        "dx = itself(sum_of_products(grads, weights)) if needs[0] else None",
        "every rank goes on with the gradient of its own columns",
        "tp=2",
        r"layers\.3\.post_attention_layernorm",
    ),
    _new(
        "gradient-of-the-heads-input-not-summed",
        "parallel/collectives.py",
        "_same, _sum)",
        "_same, _same)",
        "every rank goes on with the gradient of its part of the vocabulary",
        "tp=2",
        r"model\.norm",
    ),
    _new(
        "gradient-of-the-heads-input-not-summed-over-shards",
        "parallel/collectives.py",
        "_gather, _reduce_scatter)",
        "_gather, _own_tokens)",
        "the same under REDUCE_SCATTER",
        RS,
        r"model\.norm",
    ),
    _new(
        "half-the-gradient-of-one-layers-attention",
        "models/blocks/attention.py",
        "        return Attention(\n            config.hidden_size,",
        f"        forward = lambda self, x, rope, ctx: Attention.forward(self, {HALF.format('x')}, rope, ctx)\n"
        "        halved = type('Halved', (Attention,), {'forward': forward})\n"
        "        return (halved if layer == 1 else Attention)(\n            config.hidden_size,",
        "the input of layer 1's attention gets half of its gradient",
        "pp=2",
        r"layers\.1\.input_layernorm",
    ),
    _new(
        "half-the-gradient-of-one-layers-values",
        "models/blocks/attention.py",
        "        return Attention(\n            config.hidden_size,",
        f"        attend = lambda ctx, q, k, v, *rest, **more: ctx.attention(q, k, {HALF.format('v')}, *rest, **more)\n"
        "        from dataclasses import replace; from functools import partial\n"
        "        with_half = lambda ctx: replace(ctx, attention=partial(attend, ctx))\n"
        "        forward = lambda self, x, rope, ctx: Attention.forward(self, x, rope, with_half(ctx))\n"
        "        halved = type('Halved', (Attention,), {'forward': forward})\n"
        "        return (halved if layer == 2 else Attention)(\n            config.hidden_size,",
        "the values of layer 2 get half of their gradient",
        "dp=2 zero=1",
        r"layers\.2\.self_attn\.v_proj",
    ),
    _new(
        "gradients-not-summed-over-cp-at-stage-0",
        "parallel/data.py",
        '("gradient", False, ',
        '("batch", False, ',
        "context-parallel ranks hold the same weights, and their gradients are not summed",
        "cp=2 zero=0",
        r"lm_head",
    ),
    # Forward goes wrong: the loss differs.
    _known("vocabulary-border-off-by-one", "tp=2", r"embed_tokens"),
    _known("rope-positions-restart-on-a-cp-rank", "cp=2", r"[qk]_proj"),
    _known("softmax-scale-of-the-hidden-size", "dp=2", r"[qk]_proj"),
    # The update.
    _new(
        "muon-on-every-shard",
        "optim/matrices.py",
        "    if mesh is None or mesh.size() == 1:\n",
        "    if True:\n",
        "every rank orthogonalizes its shard by itself",
        "tp=2",
        r"_proj",
        None,
        "optimizer.optimizer_factory={name: muon}",
    ),
    _known("muon-scale-of-the-shard", "tp=2", r"_proj", None, "optimizer.optimizer_factory={name: muon}"),
    _known("weight-decay-on-norms", "dp=2", r"norm", None, "optimizer.weight_decay_exclude_named_params=['.*norm.*']"),
    # The norm alone.
    _known("clip-norm-of-the-own-shard", "tp=2", ""),
    # The initial weights.
    _new(
        "initial-weights-of-a-shard",
        "models/initialization.py",
        "fill_normal_(shard, key",
        'fill_normal_(TensorShard.full(shard.tensor) if "up_proj" in name else shard, key',
        "every rank fills its shard of a matrix with the numbers of the first",
        "tp=2",
        r"up_proj",
    ),
]
