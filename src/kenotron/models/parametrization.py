"""Scale initial weights and optimizer steps with width and depth, so that learning rates transfer between sizes.

    model.init_method: {use_mup: true}                                              spectral: nanotron's absolute rule
    model.parametrization: {kind: mup, base_width: 256}                             relative to a model of that size
    model.parametrization: {kind: completep, base_width: 256, base_depth: 4}

With m = width / base_width and l = depth / base_depth, AdamW's settings are multiplied by

                            fresh weights   learning rate   weight decay   epsilon
    embedding, norms              1               1              1          1      (completep: 1 / (m l))
    matrices of a layer       1 / sqrt(m)       1 / m            m          1 / m  (completep: 1 / (m l))
    output head                 1 / m           1 / m            m          m      (completep: 1 / l)
    (completep) layers that write into the residual stream: also 1 / l, 1 / l, l, l, on weights as drawn at base_depth

Factors on activations (of logits, of residual branches, attention's 1 / head_dim) are folded into the weights before
them. Adam is invariant to the scale of a gradient, so a weight times c, with learning rate times c, weight decay and
epsilon divided by c, trains like the original weight with its output times c. Forward pass and exports are unchanged.

Sources: Yang et al., "A spectral condition for feature learning" (arXiv 2310.17813), parametrization 1, by nanotron's
SpectralMupParametrizator; Yang et al., Tensor Programs V (2203.03466); Dey et al., CompleteP (2505.01618), alpha 1.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from kenotron.config import Config
from kenotron.config.errors import InputError
from kenotron.config.model import ExistingCheckpointInit, SpectralInit
from kenotron.models import named_parameters, skeleton
from kenotron.models.decoder import Decoder
from kenotron.models.family import EMBEDDING, HEAD
from kenotron.models.init_rules import Normal, rule_for, times
from kenotron.models.plan import modules

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # projections that are one matrix in nanotron


@dataclass(frozen=True)
class Factors:
    """Factors on a parameter's initial standard deviation, learning rate, weight decay and epsilon of Adam."""

    std: float = 1.0
    learning_rate: float = 1.0
    weight_decay: float = 1.0
    epsilon: float = 1.0

    def with_output_times(self, c: float) -> Factors:
        """Return the factors of a weight that trains as this one would with its output multiplied by `c`."""
        return Factors(self.std * c, self.learning_rate * c, self.weight_decay / c, self.epsilon / c)


def factors(model: Decoder, config: Config) -> dict[str, Factors]:
    """Return the factors of every parameter of the whole `model`, by name; empty for the standard parametrization.

    Raises InputError for a model or an optimizer that the rules do not cover.
    """
    spectral = isinstance(config.model.init_method, SpectralInit)
    chosen = config.model.parametrization
    if not spectral and chosen is None:
        return {}
    key = "model.init_method.use_mup" if spectral else "model.parametrization"
    if model.plan.experts or model.plan.channels or model.plan.inner_row or not model.plan.row:
        raise InputError(f"{key}: expected a model of attention and dense MLPs, found {model.config.family}")
    shapes = {name: tuple(parameter.shape) for name, parameter in named_parameters(model)}
    if chosen is None:
        return _spectral(model, shapes, fused=config.model.init_method.mup_factors == "fused")  # type: ignore[union-attr]
    wide, completep = model.config.hidden_size / chosen.base_width, chosen.kind == "completep"
    deep = model.config.num_hidden_layers / (chosen.base_depth or 1)
    scale = getattr(config.optimizer.optimizer_factory, "muon_scale", None)
    if completep and any(name.endswith("post_feedforward_layernorm.weight") for name in shapes):
        raise InputError(f"{key}.kind: expected mup: the norms after branches of {model.config.family} undo 1 / depth")
    found = _relative(model, shapes, wide, deep if completep else None, scale)
    if completep and getattr(config.model.init_method, "scaling_method", None) == "NUM_LAYERS":
        for name in _residual_writers(model) & found.keys():  # their rule uses this depth, not the base's
            found[name] = replace(found[name], std=found[name].std * math.sqrt(deep))
    return found


