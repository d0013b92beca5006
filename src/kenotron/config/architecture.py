"""`model.model_config`: the shapes of a model family, told apart by their keys alone.

    {is_llama_config: true, hidden_size: 64, …}     → LlamaArchitecture
    {hidden_size: 64, …}                            → LlamaArchitecture: no marker, and all keys are Llama's
    {is_qwen2_config: true, …}                      → Qwen2Architecture
    {hf: org/name, rope_theta: 500000.0}            → HFArchitecture: read from there, with one value changed

As in nanotron, a marker counts by its presence; its value changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, GetJsonSchemaHandler, Tag, model_serializer, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from kenotron.config.section import EXPORT, OURS, LocalPath, Section, by_rule, has, key, null_means, problem

AttentionImplementation = Literal[
    "flash_attention_2", "flex_attention", "sdpa", "ring_flash_triton", "ring", "llama3_ring_attention"
]

# Names of Hugging Face's hidden_act, those that kernels.swiglu computes.
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")

# Keys of rope_scaling by type, those that models/blocks/rope.py reads: (required, optional).
ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "yarn": (
        {"factor"},
        {
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        },
    ),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        set(),
    ),
}


def _check_rope_scaling(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is None:
        return None
    kind = value.get("rope_type", value.get("type"))
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise PydanticCustomError("expected", f"a rope_type among {', '.join(ROPE_KEYS)}")
    required, optional = ROPE_KEYS[kind]
    found = set(value) - {"rope_type", "type"}
    if missing := sorted(required - found):
        raise PydanticCustomError("expected", f"the key '{missing[0]}' beside rope_type: {kind}")
    if unknown := sorted(found - required - optional):
        raise PydanticCustomError(
            "expected",
            f"for rope_type {kind} only {', '.join(sorted(required | optional))}, not '{unknown[0]}'",
        )
    for name in sorted(found - {"truncate"}):
        number = isinstance(value[name], int | float) and not isinstance(value[name], bool)
        if not number and not (value[name] is None and name in optional):
            raise PydanticCustomError("expected", f"a number as {name}")
    return value


RopeScaling = Annotated[dict[str, Any] | None, AfterValidator(_check_rope_scaling)]


def odd_head_dim(hidden_size: int, heads: int) -> str | None:
    """What is wrong with a head whose channels RoPE cannot pair; None where nothing is."""
    if hidden_size % heads or hidden_size // heads % 2 == 0:
        return None
    return f"expected an even hidden_size / num_attention_heads, found {hidden_size // heads}"


class LlamaArchitecture(Section):
    """The Llama family, under Hugging Face's names."""

    is_llama_config: bool = key("Marks the family; its value changes nothing.", True)
    bos_token_id: int = key("Token that starts a generated text.", 1, ge=0)
    eos_token_id: int = key(
        "Token that ends a text: put between documents where the tokenizer has none, stops generation.",
        2,
        ge=0,
    )
    hidden_act: str = key("Activation of the gated feed-forward (silu: SwiGLU).", "silu")
    hidden_size: int = key("Width of the residual stream.", 4096, ge=1)
    initializer_range: float = key("Kept for the export; init_method.std is what counts.", 0.02, mark=EXPORT)
    intermediate_size: int = key("Width inside the feed-forward.", 11008, ge=1)
    max_position_embeddings: int = key(
        "Context length that the export names (rope_scaling dynamic and yarn read it where they name no "
        "original_max_position_embeddings).",
        2048,
        ge=1,
        mark=EXPORT,
    )
    num_attention_heads: int = key("Query heads.", 32, ge=1)
    num_hidden_layers: int = key("Layers.", 32, ge=1)
    attention_bias: bool = key("Biases on the attention projections.", False)
    num_key_value_heads: int | None = key(
        "Key and value heads, shared by groups of query heads; null: as many as query heads.", None, ge=1
    )
    pad_token_id: int | None = key("Padding token that the export names.", None, mark=EXPORT)
    pretraining_tp: int = key("Written to the export.", 1, mark=EXPORT)
    rms_norm_eps: float = key("Added to the mean square inside RMSNorm.", 1e-6, gt=0)
    rope_scaling: RopeScaling = key(
        "Stretching of RoPE: {rope_type: linear|dynamic|yarn|llama3, factor, …} as in transformers.", None
    )
    rope_theta: float = key("Base of the rotary frequencies.", 10000.0, gt=0)
    rope_interleaved: bool = key("Rotate neighbouring pairs instead of the two halves of a head.", False)
    tie_word_embeddings: bool = key("One matrix for the embedding and the output layer.", False)
    use_cache: bool = key("Written to the export.", True, mark=EXPORT)
    vocab_size: int = key("Rows of the embedding before padding.", 32000, ge=1)
    attn_implementation: AttentionImplementation = key(
        "flash_attention_2 and sdpa both mean the built-in attention, which takes the fastest path it finds.",
        "flash_attention_2",
        alias="_attn_implementation",
    )
    z_loss_enabled: bool = key("Add z_loss_coefficient * log(Z)^2 to every token's loss.", False)
    z_loss_coefficient: float = key("Weight of the z-loss.", 1e-4, ge=0)

    @property
    def kv_heads(self) -> int:
        """Key and value heads, with the default filled in."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class MoeConfig(Section):
    """Experts of the Qwen2 family."""

    num_experts: int = key("Experts of a layer.", 8, ge=1)
    top_k: int = key("Experts that a token goes to.", 2, ge=1)
    moe_intermediate_size: int = key("Width inside an expert.", 1408, ge=1)
    shared_expert_intermediate_size: int = key("Width inside the shared expert.", 5632, ge=1)
    router_aux_loss_coef: float = key("Weight of the balance loss.", 0.01, ge=0)
    layers: list[int] = key("Layers that have experts; [-1]: all.", [-1])
    enable_shared_expert: bool = key("One expert that every token goes to.", False)
    token_dispatcher_type: Literal["alltoall", "allgather"] = key("How tokens reach experts.", "alltoall")


class Qwen2Architecture(Section):
    """The Qwen2 family of nanotron (not supported yet)."""

    is_qwen2_config: bool = key("Marks the family; its value changes nothing.", True)
    bos_token_id: int = key("Token that starts a text.", 1, ge=0)
    eos_token_id: int = key("Token that ends a text.", 2, ge=0)
    hidden_act: str = key("Activation of the feed-forward.", "silu")
    hidden_size: int = key("Width of the residual stream.", 4096, ge=1)
    initializer_range: float = key("Kept for the export.", 0.02, mark=EXPORT)
    intermediate_size: int = key("Width inside the feed-forward.", 11008, ge=1)
    max_position_embeddings: int = key("Context length that the export names.", 2048, ge=1, mark=EXPORT)
    num_attention_heads: int = key("Query heads.", 32, ge=1)
    num_hidden_layers: int = key("Layers.", 32, ge=1)
    num_key_value_heads: int | None = key("Key and value heads.", None, ge=1)
    pad_token_id: int | None = key("Padding token that the export names.", None, mark=EXPORT)
    pretraining_tp: int = key("Written to the export.", 1, mark=EXPORT)
    rms_norm_eps: float = key("Added to the mean square inside RMSNorm.", 1e-6, gt=0)
    rope_scaling: RopeScaling = key("Stretching of RoPE.", None)
    rope_theta: float = key("Base of the rotary frequencies.", 10000.0, gt=0)
    rope_interleaved: bool = key("Rotate neighbouring pairs.", False)
    rope_seq_len_interpolation_factor: float | None = key("Divides the positions.", None, gt=0)
    tie_word_embeddings: bool = key("One matrix for embedding and output.", False)
    use_cache: bool = key("Written to the export.", True, mark=EXPORT)
    vocab_size: int = key("Rows of the embedding before padding.", 32000, ge=1)
    attn_implementation: AttentionImplementation = key(
        "Attention to use.", "flash_attention_2", alias="_attn_implementation"
    )
    flex_attention_mask: Literal["sliding_window", "document", "sliding_window_document"] | None = key(
        "Mask for flex_attention.", None
    )
    attention_bias: bool = key("Biases on the attention projections.", False)
    sliding_window_size: int | None = key("Tokens that a token looks back on.", None, ge=1)
    z_loss_enabled: bool = key("Add the z-loss.", False)
    z_loss_coefficient: float = key("Weight of the z-loss.", 1e-4, ge=0)
    no_rope_layer: int | None = key("Every this-many-th layer has no RoPE.", None, ge=1)
    fused_rotary_emb: bool = key("Fused rotary kernel.", True, alias="_fused_rotary_emb")
    fused_rms_norm: bool = key("Fused norm kernel.", True, alias="_fused_rms_norm")
    use_qkv_packed: bool = key("Packed projections.", True, alias="_use_qkv_packed")
    use_doc_masking: bool = key("Attention stays inside a document.", False, alias="_use_doc_masking")
    log_attn_probs: bool = key("Log statistics of attention probabilities.", True)
    ring_attn_heads_k_stride: int | None = key("Heads at once in llama3_ring_attention.", None, ge=1)
    moe_config: MoeConfig | None = key("Experts.", None)

    @model_validator(mode="after")
    def _checks(self) -> Qwen2Architecture:
        attention = self.attn_implementation
        if self.flex_attention_mask and attention != "flex_attention":
            raise problem("flex_attention_mask", "expected _attn_implementation: flex_attention beside it")
        if self.sliding_window_size and attention not in (
            "flex_attention",
            "flash_attention_2",
            "llama3_ring_attention",
        ):
            raise problem("sliding_window_size", f"{attention} has no sliding window")
        if (self.ring_attn_heads_k_stride is not None) != (attention == "llama3_ring_attention"):
            raise problem("ring_attn_heads_k_stride", "expected with llama3_ring_attention and only there")
        if self.no_rope_layer and self.num_hidden_layers % self.no_rope_layer:
            raise problem("no_rope_layer", f"expected a divisor of num_hidden_layers {self.num_hidden_layers}")
        if self.moe_config and self.moe_config.top_k > self.moe_config.num_experts:
            raise problem("moe_config.top_k", f"expected at most num_experts {self.moe_config.num_experts}")
        return self


class Starcoder2Architecture(Section):
    """The Starcoder2 family of nanotron (not supported yet)."""

    is_starcoder2_config: bool = key("Marks the family; its value changes nothing.", True)
    activation_function: str = key("Activation of the feed-forward.", "gelu_pytorch_tanh")
    attention_softmax_in_fp32: bool = key("Softmax in fp32.", True)
    attn_pdrop: float = key("Dropout of attention.", 0.1, ge=0, lt=1)
    bos_token_id: int = key("Token that starts a text.", 49152, ge=0)
    embd_pdrop: float = key("Dropout of the embedding.", 0.1, ge=0, lt=1)
    eos_token_id: int = key("Token that ends a text.", 49152, ge=0)
    global_attn_layers: list[int] = key("Layers without sliding window.", [])
    grouped_query: bool = key("Grouped-query attention.", False)
    hidden_size: int = key("Width of the residual stream.", 2048, ge=1)
    initializer_range: float = key("Kept for the export.", 0.02, mark=EXPORT)
    intermediate_size: int | None = key("Width inside the feed-forward.", None, ge=1)
    layer_norm_epsilon: float = key("Added to the variance inside LayerNorm.", 1e-5, gt=0)
    max_position_embeddings: int = key("Context length.", 4096, ge=1)
    multi_query: bool = key("One key and value head.", False)
    num_attention_heads: int = key("Query heads.", 16, ge=1)
    num_hidden_layers: int = key("Layers.", 24, ge=1)
    num_kv_heads: int | None = key("Key and value heads.", None, ge=1)
    resid_pdrop: float = key("Dropout of the residual stream.", 0.1, ge=0, lt=1)
    rope_theta: Annotated[float, null_means(10000.0)] = key("Base of the rotary frequencies.", 10000.0, gt=0)
    scale_attention_softmax_in_fp32: bool = key("Scale in fp32.", True)
    scale_attn_weights: bool = key("Scale attention scores.", True)
    sliding_window_size: int | None = key("Tokens that a token looks back on.", None, ge=1)
    use_position_embeddings: bool = key("Learned positions.", False)
    use_rotary_embeddings: bool = key("Rotary positions.", True)
    vocab_size: int = key("Rows of the embedding before padding.", 49280, ge=1)
    attn_implementation: AttentionImplementation = key(
        "Attention to use.", "flash_attention_2", alias="_attn_implementation"
    )

    @model_validator(mode="after")
    def _checks(self) -> Starcoder2Architecture:
        if self.grouped_query and self.num_kv_heads is None:
            raise problem("num_kv_heads", "expected a number beside grouped_query: true")
        return self


class HFArchitecture(Section):
    """An architecture read from a Hugging Face config when the run starts; other Llama keys override it."""

    hf: LocalPath = key("Folder or hub name of a Hugging Face model.", mark=OURS)
    overrides: dict[str, Any] = key("Values that replace those of the Hugging Face config.", {}, mark=OURS)

    @model_validator(mode="before")
    @classmethod
    def _gather_overrides(cls, value: Any) -> Any:
        """In YAML the overrides stand beside `hf`; they are checked as what they are, Llama's keys."""
        if not isinstance(value, dict) or "hf" not in value:
            return value
        overrides = {k: v for k, v in value.items() if k not in ("hf", "overrides")}
        overrides |= value.get("overrides", {})
        checked = LlamaArchitecture.model_validate(overrides).model_dump(by_alias=True, exclude_unset=True)
        return {"hf": value["hf"], "overrides": checked}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        own = handler.resolve_ref_schema(handler(schema))
        own["properties"].pop("overrides")
        own["properties"] |= LlamaArchitecture.model_json_schema()["properties"]
        return own

    @model_serializer
    def _beside(self) -> dict[str, Any]:
        return {"hf": self.hf, **self.overrides}


