"""Train models that others wrote as they are: a causal language model of transformers, or a module of your own.

    model_config: {hf: org/name, n_layer: 4}                            HuggingFace, once its config.json was read
    model_config: {module: my_module.MyModel, vocab_size: 256, …}       UserModule

They are families without a file in `models.families`. `models.foreign_model` gives such a model the interface of a
`Decoder`; this file has its sections, how it is built and how it is called.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import model_serializer, model_validator

from kenotron.config.decoder import DecoderArchitecture
from kenotron.config.dotted import import_dotted
from kenotron.config.errors import InputError, nearest
from kenotron.config.families import USER_MODULE
from kenotron.config.section import key, our_key, problem
from kenotron.models.family import Family
from kenotron.models.plan import Plan, modules

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import Cache, PretrainedConfig

    from kenotron.models.context import Context
    from kenotron.models.decoder import Decoder
    from kenotron.models.part import ModelPart

MODULE_KEY = "model.model_config.module"
HUGGING_FACE = "kenotron.models.foreign.HuggingFace"
# Style in transformers' tensor-parallel plans → the field of a `Plan` that means the same; "": nothing to do.
TP_STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "per_head",
    "embedding_rowwise": "",
}


STRETCHED = ("linear", "dynamic", "yarn")  # rope_types whose factor multiplies the length


class ForeignArchitecture(DecoderArchitecture):
    """The keys of both kinds of foreign models."""

    blocks: str | None = our_key(
        "Names of the modules that are recomputed, compiled and sharded one by one, a star for one name between dots; "
        "null: those in the list of modules that has the most parameters.",
        None,
    )
    training_dropout: bool = our_key(
        "Train with the dropout that the model has, whose bits are the same on every layout; false: without.", False
    )
    max_position_embeddings: int | None = key("Positions that the model can read; null: any number.", None, ge=1)

    @property
    def title(self) -> str:
        """The model's name in messages."""
        return self.family

    @property
    def longest_text(self) -> int:
        """Return `max_position_embeddings`, or no limit."""
        return self.max_position_embeddings or sys.maxsize

    def tp_problems(self, tp: int) -> Iterator[str]:
        """Yield a problem for tp > 1: there is no plan."""
        if tp > 1:
            yield f"expected 1: {self.title} has no plan for tensor parallelism; found {tp}"

    def cp_problems(self, cp: int, tp: int, method: str, lengths: Mapping[str, int]) -> Iterator[str]:
        """Yield a problem: the model computes attention itself."""
        yield f"expected 1: {self.title} computes attention itself, over whole sequences; found {cp}"

    def pp_problems(self, pp: int) -> Iterator[str]:
        """Yield a problem: the model's forward is one function."""
        yield f"expected 1: {self.title} has its own forward pass, which cannot be split; found {pp}"


