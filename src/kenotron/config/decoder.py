"""The base sections of decoder-only families: keys for shapes, tokens and the loss, and values derived from them.

The section of a family derives from one of these classes and adds its keys:

    DecoderArchitecture       the keys of every decoder; enough for a family without attention (Mamba)
    AttentionArchitecture     also heads, a feed-forward, a context length
    RopeArchitecture          also rotary positions

    class MistralArchitecture(RopeArchitecture):
        family: Literal["mistral"] = our_key("The family's name.", "mistral")
        sliding_window: int | None = key("Tokens that a token looks back on.", 4096, ge=1)
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from kenotron.config.errors import nearest
from kenotron.config.section import EXPORT, Section, key, our_key, problem

Ring = Literal["ring", "ring_flash_triton", "llama3_ring_attention"]
Flash = Literal["flash_attention_2", "flash_attention_3", "flash_attention_4"]
AttentionImplementation = Literal["auto", Flash, "flex_attention", "sdpa", "eager", Ring]
# nanotron's names of attention over context-parallel ranks → `parallelism.context_parallel_method`.
RING_ATTENTION = {"ring": "ring", "ring_flash_triton": "ring", "llama3_ring_attention": "allgather"}

# The values of Hugging Face's hidden_act that kernels.swiglu computes.
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu", "relu2")

KEYS_OF_YARN = "original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim truncate"
# rope_type → the keys of rope_scaling that models/blocks/rope.py reads: (required, optional).
ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "yarn": ({"factor"}, set(KEYS_OF_YARN.split())),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
}

Problem = tuple[str, str]  # the key to change, and the message


def _check_rope_scaling(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is None:
        return None
    kind = value.get("rope_type", value.get("type"))
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise PydanticCustomError("expected", f"a rope_type among {', '.join(ROPE_KEYS)}")
    required, optional = ROPE_KEYS[kind]
    keys = set(value) - {"rope_type", "type"}
    if missing := sorted(required - keys):
        raise PydanticCustomError("expected", f"the key '{missing[0]}' beside rope_type: {kind}")
    if unknown := sorted(keys - required - optional):
        raise PydanticCustomError(
            "expected", f"for rope_type {kind} only {', '.join(sorted(required | optional))}, not '{unknown[0]}'"
        )
    for name in sorted(keys - {"truncate"}):
        number = isinstance(value[name], int | float) and not isinstance(value[name], bool)
        if not number and not (value[name] is None and name in optional):
            raise PydanticCustomError("expected", f"a number as {name}")
    return value


RopeScaling = Annotated[dict[str, Any] | None, AfterValidator(_check_rope_scaling)]


class DecoderArchitecture(Section):
    """A family from outside of this library, whose own section adds keys to these."""

    not_served: ClassVar[tuple[str, ...]] = ()
    """Fields of other systems; a value other than their default is refused."""
    shape_keys: ClassVar[tuple[str, ...]] = ("hidden_size", "num_hidden_layers", "vocab_size")
    """The keys in which another model must agree for its weights to be loaded."""
    other_names: ClassVar[dict[str, str]] = {}
    """Name of a key in other systems → its name here."""

    family: str = our_key(
        "The family: a built-in one's name, the dotted path of one of yours (my_module.MyFamily), or the name that an "
        "installed package registers under kenotron.models."
    )
    bos_token_id: int = key("Token that starts a generated text.", 1, ge=0)
    eos_token_id: int = key(
        "Token that ends a text: stops generation, and separates documents if the tokenizer has no such token.", 2, ge=0
    )
    hidden_act: str = key("Activation of the feed-forward (silu in a gated one: SwiGLU).", "silu")
    hidden_size: int = key("Width of the residual stream.", 4096, ge=1, le=1_000_000)
    initializer_range: float = key("Kept for the export; training uses init_method.std.", 0.02, mark=EXPORT)
    num_hidden_layers: int = key("Layers.", 32, ge=1, le=10_000)
    pad_token_id: int | None = key("Padding token, written to the export.", None, mark=EXPORT)
    tie_word_embeddings: bool = key("One matrix for the embedding and the output layer.", False)
    use_cache: bool = key("Written to the export.", True, mark=EXPORT)
    vocab_size: int = key("Rows of the embedding before padding.", 32000, ge=1, le=1_000_000_000)
    z_loss_enabled: bool = key("Add z_loss_coefficient * log(Z)^2 to every token's loss.", False)
    z_loss_coefficient: float = key("Weight of the z-loss.", 1e-4, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _rename_keys(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for other, name in cls.other_names.items():
            if other in value and name in value:
                raise problem(other, f"is another name for {name}; remove one of them")
        return {cls.other_names.get(key, key): item for key, item in value.items()}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        result = handler(schema)
        properties = handler.resolve_ref_schema(result)["properties"]
        properties |= {other: properties[name] for other, name in cls.other_names.items()}
        return result

    @property
    def experts(self) -> int:
        """The number of experts in a layer; 0 for a dense family."""
        return 0

    @property
    def expert_width(self) -> int:
        """The intermediate size of an expert; 0 for a dense family."""
        return getattr(self, "moe_intermediate_size", 0)

    @property
    def next_token_layers(self) -> range:
        """The numbers of the multi-token-prediction blocks after the last layer; each predicts one token further."""
        return range(self.num_hidden_layers, self.num_hidden_layers)

    @property
    def longest_text(self) -> int:
        """The largest number of positions that the model can read in generation."""
        return sys.maxsize

    @property
    def fixed_rope_length(self) -> int:
        """The number of positions up to which rotary angles do not depend on the longest text of a batch."""
        return sys.maxsize

    @property
    def depends_on_longest(self) -> bool:
        """Whether a token's result may depend on the longest text of its batch."""
        return self.fixed_rope_length < sys.maxsize

    def document_problem(self, length: int) -> str | None:
        """Return the reason why sequences of `length` tokens cannot hold packed documents, or None."""
        if length <= self.fixed_rope_length:
            return None
        return (
            f"rotary angles follow the longest document of a micro-batch beyond {self.fixed_rope_length} tokens: the "
            f"loss would depend on the layout; expected at most that many, found {length}"
        )

    def shape_problems(self) -> Iterator[Problem]:
        """Yield (key, message) for shapes that do not fit each other."""
        yield from ()

    def tp_problems(self, tp: int) -> Iterator[str]:
        """Yield a message for each shape that tensor parallelism of degree `tp` cannot divide."""
        yield from ()

    def ep_problems(self, ep: int) -> Iterator[str]:
        """Yield the reasons why `ep` ranks cannot share the experts of a layer."""
        if ep > 1 and not self.experts:
            yield f"expected 1: the family {self.family} has no experts; found {ep}"
        elif self.experts % ep:
            yield f"expected a divisor of the {self.experts} experts of a layer, found {ep}"

    def cp_problems(self, cp: int, tp: int, method: str, lengths: Mapping[str, int]) -> Iterator[str]:
        """Yield the reasons why `cp` ranks cannot share sequences by `method`; `lengths` maps config key → length."""
        yield from ()

    def pp_problems(self, pp: int) -> Iterator[str]:
        """Yield the reasons why `pp` ranks cannot share the layers."""
        yield from ()

    def unsupported(self) -> Iterator[str]:
        """Yield ``key: value`` for every value that is not implemented yet."""
        if self.hidden_act not in ACTIVATIONS:
            yield f"hidden_act: {self.hidden_act}{nearest(self.hidden_act, ACTIVATIONS)}"
        for name in self.not_served:
            field = type(self).model_fields[name]
            if getattr(self, name) != field.default:
                yield f"{field.alias or name}: {getattr(self, name)}"