_FAMILIES: dict[str, type[Section]] = {
    "(llama)": LlamaArchitecture,
    "(starcoder2)": Starcoder2Architecture,
    "(qwen2)": Qwen2Architecture,
}


def yaml_keys(section: type[Section]) -> set[str]:
    """Names of a section's keys as YAML spells them."""
    return {field.alias or name for name, field in section.model_fields.items()}


def _choose(value: Any) -> str | None:
    if isinstance(value, HFArchitecture) or (isinstance(value, dict) and "hf" in value):
        return "(hf)"
    for tag, family in _FAMILIES.items():
        if isinstance(value, family) or (isinstance(value, dict) and has(value, f"is_{tag[1:-1]}_config")):
            return tag
    if not isinstance(value, dict):
        return None
    fitting = [tag for tag, family in _FAMILIES.items() if set(value) <= yaml_keys(family)]
    return fitting[0] if fitting else "(llama)"


_architecture_rule = by_rule(_choose, "the keys of a model family, or {hf: folder or hub name}")
Architecture = Annotated[
    Annotated[LlamaArchitecture, Tag("(llama)")]
    | Annotated[Starcoder2Architecture, Tag("(starcoder2)")]
    | Annotated[Qwen2Architecture, Tag("(qwen2)")]
    | Annotated[HFArchitecture, Tag("(hf)")],
    _architecture_rule,
]
