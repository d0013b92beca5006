"""Mamba (Gu & Dao 2023, arXiv 2312.00752): a state that every token updates instead of attention.

    tokens ── embed ──┬─ norm ─ convolution, selective scan, gate ─(+)─ … ── norm ── head ── loss
                      └────────────────────────────────────────────┘

Names are Hugging Face's, except that its in_proj is the concatenation of in_proj_x and in_proj_z. nanotron's keys
(d_model, ssm_cfg, …) are accepted, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import model_validator

from kenotron.config.decoder import DecoderArchitecture, Problem
from kenotron.config.section import EXPORT, key, our_key, problem
from kenotron.models.family import Family
from kenotron.models.init_rules import Constant, InitRule, Normal
from kenotron.models.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor, nn

# nanotron's key → the section's, in model_config and in its ssm_cfg.
_NANOTRON = {"d_model": "hidden_size", "rms_norm_eps": "layer_norm_epsilon"}
_SSM_CFG = {
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "expand": "expand",
    "dt_rank": "time_step_rank",
    "dt_min": "time_step_min",
    "dt_max": "time_step_max",
    "dt_init": "time_step_init_scheme",
    "dt_scale": "time_step_scale",
    "dt_init_floor": "time_step_floor",
    "conv_bias": "use_conv_bias",
    "bias": "use_bias",
}


class MambaStyleArchitecture(DecoderArchitecture):
    """The keys that Mamba and Mamba-2 share."""

    shape_keys = (*DecoderArchitecture.shape_keys, "inner_size", "state_size", "conv_kernel")

    hidden_act: Literal["silu", "swish"] = key("Activation after the convolution, and of the gate.", "silu")
    conv_kernel: int = our_key("Kernel size of the convolution before the scan.", 4, ge=1)
    expand: int = our_key("Width inside a layer, as a multiple of hidden_size.", 2, ge=1)
    layer_norm_epsilon: float = our_key("Added to the mean square inside RMSNorm.", 1e-5, gt=0)
    use_bias: bool = our_key("Biases on the projections into and out of a layer.", False)
    use_conv_bias: bool = our_key("Biases in the convolution.", True)
    residual_in_fp32: bool = key("Hidden states between layers in fp32, whatever model.dtype is.", True)
    time_step_min: float = our_key("Smallest initial time step.", 1e-3, gt=0)
    time_step_max: float = our_key("Largest initial time step.", 0.1, gt=0)
    time_step_floor: float = our_key("Smaller initial time steps are raised to this.", 1e-4, gt=0)
    rescale_prenorm_residual: bool = key(
        "Kept for the export; training uses init_method.scaling_method.", False, mark=EXPORT
    )

    @property
    def inner_size(self) -> int:
        """The number of channels inside a layer."""
        return self.expand * self.hidden_size

    def shape_problems(self) -> Iterator[Problem]:
        """Yield a problem unless the initial time steps are a range."""
        if self.time_step_max < self.time_step_min:
            yield "time_step_max", f"expected at least time_step_min {self.time_step_min}, found {self.time_step_max}"

    def cp_problems(self, cp: int, tp: int, method: str, lengths: Mapping[str, int]) -> Iterator[str]:
        """Yield a problem for methods other than state_passing, which are for attention."""
        if method != "state_passing":
            yield f"expected context_parallel_method state_passing with {self.family}, found {method}"


class MambaArchitecture(MambaStyleArchitecture):
    """The Mamba family, under Hugging Face's names; nanotron's are read, too."""

    family: Literal["mamba"] = our_key("The family's name.", "mamba")
    is_mamba_config: bool = key("Marks the family; its value changes nothing.", True)
    tie_word_embeddings: bool = key("One matrix for the embedding and the output layer.", True)
    state_size: int = our_key("State size of a channel.", 16, ge=1)
    time_step_rank: int | Literal["auto"] = our_key(
        "Rank of the projection that time steps come from; auto: hidden_size / 16, rounded up.", "auto"
    )
    time_step_scale: float = our_key("Scale of that projection's initial weights.", 1.0, gt=0)
    time_step_init_scheme: Literal["random", "constant"] = our_key("Distribution of those weights.", "random")

    @model_validator(mode="before")
    @classmethod
    def _from_nanotron(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        keys, ssm = dict(value), value.get("ssm_cfg") or {}
        for name in ("ssm_cfg", "fused_add_norm"):  # the second chooses a kernel
            keys.pop(name, None)
        if keys.pop("rms_norm", True) is not True:
            raise problem("rms_norm", "expected true (a Mamba with LayerNorm is not supported)")
        for name in set(ssm) - set(_SSM_CFG) - {"use_fast_path"}:  # that chooses a kernel, too
            raise problem(f"ssm_cfg.{name}", f"expected one of {', '.join(_SSM_CFG)}")
        found = [(alias, name, value) for alias, name in _NANOTRON.items() if alias in value]
        found += [(f"ssm_cfg.{alias}", name, ssm) for alias, name in _SSM_CFG.items() if alias in ssm]
        for alias, name, where in found:
            if name in value and name != alias:
                raise problem(alias, f"is nanotron's name for {name}, which is also set; remove one of them")
            keys.pop(alias, None)
            keys[name] = where[alias.rpartition(".")[2]]
        return keys

    @property
    def rank(self) -> int:
        """`time_step_rank`, with "auto" replaced by its value."""
        return math.ceil(self.hidden_size / 16) if self.time_step_rank == "auto" else self.time_step_rank

    def tp_problems(self, tp: int) -> Iterator[str]:
        """Yield a problem unless tp divides the channels."""
        if self.inner_size % tp:
            yield f"expected a divisor of expand * hidden_size {self.inner_size}, found {tp}"


C = TypeVar("C", bound=MambaStyleArchitecture)


class MambaStyle(Family[C]):
    """The code that Mamba and Mamba-2 share: the block around the mixer, and Hugging Face's names around it."""

    residual_branches = 1
    hf_names = {  # noqa: RUF012
        "model.embed_tokens": "backbone.embeddings",
        "model.layers": "backbone.layers",
        "model.norm": "backbone.norm_f",
        "mixer.scan.": "mixer.",
    }

    def mixer_block(self, mixer: nn.Module, reads: tuple[str, ...] = ("ctx",)) -> nn.Module:
        """Return the block ``x + mixer(norm(x))``; for `reads` see `MixerBlock`."""
        from kenotron.models.blocks.mamba import MixerBlock

        return MixerBlock(self.final_norm(), mixer, self.config.residual_in_fp32, reads)

    def final_norm(self) -> nn.Module:
        """Return an RMSNorm, as before every mixer."""
        from kenotron.models.blocks.norm import RMSNorm

        return RMSNorm(self.config.hidden_size, self.config.layer_norm_epsilon)

    def init_rules(self, std: float, scaling: str) -> list[InitRule]:
        """Return the papers' initialization; `std` is used for the embedding and other matrices without a rule."""
        from kenotron.models.blocks.mamba_init import log_of_index, time_step_bias, uniform

        config = self.config
        time_steps = time_step_bias(config.time_step_min, config.time_step_max, config.time_step_floor)
        return [
            InitRule("*norm.weight", Constant(1.0)),
            InitRule("*.A_log", log_of_index()),
            InitRule("*.D", Constant(1.0)),
            *(InitRule(pattern, time_steps) for pattern in ("*.dt_proj.bias", "*.dt_bias")),
            InitRule("*.bias", Constant(0.0)),
            InitRule("*.in_proj*.weight", uniform(config.hidden_size**-0.5)),
            InitRule("*.conv1d*.weight", uniform(config.conv_kernel**-0.5)),
            InitRule("*.x_proj.weight", uniform(config.inner_size**-0.5)),
            *self.damped(scaling, ("model.layers.*.mixer.out_proj",), lambda by: uniform(config.inner_size**-0.5 / by)),
            InitRule("*.weight", Normal(std)),
        ]


