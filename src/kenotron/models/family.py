"""A model family: everything that the library needs of it, in one class, so that a new family is one file.

    class MyFamily(Family[MyArchitecture]):
        section = MyArchitecture                          the keys of model.model_config
        plan = Plan(blocks="model.layers.*", …)           how it may be split
        def block(self, layer): …                         the module of a layer
        def final_norm(self): …

`models.decoder` builds the model around it: pipeline stages, recomputation, tying, vocabulary padding, head.
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
    """The base class of families; an instance is created from the section `config` for every model that is built."""

    section: ClassVar[type[DecoderArchitecture]]
    """The keys of `model.model_config`."""
    plan: Plan
    """How a model of this family may be split; set on the instance if it depends on the section."""

    residual_branches: ClassVar[int] = 2  # of a layer
    hf_model_type: ClassVar[str] = ""
    """`model_type` in Hugging Face's config.json; "" if Hugging Face has no counterpart."""
    hf_class: ClassVar[str] = ""
    """The class of transformers, such as LlamaForCausalLM; "" if there is none, and models cannot be exported."""
    hf_code: ClassVar[Mapping[str, str]] = {}
    """`auto_map` of config.json for a model that transformers does not have: "AutoConfig" and "AutoModelForCausalLM" →
    module.Class. The modules are in a folder `hf` beside the family's file; exports include them."""
    hf_keys: ClassVar[Mapping[str, str]] = {}
    """Key of the section → key of config.json, where the two names differ."""
    hf_fixed: ClassVar[Mapping[str, Any]] = {}
    """Keys of config.json with the only value that is supported: exports have it, other imports are refused."""
    hf_names: ClassVar[Mapping[str, str]] = {}
    """Substring of a parameter name → its replacement in Hugging Face's name, applied in order."""
    hf_unread: ClassVar[tuple[str, ...]] = ()
    """Suffixes of Hugging Face's tensors that are not weights, such as the masks that old versions saved."""

    hf_fp32: ClassVar[tuple[str, ...]] = ()
    """Suffixes of Hugging Face's tensors that exports keep in fp32, whatever the dtype of the export."""

    def __init__(self, config: C) -> None:
        self.config = config

    @abstractmethod
    def block(self, layer: int) -> nn.Module:
        """Return the module of layer `layer`: ``block(x, positions, ctx)`` → x, ``[tokens, hidden]``."""

    @abstractmethod
    def final_norm(self) -> nn.Module:
        """Return the module between the last block and the head."""

    def positions(self) -> nn.Module | None:
        """Return a module from positions ``[sequences, length]`` to the second argument of every block, or None."""
        return None

    def own_model(self, vocab_multiple: int, part: ModelPart | None) -> Decoder | None:
        """Return the model, for families that are not blocks inside a `Decoder` (`models.foreign`); None for others."""
        return None

    def init_rules(self, std: float, scaling: str) -> list[InitRule]:
        """Return distributions of fresh weights, first match wins: nanotron's RandomInit, the plan's rows damped."""
        return [
            InitRule("*norm.weight", Constant(1.0)),
            InitRule("*.bias", Constant(0.0)),
            *self.damped(scaling, self.plan.row, lambda by: Normal(std / by)),
            InitRule("*.weight", Normal(std)),
        ]

    def damped(self, scaling: str, rows: Sequence[str], spread: Callable[[float], Normal | FilledBy]) -> list[InitRule]:
        """Return rules for `rows` (first * is a layer): `spread` of sqrt(residual branches that `scaling` counts)."""
        counts = {"*": self.residual_branches * self.config.num_hidden_layers if scaling == "NUM_LAYERS" else 1}
        if scaling == "LAYER_INDEX":
            counts = {str(at): self.residual_branches * (at + 1) for at in range(self.config.next_token_layers.stop)}
        named = ((row.replace("*", layer, 1), count) for row in rows for layer, count in counts.items())
        return [InitRule(f"{name}.weight", spread(math.sqrt(count))) for name, count in named]

    # Hugging Face: differences beyond names of keys, names of tensors, and tensors that it stores concatenated.

    @classmethod
    def from_hf(cls, values: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the section's `values`, read from the config.json `config`, corrected where keys differ in meaning."""
        return values

    def to_hf(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return `values` for config.json, the inverse of `from_hf`."""
        return values

    def hf_name(self, name: str) -> str:
        """Return Hugging Face's name of the parameter `name`; several parameters may be pieces of one tensor there."""
        for piece, hf_piece in self.hf_names.items():
            name = name.replace(piece, hf_piece)
        return name

    def as_saved(self, config: Mapping[str, Any], tensors: Container[str]) -> C:
        """Return the section read from the config.json `config`, corrected by the names of the saved `tensors`."""
        return self.config

    def hf_copies(self) -> dict[str, str]:
        """Return Hugging Face's name of a duplicate tensor → the parameter that it duplicates."""
        return {}

    def hf_join(self, hf_name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return one Hugging Face tensor from its pieces, in the order of the parameters: concatenated by rows."""
        import torch

        return torch.cat(list(parts))

    def hf_split(self, hf_name: str, tensor: Tensor) -> Sequence[Tensor]:
        """Return the pieces of a Hugging Face tensor, the inverse of `hf_join`."""
        raise NotImplementedError(f"{type(self).__name__} does not say how {hf_name} is split")


def family_named(name: str) -> type[Family[Any]]:
    """Return the family with this name, dotted path or entry point. Raises InputError if there is no such `Family`."""
    found = find_family(name, KEY)
    if not issubclass(found, Family):
        raise InputError(f"{KEY}: '{name}': expected a subclass of kenotron.models.family.Family, found {found!r}")
    return found


def families() -> list[type[Family[Any]]]:
    """Return the built-in families, by name."""
    return [family_named(name) for name in built_in_families()]


def family_of(config: DecoderArchitecture) -> Family[Any]:
    """Return an instance of the family that the section names."""
    return family_named(config.family)(config)