class AttentionArchitecture(DecoderArchitecture):
    """A decoder of attention and feed-forward."""

    shape_keys: ClassVar[tuple[str, ...]] = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "kv_heads",
        "head_dim",
        "vocab_size",
    )

    intermediate_size: int = key("Width inside the feed-forward.", 11008, ge=1, le=100_000_000)
    max_position_embeddings: int = key(
        "Context length: limits generated texts, and is written to the export (rope_scaling dynamic and yarn read "
        "it if they have no original_max_position_embeddings).",
        2048,
        ge=1,
        mark=EXPORT,
    )
    num_attention_heads: int = key("Query heads.", 32, ge=1, le=100_000)
    num_key_value_heads: int | None = key(
        "Key and value heads, shared by groups of query heads; null: as many as query heads.", None, ge=1, le=100_000
    )
    attn_implementation: AttentionImplementation = key(
        "The attention function. auto and flash_attention_2: the fastest exact one on this device; the log names it.",
        "flash_attention_2",
        alias="_attn_implementation",
    )

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads, with the default filled in."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """The number of channels of one head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def attention_window(self) -> int | None:
        """The key `sliding_window`: how many tokens a token attends to, including itself; None: all before it."""
        return getattr(self, "sliding_window", None)

    @property
    def longest_text(self) -> int:
        """max_position_embeddings."""
        return self.max_position_embeddings

    def shape_problems(self) -> Iterator[Problem]:
        """Check that the heads divide the width, and the key-value heads the query heads."""
        heads, kv = self.num_attention_heads, self.kv_heads
        yield from self.head_dim_problems()
        if kv > heads or heads % kv:
            yield "num_key_value_heads", f"expected a divisor of num_attention_heads {heads}, found {kv}"

    def head_dim_problems(self) -> Iterator[Problem]:
        """Yield (key, message) if the heads cannot have a whole head_dim."""
        if self.hidden_size % self.num_attention_heads:
            expected = f"expected a divisor of hidden_size {self.hidden_size}, found {self.num_attention_heads}"
            yield "num_attention_heads", expected

    def tp_problems(self, tp: int) -> Iterator[str]:
        """Check the heads and the width of the feed-forward."""
        heads, kv = self.num_attention_heads, self.kv_heads
        if heads % tp:
            yield f"expected a divisor of num_attention_heads {heads}, found {tp}"
        elif kv % tp and tp % kv:
            yield f"expected a divisor or a multiple of num_key_value_heads {kv}, found {tp}"
        if self.intermediate_size % tp:
            yield f"expected a divisor of intermediate_size {self.intermediate_size}, found {tp}"

    def cp_problems(self, cp: int, tp: int, method: str, lengths: Mapping[str, int]) -> Iterator[str]:
        """Check the sliding window, the heads that ulysses divides, and positions that depend on all tokens."""
        heads = self.num_attention_heads
        if method == "state_passing":
            yield (
                "expected context_parallel_method ring, allgather or ulysses with attention: state_passing is for "
                "layers with a recurrent state"
            )
        if self.attention_window is not None and method != "ulysses":
            window = f"a sliding window of {self.attention_window} tokens"
            yield f"{window} needs context_parallel_method ulysses, found {method}"
        if method == "ulysses" and heads % tp == 0 and heads // tp % cp:
            yield (
                f"ulysses splits the query heads of a rank, num_attention_heads {heads} / tp {tp} = {heads // tp}; "
                f"expected a divisor of that, found {cp} (ring and allgather take any degree)"
            )
        for name, length in lengths.items():
            if length > self.fixed_rope_length:
                yield (
                    "rope_scaling dynamic depends on the longest position of a batch, and a rank has only its own "
                    f"tokens; expected 1, or {name} of at most max_position_embeddings {self.max_position_embeddings}"
                )

    def unsupported(self) -> Iterator[str]:
        """Yield also names of attention functions that are context-parallel methods here."""
        name = self.attn_implementation
        if method := RING_ATTENTION.get(name):
            yield f"_attn_implementation: {name} (set parallelism.context_parallel_method: {method})"
        yield from super().unsupported()