class Mamba(MambaStyle[MambaArchitecture]):
    """Mamba: tp splits the channels, and outputs of x_proj, which mixes channels, are summed inside the layer."""

    section = MambaArchitecture
    plan = Plan(
        blocks="model.layers.*",
        column=("model.layers.*.mixer.in_proj_x", "model.layers.*.mixer.in_proj_z"),
        channels=("model.layers.*.mixer.conv1d", "model.layers.*.mixer.dt_proj", "model.layers.*.mixer.scan"),
        inner_row=("model.layers.*.mixer.x_proj",),
        row=("model.layers.*.mixer.out_proj",),
        vocab=("model.embed_tokens", "lm_head"),
        sequence=("model.layers.*.norm", "model.norm"),
    )
    hf_model_type = "mamba"
    hf_class = "MambaForCausalLM"
    hf_names = {**MambaStyle.hf_names, "in_proj_x": "in_proj", "in_proj_z": "in_proj"}  # noqa: RUF012

    def block(self, layer: int) -> nn.Module:
        """Return the module of layer `layer`."""
        from kenotron.models.blocks.mamba import MambaMixer

        config = self.config
        widths = (config.hidden_size, config.inner_size, config.state_size, config.rank, config.conv_kernel)
        return self.mixer_block(MambaMixer(*widths, bias=config.use_bias, conv_bias=config.use_conv_bias))

    def init_rules(self, std: float, scaling: str) -> list[InitRule]:
        """Return the rules of `MambaStyle`, and one for the projection to time steps, which has its own keys."""
        from kenotron.models.blocks.mamba_init import uniform

        bound = self.config.rank**-0.5 * self.config.time_step_scale
        constant = self.config.time_step_init_scheme == "constant"
        time_steps = InitRule("*.dt_proj.weight", Constant(bound) if constant else uniform(bound))
        return [time_steps, *super().init_rules(std, scaling)]

    def hf_split(self, hf_name: str, tensor: Tensor) -> Sequence[Tensor]:
        """Split in_proj into x and z."""
        return tensor.chunk(2)
