"""A model family: all that the library has to know about it, in one class, so that a new family is one file.

    class MyFamily(Family[MyArchitecture]):
        section = MyArchitecture                          the keys of model.model_config
        plan = Plan(blocks="model.layers.*", …)           how it may be split
        def block(self, layer): …                         the maths of a layer
        def final_norm(self): …

`models.decoder` builds the model around it: parts of a pipeline, recomputation, tying, vocabulary padding, head.
docs/add-a-model.md writes one from start to end.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from kenotron.config.decoder import DecoderArchitecture
from kenotron.config.errors import InputError
from kenotron.config.families import KEY, built_in_families, find_family
from kenotron.models.init_rules import Constant, FilledBy, InitRule, Normal
from kenotron.models.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor, nn

    from kenotron.models.decoder import Decoder
    from kenotron.models.part import ModelPart

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # in every family

C = TypeVar("C", bound=DecoderArchitecture)


class Family(ABC, Generic[C]):
    """Created for every model that is built, from its section `config`."""

    section: ClassVar[type[DecoderArchitecture]]
    """The keys of `model.model_config`."""
    plan: Plan
    """How a model of this family may be split: of the class, or of the instance where it depends on the section."""

    residual_branches: ClassVar[int] = 2  # of a layer
    hf_model_type: ClassVar[str] = ""
    """`model_type` in Hugging Face's config.json; "" without a counterpart there."""
    hf_class: ClassVar[str] = ""
    """The class of transformers, such as LlamaForCausalLM; "" without one: models cannot be exported."""
    hf_code: ClassVar[Mapping[str, str]] = {}
    """`auto_map` of config.json for a model that transformers does not know: "AutoConfig" and "AutoModelForCausalLM" →
    module.Class. The modules are in a folder `hf` beside the family's file; exports bring them along."""
    hf_keys: ClassVar[Mapping[str, str]] = {}
    """Keys of the section whose name in config.json is another one."""
    hf_fixed: ClassVar[Mapping[str, Any]] = {}
    """Keys of config.json that this maths has one value for: written to exports, refused in imports otherwise."""
    hf_names: ClassVar[Mapping[str, str]] = {}
    """Parts of parameter names → what they are called there, applied in order."""
    hf_unread: ClassVar[tuple[str, ...]] = ()
    """Ends of names of tensors there that are not weights, such as the masks that old versions saved."""

    hf_fp32: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of transformers' tensors that exports keep in fp32, whatever their dtype."""

    def __init__(self, config: C) -> None:
        self.config = config

    @abstractmethod
    def block(self, layer: int) -> nn.Module:
        """Layer number `layer`: ``block(x, positions, ctx)`` → x, ``[tokens, hidden]``."""

    @abstractmethod
    def final_norm(self) -> nn.Module:
        """The module between the last block and the head."""

    def positions(self) -> nn.Module | None:
        """A module that makes of positions ``[sequences, length]`` what every block gets as its second argument."""
        return None

    def own_model(self, vocab_multiple: int, part: ModelPart | None) -> Decoder | None:
        """The model, of a family that is not blocks in a `Decoder`'s frame (`models.foreign`)."""
        return None

    def init_rules(self, std: float, scaling: str) -> list[InitRule]:
        """Distributions of fresh weights, first match wins: nanotron's RandomInit, with the plan's rows damped."""
        return [
            InitRule("*norm.weight", Constant(1.0)),
            InitRule("*.bias", Constant(0.0)),
            *self.damped(scaling, self.plan.row, lambda by: Normal(std / by)),
            InitRule("*.weight", Normal(std)),
        ]

    def damped(self, scaling: str, rows: Sequence[str], spread: Callable[[float], Normal | FilledBy]) -> list[InitRule]:
        """Of `rows`, whose first * is a layer: `spread` of the root of the residual branches that `scaling` counts."""
        counts = {"*": self.residual_branches * self.config.num_hidden_layers if scaling == "NUM_LAYERS" else 1}
        if scaling == "LAYER_INDEX":
            counts = {str(at): self.residual_branches * (at + 1) for at in range(self.config.next_token_layers.stop)}
        named = ((row.replace("*", layer, 1), count) for row in rows for layer, count in counts.items())
        return [InitRule(f"{name}.weight", spread(math.sqrt(count))) for name, count in named]

    # Hugging Face: what differs beyond names of keys, names of tensors, and the few that are stored joined there.

    @classmethod
    def from_hf(cls, values: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """The section's `values` as found in the config.json `config`, corrected where the two differ in meaning."""
        return values

    def to_hf(self, values: dict[str, Any]) -> dict[str, Any]:
        """The inverse of `from_hf`: `values` of config.json."""
        return values

    def hf_name(self, name: str) -> str:
        """What Hugging Face calls the parameter `name`; several of ours may be parts of one of theirs."""
        for ours, theirs in self.hf_names.items():
            name = name.replace(ours, theirs)
        return name

    def as_saved(self, config: Mapping[str, Any], tensors: Container[str]) -> C:
        """The section, which a config.json `config` describes, as the names of the `tensors` beside it correct it."""
        return self.config

    def hf_copies(self) -> dict[str, str]:
        """Tensors of theirs that repeat one of ours → its name."""
        return {}

    def hf_join(self, hf_name: str, parts: Sequence[Tensor]) -> Tensor:
        """One tensor of theirs from several of ours, in the order of our names: one above the other."""
        import torch

        return torch.cat(list(parts))

    def hf_split(self, hf_name: str, tensor: Tensor) -> Sequence[Tensor]:
        """The inverse of `hf_join`."""
        raise NotImplementedError(f"{type(self).__name__} does not say how {hf_name} is split")


def family_named(name: str) -> type[Family[Any]]:
    """The family of this name, dotted path or entry point. Raises InputError: missing, or not a `Family`."""
    found = find_family(name, KEY)
    if not issubclass(found, Family):
        raise InputError(f"{KEY}: '{name}': expected a subclass of kenotron.models.family.Family, found {found!r}")
    return found


def families() -> list[type[Family[Any]]]:
    """The built-in ones, by name."""
    return [family_named(name) for name in built_in_families()]


def family_of(config: DecoderArchitecture) -> Family[Any]:
    """The family that a section names, made for it."""
    return family_named(config.family)(config)