def spectral_factors(n_out: int, n_in: int) -> Factors:
    """Return the factors of a linear map, for a standard deviation of 1 (2310.17813, parametrization 1)."""
    return Factors(std=min(1.0, math.sqrt(n_out / n_in)) / math.sqrt(n_in), learning_rate=n_out / n_in)


def _spectral(model: Decoder, shapes: dict[str, tuple[int, ...]], fused: bool) -> dict[str, Factors]:
    vocab, found = model.config.vocab_size, {}
    for name, shape in shapes.items():
        found[name] = Factors()
        if len(shape) != 2 or name == EMBEDDING:
            continue
        module, leaf = name.removesuffix(".weight").rpartition(".")[::2]
        together = next((names for names in FUSED if fused and leaf in names), (leaf,))
        parts = [shapes.get(f"{module}.{each}.weight", (0,)) for each in together]
        found[name] = spectral_factors(vocab if name == HEAD else sum(part[0] for part in parts), shape[1])
        if leaf == "q_proj":  # scores are divided by head_dim, not by its root
            found[name] = found[name].with_output_times(1 / math.sqrt(_head_dim(model)))
    return found


def _relative(
    model: Decoder, shapes: dict[str, tuple[int, ...]], wide: float, deep: float | None, scale: str | None
) -> dict[str, Factors]:
    """Return the factors of mup (`deep` None) or completep; `scale` is Muon's, or None for AdamW.

    AdamW and match_rms_adamw make steps with the same root mean square at every size, which change a matrix's output
    more, the larger the matrix is; Muon's other scales bound that change.
    """
    writes, found = _residual_writers(model), {}
    for name, shape in shapes.items():
        factor = Factors()
        if len(shape) == 2 and name not in (EMBEDDING, HEAD):
            rate = {None: 1 / wide, "match_rms_adamw": wide**-0.5}.get(scale, 1.0)
            factor = Factors(wide**-0.5, rate, 1 / rate, 1 / wide)
        if deep is not None:
            factor = Factors(factor.std, factor.learning_rate, factor.weight_decay, 1 / (wide * deep))
        if name == HEAD:
            factor = factor.with_output_times(1 / wide)
        if deep is not None and name in writes:
            factor = factor.with_output_times(1 / deep)
        found[name] = factor
    return found


def _head_dim(model: Decoder) -> int:
    config = model.config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads  # type: ignore[attr-defined]


def _residual_writers(model: Decoder) -> set[str]:
    return {f"{name}.{kind}" for name, _ in modules(model, *model.plan.row) for kind in ("weight", "bias")}


def table(config: Config) -> list[str]:
    """Return a line per kind of parameter: name, shape, standard deviation, factors; equal layers share a line."""
    model = skeleton(config.model)
    init = config.model.init_method
    found = factors(model, config)
    rules = [] if isinstance(init, ExistingCheckpointInit) else model.init_rules(init.std, init.scaling_method)
    rows: dict[tuple[str, ...], None] = {}
    for name, parameter in named_parameters(model):
        numbers, group = found.get(name, Factors()), config.optimizer.group_of(name)
        drawn = times(rule_for(name, rules), numbers.std * group.init_std_scale) if rules else None
        spread = f"{drawn.std:.4g}" if isinstance(drawn, Normal) else "-"
        rate = numbers.learning_rate * group.learning_rate_scale
        steps = (f"{each:.4g}" for each in (rate, numbers.weight_decay, numbers.epsilon))
        rows[re.sub(r"\.\d+\.", ".*.", name), " x ".join(map(str, parameter.shape)), spread, *steps] = None
    titles = ("parameter", "shape", "std", "learning rate x", "weight decay x", "epsilon x")
    widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(len(titles))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (titles, *rows)]
