"""Mamba-2 (Dao & Gu 2024, arXiv 2405.21060): Mamba with one decay per head, so that its scan is matrix products.

Names are Hugging Face's, except for the tensors that it concatenates: in_proj is z, x, B, C and dt, and conv1d is x, B
and C.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from kenotron.config.decoder import Problem
from kenotron.config.section import EXPORT, key, our_key
from kenotron.models.families.mamba import MambaStyle, MambaStyleArchitecture
from kenotron.models.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor, nn

MIXER = "model.layers.*.mixer"


class Mamba2StyleArchitecture(MambaStyleArchitecture):
    """The keys that Mamba-2 and its hybrids share; `head_keys` are their names for heads and state size."""

    head_keys: ClassVar[tuple[str, str]] = ("num_heads", "state_size")

    n_groups: int = our_key("Groups of heads that share B and C.", 8, ge=1)
    chunk_size: int = key("Written to the export; the kernel here has its own chunk length.", 256, mark=EXPORT)

    @property
    def recurrence(self) -> tuple[int, int]:
        """Return (number of heads, state size of one channel)."""
        heads, state_size = (getattr(self, name) for name in self.head_keys)
        return heads, state_size

    @property
    def limit(self) -> tuple[float, float]:
        """The bounds of time steps in the forward pass."""
        return 0.0, math.inf

    def shape_problems(self) -> Iterator[Problem]:
        """Yield a problem if heads do not divide into groups."""
        yield from super().shape_problems()
        if self.recurrence[0] % self.n_groups:
            found = f"found {self.n_groups}"
            yield "n_groups", f"expected a divisor of {self.head_keys[0]} {self.recurrence[0]}, {found}"

    def tp_problems(self, tp: int) -> Iterator[str]:
        """Yield a problem unless tp divides the heads, and the groups if there are several."""
        if self.recurrence[0] % tp:
            yield f"expected a divisor of {self.head_keys[0]} {self.recurrence[0]}, found {tp}"
        if self.n_groups > 1 and self.n_groups % tp:
            yield f"expected a divisor of n_groups {self.n_groups} (or n_groups 1), found {tp}"


class Mamba2Architecture(Mamba2StyleArchitecture):
    """The Mamba-2 family, under Hugging Face's names."""

    family: Literal["mamba2"] = our_key("The family's name.", "mamba2")
    is_mamba2_config: bool = our_key("Marks the family; its value changes nothing.", True)
    num_heads: int = our_key("Heads; num_heads * head_dim = expand * hidden_size.", 128, ge=1)
    head_dim: int = our_key("Channels of one head.", 64, ge=1)
    state_size: int = our_key("State size of a channel.", 128, ge=1)
    time_step_limit: list[float | None] = our_key(
        "Bounds of time steps in the forward pass: [minimum, maximum]; null: no bound.",
        [0.0, None],
        min_length=2,
        max_length=2,
    )

    def shape_problems(self) -> Iterator[Problem]:
        """Yield a problem if heads do not fill the width, or do not divide into groups."""
        yield from super().shape_problems()
        if self.num_heads * self.head_dim != self.inner_size:
            found = f"found {self.num_heads} * {self.head_dim}"
            yield "num_heads", f"expected num_heads * head_dim = expand * hidden_size {self.inner_size}, {found}"
        if self.limit[0] > self.limit[1]:
            yield "time_step_limit", f"expected [least, most], found {self.time_step_limit}"

    @property
    def limit(self) -> tuple[float, float]:
        """`time_step_limit` as two numbers."""
        least, most = self.time_step_limit
        return (0.0 if least is None else least, math.inf if most is None else most)


D = TypeVar("D", bound=Mamba2StyleArchitecture)


class Mamba2Style(MambaStyle[D]):
    """Mamba-2 layers: tp splits heads and groups; a single group, shared by all heads, is on every rank."""

    plan = Plan(
        blocks="model.layers.*",
        column=(*(f"{MIXER}.in_proj_{part}" for part in ("z", "x", "b", "c", "dt")), f"{MIXER}.norm"),
        channels=(*(f"{MIXER}.conv1d_{part}" for part in "xbc"), f"{MIXER}.time_steps", f"{MIXER}.scan"),
        kv=tuple(f"{MIXER}.{kind}_{part}" for kind in ("in_proj", "conv1d") for part in "bc"),
        row=(f"{MIXER}.out_proj",),
        vocab=("model.embed_tokens", "lm_head"),
        sequence=("model.layers.*.norm", "model.norm"),
    )
    hf_names = {  # noqa: RUF012
        **MambaStyle.hf_names,
        "mixer.time_steps.": "mixer.",
        **{f"in_proj_{part}": "in_proj" for part in ("z", "x", "b", "c", "dt")},
        **{f"conv1d_{part}": "conv1d" for part in "xbc"},
    }

    def block(self, layer: int) -> nn.Module:
        """Return the module of layer `layer`."""
        from kenotron.models.blocks.mamba2 import Mamba2Mixer

        config = self.config
        heads, state_size = config.recurrence
        head_dim = config.inner_size // heads
        widths = (config.hidden_size, heads, head_dim, config.n_groups, state_size, config.conv_kernel)
        mixer = Mamba2Mixer(
            *widths,
            bias=config.use_bias,
            conv_bias=config.use_conv_bias,
            eps=config.layer_norm_epsilon,
            time_step_limit=config.limit,
        )
        return self.mixer_block(mixer)

    def hf_split(self, hf_name: str, tensor: Tensor) -> Sequence[Tensor]:
        """Split the concatenated tensor by the widths of its pieces."""
        config = self.config
        heads, state_size = config.recurrence
        convolved = (config.inner_size, config.n_groups * state_size, config.n_groups * state_size)
        return tensor.split(convolved if "conv1d" in hf_name else (config.inner_size, *convolved, heads))


class Mamba2(Mamba2Style[Mamba2Architecture]):
    """Mamba-2, in every layer."""

    section = Mamba2Architecture
    hf_model_type = "mamba2"
    hf_class = "Mamba2ForCausalLM"

    @classmethod
    def from_hf(cls, values: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Read the bounds of time steps, where infinity means no bound."""
        limit = config.get("time_step_limit") or (0.0, math.inf)
        bounds = [float(each["__float__"]) if isinstance(each, dict) else each for each in limit]
        return values | {"time_step_limit": [None if each is None or math.isinf(each) else each for each in bounds]}

    def to_hf(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return values for config.json, the inverse of `from_hf`."""
        return values | {"time_step_limit": list(self.config.limit)}