class HuggingFaceArchitecture(ForeignArchitecture):
    """A model of transformers. `interop` writes this section from a config.json; the shapes repeat what is in it."""

    family: str = our_key("The family's name.", HUGGING_FACE)
    hf_config: dict[str, Any] = our_key("The config.json, with the values that the run's config replaces.", {})

    @property
    def title(self) -> str:
        """The family's name in transformers."""
        return f"transformers' {self.hf_config.get('model_type')}"

    @property
    def fixed_rope_length(self) -> int:
        """As in the base class: frequencies of dynamic NTK and LongRoPE depend on the longest position."""
        ropes = [json.dumps(each) for each in _values(self.hf_config, ("rope_scaling", "rope_parameters"))]
        if not any(f'"{kind}"' in rope for rope in ropes for kind in ("dynamic", "longrope", "su")):
            return sys.maxsize
        keys = ("original_max_position_embeddings", "max_position_embeddings")
        return min((each for each in _values(self.hf_config, keys) if isinstance(each, int)), default=0)

    @property
    def longest_text(self) -> int:
        """Return max_position_embeddings, or the length to which RoPE scaling extends it, as for built-in families."""
        rope = self.hf_config.get("rope_parameters") or self.hf_config.get("rope_scaling") or {}
        if self.max_position_embeddings is None or rope.get("rope_type", rope.get("type")) not in STRETCHED:
            return super().longest_text
        original = rope.get("original_max_position_embeddings") or self.max_position_embeddings
        return max(self.max_position_embeddings, int(original * rope.get("factor", 1)))

    def transformers_config(self) -> PretrainedConfig:
        """Return the config as an object of transformers."""
        from transformers import CONFIG_MAPPING

        return CONFIG_MAPPING[self.hf_config["model_type"]].from_dict(with_floats(self.hf_config))

    def tp_problems(self, tp: int) -> Iterator[str]:
        """Yield a problem unless transformers' plan has only columns and rows, and tp divides the heads and widths."""
        if tp == 1:
            return
        if self.training_dropout:
            yield f"expected 1: model_config.training_dropout is for ranks that compute whole tensors; found {tp}"
        config = self.transformers_config().get_text_config()
        styles = config.base_model_tp_plan or {}
        other = {name: style for name, style in styles.items() if style not in TP_STYLES}
        if not styles:
            yield f"expected 1: transformers has no tensor-parallel plan for {self.title}; found {tp}"
        for name, style in list(other.items())[:1]:
            yield f"expected 1: transformers splits {name} of {self.title} as {style}, which is unsupported; found {tp}"
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            size = getattr(config, name, None) or 0  # Gemma 3n has one a layer
            if any(each % tp for each in (size if isinstance(size, list) else [size])):
                yield f"expected a divisor of {name} {size}, found {tp}"


def with_floats(value: Any) -> Any:
    """Return a copy with the floats that JSON lacks, which transformers writes as ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict) and value.keys() == {"__float__"}:
        return float(value["__float__"])
    if isinstance(value, dict):
        return {k: with_floats(v) for k, v in value.items()}
    return [with_floats(each) for each in value] if isinstance(value, list | tuple) else value


def _values(config: Any, keys: Collection[str]) -> Iterator[Any]:
    """Yield the values that `keys` have anywhere in a config.json."""
    for name, value in config.items() if isinstance(config, dict) else ():
        yield from [value] if name in keys else []
        yield from _values(value, keys)


OF_TRAINER = ("family", "module", "blocks", "training_dropout")


class UserModuleArchitecture(ForeignArchitecture):
    """A module of your own: every key goes to its constructor, except those that only the trainer reads."""

    family: str = our_key("The family's name.", USER_MODULE)
    module: str = our_key("Dotted path of an nn.Module, or of a function that returns one.")
    vocab_size: int = key("Width of its logits.", ge=1)
    given: dict[str, Any] = our_key("The keys as they are in the YAML.", {})

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        """Move the constructor's keys into `given`, unchanged, so that they can be written back."""
        if not isinstance(value, dict):
            return value
        own = cls.model_fields.keys() - {"given"}
        given = {name: each for name, each in value.items() if name not in OF_TRAINER}
        return {name: each for name, each in value.items() if name in own} | {"given": given}

    @model_serializer
    def _as_given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OF_TRAINER} | self.given

    @model_validator(mode="after")
    def _check_arguments(self) -> UserModuleArchitecture:
        try:
            parameters = self._parameters()
        except InputError as error:
            raise problem("module", str(error).removeprefix(f"{MODULE_KEY}: ")) from None
        named = {name for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD}
        valid = named | ForeignArchitecture.model_fields.keys()
        for name in self.given if len(named) == len(parameters) else ():
            if name not in valid:
                raise problem(name, f"{self.module} does not take it{nearest(name, valid)}")
        for name, each in parameters.items():
            if each.default is each.empty and name in named and name not in self.given:
                raise problem(name, f"missing: {self.module} needs it")
        return self

    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(import_dotted(self.module, MODULE_KEY)).parameters

    @property
    def title(self) -> str:
        """The module's dotted path."""
        return self.module

    def arguments(self) -> dict[str, Any]:
        """Return the constructor's keyword arguments."""
        own, taken = ForeignArchitecture.model_fields, self._parameters()
        return {name: value for name, value in self.given.items() if name in taken or name not in own}


