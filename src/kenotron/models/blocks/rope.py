"""Rotary position embedding: channel pair i is rotated by the angle ``position * theta ** (-2 i / head_dim)``.

(Su et al. 2021, arXiv 2104.09864.) With head_dim 4 and theta 10000 the two pairs rotate by 1 and 0.01 radians per
position: the first distinguishes neighbours, the second positions that are hundreds apart. `rope_scaling` slows pairs
down so that a model reads longer texts than it was trained on; the four rules give the same numbers as `transformers`:

* ``linear``: every angle divided by `factor` (positions interpolated);
* ``dynamic``: theta grows with the sequence once it exceeds `max_position_embeddings` (NTK-aware);
* ``llama3``: pairs slower than `low_freq_factor` divided by `factor`, fast ones kept, a blend between;
* ``yarn``: the same idea by rotations over the context, plus a temperature on the scores (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kenotron.config.decoder import ROPE_KEYS, RopeArchitecture
from kenotron.config.errors import InputError, nearest

RopeScaling = Mapping[str, Any] | None


class Rope(nn.Module):
    """Maps positions ``[...]`` int64 to (cos, sin) of the angles, each ``[..., head_dim / 2]`` fp32; no parameters.

    `head_dim` is the number of a head's channels that are rotated, all or some of them.
    """

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling, max_positions: int) -> None:
        super().__init__()
        assert head_dim % 2 == 0, f"RoPE rotates pairs of channels: expected an even head_dim, found {head_dim}"
        self.head_dim, self.theta, self.scaling, self.max_positions = head_dim, theta, scaling, max_positions
        self.grows = scaling_type(scaling) == "dynamic"
        # Computed at first use, on the device of the positions, so that a build on the meta device leaves nothing to
        # fill.
        self._tables: dict[tuple[torch.device, int], Tensor] = {}
        _, self.attention_factor = frequencies(head_dim, theta, scaling, max_positions)

    @staticmethod
    def of(config: RopeArchitecture) -> Rope:
        """Build the module that a section describes."""
        return Rope(config.rotary_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) of the angles, in fp32."""
        longest = max(int(positions.max()) + 1, self.max_positions) if self.grows else 0
        key = (positions.device, longest)
        if key not in self._tables:
            values, _ = frequencies(self.head_dim, self.theta, self.scaling, self.max_positions, longest)
            self._tables = {key: torch.tensor(values, dtype=torch.float32, device=positions.device)}
        angles = positions.unsqueeze(-1).float() * self._tables[key]
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


def frequencies(
    head_dim: int, theta: float, scaling: RopeScaling, max_positions: int, length: int = 0
) -> tuple[list[float], float]:
    """Return the radians per position of each of the head_dim / 2 channel pairs, and the factor on cos and sin.

    `length` is the longest position + 1 of the batch, which only ``dynamic`` uses.
    """
    kind = scaling_type(scaling)
    if kind == "default" or scaling is None:
        return _plain(head_dim, theta), 1.0
    if kind == "linear":
        return [f / scaling["factor"] for f in _plain(head_dim, theta)], 1.0
    if kind == "dynamic":
        if head_dim < 4:
            raise InputError(f"model.model_config.rope_scaling: rope_type dynamic needs 4 channels, found {head_dim}")
        factor, longest = scaling["factor"], max(length, max_positions)
        stretch = factor * longest / max_positions - (factor - 1)
        return _plain(head_dim, theta * stretch ** (head_dim / (head_dim - 2))), 1.0
    if kind == "llama3":
        return [_llama3(f, scaling) for f in _plain(head_dim, theta)], 1.0
    return _yarn(head_dim, theta, scaling, max_positions)


def scaling_type(scaling: RopeScaling) -> str:
    """Return the rule's name, `rope_type` (or the older `type`), after checking the keys that it needs."""
    if not scaling:
        return "default"
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    where = "model.model_config.rope_scaling"
    if kind not in ROPE_KEYS:
        raise InputError(
            f"{where}.rope_type: expected one of {', '.join(ROPE_KEYS)}, found {kind!r}{nearest(str(kind), ROPE_KEYS)}"
        )
    required, _ = ROPE_KEYS[kind]
    for key in sorted(required):
        if not isinstance(scaling.get(key), int | float):
            raise InputError(f"{where}.{key}: rope_type {kind!r} needs a number, found {scaling.get(key)!r}")
    return kind


def _plain(head_dim: int, theta: float) -> list[float]:
    return [theta ** (-i / head_dim) for i in range(0, head_dim, 2)]


def _llama3(frequency: float, scaling: Mapping[str, Any]) -> float:
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)  # over the original context
    keep = min(max((turns - low) / (high - low), 0.0), 1.0)
    return keep * frequency + (1 - keep) * frequency / scaling["factor"]


def _yarn(head_dim: int, theta: float, scaling: Mapping[str, Any], max_positions: int) -> tuple[list[float], float]:
    factor = scaling["factor"]
    context = scaling.get("original_max_position_embeddings") or max_positions

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_that_turns(scaling.get("beta_fast") or 32)
    high = pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high

    def blend(pair: int, frequency: float) -> float:
        slow = min(max((pair - low) / (high - low), 0.0), 1.0)
        return frequency / factor * slow + frequency * (1 - slow)

    values = [blend(pair, f) for pair, f in enumerate(_plain(head_dim, theta))]
    return values, _yarn_attention_factor(scaling)


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    weight, weight_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if weight and weight_all:
        return yarn_temperature(scaling, weight) / yarn_temperature(scaling, weight_all)
    return yarn_temperature(scaling, 1.0)


def yarn_temperature(scaling: Mapping[str, Any], weight: float) -> float:
    """Return YaRN's factor on queries and on keys, ``0.1 weight log(factor) + 1``."""
    return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0