class RopeArchitecture(AttentionArchitecture):
    """A decoder with rotary positions."""

    rope_scaling: RopeScaling = key(
        "Stretching of RoPE: {rope_type: linear|dynamic|yarn|llama3, factor, …} as in transformers.", None
    )
    rope_theta: float = key("Base of the rotary frequencies.", 10000.0, gt=0)
    rope_interleaved: bool = key("Rotate neighbouring pairs instead of the two halves of a head.", False)
    free_head_dim: int | None = our_key(
        "Channels of a head; null: hidden_size / query heads.", None, ge=2, le=100_000, alias="head_dim"
    )

    @property
    def head_dim(self) -> int:
        """The number of channels of one head, with the default filled in."""
        return self.free_head_dim or super().head_dim

    @property
    def rotary_factor(self) -> float:
        """The fraction of a head's channels that RoPE rotates."""
        return 1.0

    @property
    def rotary_dim(self) -> int:
        """The number of channels of a head that RoPE rotates: the first ones."""
        return int(self.head_dim * self.rotary_factor)

    def uses_rope(self, layer: int) -> bool:
        """Return whether layer number `layer` has rotary positions; a family may override it."""
        return True

    @property
    def rope_type(self) -> str:
        """The type of `rope_scaling`; "default" without one."""
        scaling = self.rope_scaling or {}
        return str(scaling.get("rope_type", scaling.get("type", "default")))

    @property
    def longest_text(self) -> int:
        """max_position_embeddings, or a larger number that `rope_scaling` stretches it or the pretraining length to."""
        scaling = self.rope_scaling or {}
        factor = scaling["factor"] if self.rope_type in ("linear", "dynamic", "yarn") else 1
        original = scaling.get("original_max_position_embeddings") or self.max_position_embeddings
        return max(self.max_position_embeddings, int(original * factor))

    @property
    def fixed_rope_length(self) -> int:
        """max_position_embeddings with rope_scaling dynamic, whose angles depend on the longest text beyond that."""
        return self.max_position_embeddings if self.rope_type == "dynamic" else sys.maxsize

    def head_dim_problems(self) -> Iterator[Problem]:
        """Check that a head has an even number of channels, as RoPE rotates pairs; otherwise `head_dim` is free."""
        if self.free_head_dim is not None:
            if self.free_head_dim % 2:
                yield "head_dim", f"expected an even number, found {self.free_head_dim}"
            return
        if self.hidden_size % self.num_attention_heads == 0 and self.head_dim % 2:
            yield "hidden_size", f"expected an even hidden_size / num_attention_heads, found {self.head_dim}"
        yield from super().head_dim_problems()