C = TypeVar("C", bound=ForeignArchitecture)


class Foreign(Family[C]):
    """A model that is built and called as a whole."""

    plan = Plan(blocks="*")  # replaced by `plan_of` for each model
    has_state = False  # whether forward of a block may change its attributes

    def block(self, layer: int) -> nn.Module:
        """Raise: no block is built by itself."""
        raise NotImplementedError(f"{type(self).__name__} is built as a whole")

    def final_norm(self) -> nn.Module:
        """Raise: the final norm is not built by itself either."""
        raise NotImplementedError(f"{type(self).__name__} is built as a whole")

    def own_model(self, vocab_multiple: int, part: ModelPart | None) -> Decoder:
        """Return the whole model.

        Raises InputError if the model is to be split into parts, or its vocabulary to be padded.
        """
        from kenotron.models.foreign_model import ForeignModel

        if part is not None:
            raise InputError(f"parallelism.pp: expected 1: the forward pass of {self.config.title} cannot be split")
        if vocab_multiple > 1:
            found = f"expected 1: nothing pads the vocabulary of {self.config.title}; found {vocab_multiple}"
            raise InputError(f"model.make_vocab_size_divisible_by: {found}")
        return ForeignModel(self.config, self)

    @abstractmethod
    def make(self, std: float | None = None) -> nn.Module:
        """Return the module, with its own fresh weights from torch's global generator; `std`: `init_method.std`."""

    @abstractmethod
    def logits(self, module: nn.Module, tokens: Tensor, ctx: Context) -> Tensor:
        """``[sequences, length]`` → ``[sequences, length, vocab]``."""

    def has_cache(self, module: nn.Module, padded: bool) -> bool:
        """Return whether `cached_logits` can decode; `padded`: texts of different lengths."""
        return False

    def cached_logits(
        self, module: nn.Module, tokens: Tensor, mask: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Cache]:
        """Return the last logits of each text ``[texts, vocab]``, and the cache that has all tokens now.

        tokens ``[texts, new]``; mask ``[texts, all]`` is 0 at the padding, which precedes the text; cache None: new.
        """
        raise NotImplementedError(f"{type(self).__name__} has no cache")

    def plan_of(self, module: nn.Module) -> Plan:
        """Return the plan of `module`, which is one of `make`. Raises InputError where no block is found."""
        blocks = self.config.blocks or _longest_list(module)
        if not blocks or not modules(module, blocks):
            names = [name for name, _ in module.named_modules() if name]
            found = f"{blocks!r} matches no module" if blocks else "there is no list of modules: name the blocks"
            raise InputError(f"model.model_config.blocks: {self.config.title}: {found}{nearest(blocks or '', names)}")
        return Plan(blocks)


def _longest_list(module: nn.Module) -> str | None:
    """Return the pattern of the children of the ModuleList (or Sequential) with most parameters, the outermost one."""
    from torch import nn

    lists = {name: each for name, each in module.named_modules() if isinstance(each, nn.ModuleList | nn.Sequential)}
    sizes = {name: sum(p.numel() for p in each.parameters()) for name, each in lists.items() if len(each)}
    return f"{max(sizes, key=sizes.__getitem__)}.*".removeprefix(".") if sizes else None


class HuggingFace(Foreign[HuggingFaceArchitecture]):
    """A causal language model of transformers."""

    section = HuggingFaceArchitecture
    hf_class = "AutoModelForCausalLM"

    def make(self, std: float | None = None) -> nn.Module:
        """Return `AutoModelForCausalLM.from_config`; `std` replaces the config's `initializer_range`."""
        from transformers import AutoModelForCausalLM

        config = self.config.transformers_config()
        if std is not None:
            if not hasattr(config.get_text_config(), "initializer_range"):
                _warn_of_std(self.config.title, "has no initializer_range")
            config.get_text_config().initializer_range = std
        config.use_cache = False
        try:
            return AutoModelForCausalLM.from_config(config)
        except Exception as error:  # its code may raise anything for values that it does not check
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise InputError(f"model.model_config: transformers cannot make {self.config.title} ({reason})") from error

    def logits(self, module: nn.Module, tokens: Tensor, ctx: Context) -> Tensor:
        """Return logits. Documents are passed as positions that begin at 0 in each, by which transformers masks."""
        positioned = ctx.has_documents and "position_ids" in inspect.signature(module.forward).parameters
        positions = {"position_ids": ctx.positions.view(ctx.shape)} if positioned else {}
        return module(input_ids=tokens, **positions).logits

    def has_cache(self, module: nn.Module, padded: bool) -> bool:
        """Return whether the model can generate with a cache of keys and values.

        With padding, its forward must accept positions. States of recurrent layers would see the padding, and where
        angles depend on the length of a text (dynamic NTK, LongRoPE), cached keys would keep those of a shorter text.
        """
        needed = {"past_key_values", "use_cache", "attention_mask", *(["position_ids"] if padded else [])}
        if not needed <= inspect.signature(module.forward).parameters.keys():
            return False
        kinds = getattr(self.config.transformers_config().get_text_config(), "layer_types", None) or ()
        recurrent = getattr(module, "_is_stateful", False) or {"conv", "linear_attention"}.intersection(kinds)
        return not recurrent and not self.config.depends_on_longest

    def cached_logits(
        self, module: nn.Module, tokens: Tensor, mask: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Cache]:
        """As in `Foreign`, with the same call as a step of transformers' `generate`."""
        keys: dict[str, Any] = {"attention_mask": mask, "past_key_values": cache, "use_cache": True}
        parameters = inspect.signature(module.forward).parameters
        if "position_ids" in parameters:
            keys["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        if "logits_to_keep" in parameters:
            keys["logits_to_keep"] = 1
        found = module(input_ids=tokens, **keys)
        return found.logits[:, -1], found.past_key_values

    def plan_of(self, module: nn.Module) -> Plan:
        """Return the plan with the modules that transformers' tensor-parallel plan splits by columns or rows."""
        styles = getattr(self.config.transformers_config().get_text_config(), "base_model_tp_plan", None) or {}
        split: dict[str, list[str]] = {}
        for pattern, style in styles.items():
            name = f"{getattr(module, 'base_model_prefix', 'model')}.{pattern}"
            if TP_STYLES.get(style) and modules(module, name):
                split.setdefault(TP_STYLES[style], []).append(name)
        return Plan(super().plan_of(module).blocks, **{field: tuple(names) for field, names in split.items()})


class UserModule(Foreign[UserModuleArchitecture]):
    """A module of your own: ``forward(tokens)`` or ``forward(tokens, ctx)`` → logits."""

    section = UserModuleArchitecture
    has_state = True

    def make(self, std: float | None = None) -> nn.Module:
        """Call the module's constructor; `std` goes to its method `init_weights`, if it has one."""
        from torch import nn

        path = self.config.module
        built = import_dotted(path, MODULE_KEY)(**self.config.arguments())
        if not isinstance(built, nn.Module):
            raise InputError(f"{MODULE_KEY}: expected {path} to make an nn.Module, found {built!r}")
        initialize: Callable[[float], Any] | None = getattr(built, "init_weights", None)
        if std is not None and initialize is None:
            _warn_of_std(path, "has no init_weights(std)")
        elif std is not None and initialize is not None:
            initialize(std)
        return built

    def logits(self, module: nn.Module, tokens: Tensor, ctx: Context) -> Tensor:
        """Return logits; forward receives `ctx` if it has a parameter of this name."""
        takes_ctx = "ctx" in inspect.signature(module.forward).parameters
        found: Tensor = module(tokens, ctx=ctx) if takes_ctx else module(tokens)
        expected = (*tokens.shape, self.config.vocab_size)
        if getattr(found, "shape", None) != expected:
            is_what = list(found.shape) if hasattr(found, "shape") else type(found).__name__
            raise InputError(f"{self.config.title}: expected logits of shape {list(expected)}, found {is_what}")
        return found


def _warn_of_std(title: str, why: str) -> None:
    logging.getLogger("kenotron").warning("model.init_method.std has no effect: %s %s", title, why)
