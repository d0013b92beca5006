"""`model`: the architecture, the initial weights, and the compute dtype."""

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, Tag

from kenotron.config.architecture import Architecture
from kenotron.config.decoder import DecoderArchitecture
from kenotron.config.section import LocalPath, Section, also_called, by_rule, has_key, key, our_key, upper_case


class RandomInit(Section):
    """Normally distributed weights; projections that write to the residual stream are scaled down."""

    std: float = key("Standard deviation of the initial weights.", gt=0)
    scaling_method: Annotated[Literal["NONE", "NUM_LAYERS", "LAYER_INDEX"], upper_case("NUM_LAYERS")] = key(
        "What std is divided by where a layer writes to the residual stream: NUM_LAYERS sqrt(2 * layers), LAYER_INDEX "
        "sqrt(2 * (i + 1)) in layer i = 0, 1, …, NONE 1. Without the 2 in a Mamba; in a nano the weights are zeros.",
        "NUM_LAYERS",
    )


class SpectralInit(Section):
    """nanotron's spectral µTransfer: an initialization and a learning rate for each matrix, by its shape alone."""

    std: ClassVar[float] = 1.0  # `models.parametrization` multiplies it by a factor for each matrix
    scaling_method: ClassVar[str] = "NONE"
    use_mup: Literal[True] = key("Select it. Its authors advise against it above 350M; see model.parametrization.")
    mup_factors: Literal["fused", "per_matrix"] = our_key(
        "Count the outputs of q, k, v and of gate, up as those of one matrix, as nanotron does, or of each.", "fused"
    )


class ExistingCheckpointInit(Section):
    """Weights of a checkpoint or of a Hugging Face model; optimizer, schedule and step start from zero."""

    path: LocalPath = key("Checkpoint, or folder or Hub name of a Hugging Face model, to take the weights from.")


def _choose_init(value: Any) -> str | None:
    if not isinstance(value, dict | RandomInit | SpectralInit | ExistingCheckpointInit):
        return None
    tags = [tag for name, tag in _INIT_TAGS.items() if has_key(value, name)]
    return tags[-1] if tags else None


# The key that selects the variant. With keys of several variants the last wins, and the others are errors.
_INIT_TAGS = {"std": "(random)", "use_mup": "(spectral)", "path": "(existing)"}
_init_rule = by_rule(_choose_init, "one of {std}, {use_mup: true}, {path}", _INIT_TAGS)
InitMethod = Annotated[
    Annotated[RandomInit, Tag("(random)")]
    | Annotated[SpectralInit, Tag("(spectral)")]
    | Annotated[ExistingCheckpointInit, Tag("(existing)")],
    _init_rule,
]


class Parametrization(Section):
    """Scale initialization and updates relative to a base model, so that its learning rate suits this model, too."""

    kind: Literal["mup", "completep"] = our_key("mup: for another width; completep: for another depth as well.")
    base_width: int = our_key("hidden_size of the model that the learning rate was found with.", ge=1)
    base_depth: int | None = our_key("num_hidden_layers of that model, for completep.", None, ge=1)


class Headless(Section):
    """The headless loss (Godey et al., 2023): predict a token's embedding among those of the batch, without logits."""

    name: Literal["headless"] = our_key("Selects the headless loss.")
    negatives: Literal["sequence", "block", "batch", "micro_batch"] = our_key(
        "Candidates for the next token: the tokens of the sequence, of a block of block_size neighbours in it, or of "
        "the global batch; micro_batch makes the loss depend on micro_batch_size and dp.",
        "sequence",
    )
    block_size: int | None = our_key("Tokens of a block; divides sequence_length.", None, ge=2)
    temperature: float = our_key("Scores are divided by it.", 1.0, gt=0)

    def tokens_of_a_set(self, sequences: int, length: int) -> int | None:
        """Return the number of candidates for the next token, or None with `negatives` batch."""
        sizes = {"sequence": length, "block": self.block_size, "micro_batch": sequences * length}
        return sizes.get(self.negatives)


class Distillation(Section):
    """Knowledge distillation (Hinton et al., 2015): the divergence from a teacher, and cross entropy, both in fp32."""

    name: Literal["distillation"] = our_key("Selects distillation.")
    teacher: str = our_key("Checkpoint, or Hugging Face folder or hub name, of a model of the same vocabulary.")
    weight: float = our_key(
        "Weight of the divergence from the teacher in the loss; cross entropy has the rest.", 0.5, gt=0, le=1
    )
    temperature: float = our_key("The divergence is that of the logits of both divided by this.", 1.0, gt=0)
    top_k: int | None = our_key(
        "Number of the teacher's most probable tokens to learn, with all other tokens counted as one; null: every "
        "token.",
        None,
        ge=1,
    )
    cache: LocalPath | None = our_key(
        "Folder to cache the teacher's top_k probabilities of every sample in, so that the teacher reads it once for "
        "all runs with the same data, seed and batch. null: no cache.",
        None,
    )


def _choose_loss(value: Any) -> str | None:
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    if isinstance(value, dict | Headless | Distillation):
        return {"distillation": "(distillation)", "headless": "(headless)"}.get(str(name))
    return "(dotted)" if isinstance(value, str) and "." in value else None


Loss = Annotated[
    Annotated[str, Field(pattern=r"\."), Tag("(dotted)")]
    | Annotated[Headless, Tag("(headless)")]
    | Annotated[Distillation, Tag("(distillation)")],
    by_rule(
        _choose_loss,
        "{name: headless}, {name: distillation, teacher: …}, or a dotted path such as my_module.name",
        ("headless", "distillation"),
    ),
]


Dtype = Literal["float32", "bfloat16", "float16", "float64"]  # a run trains in the first three
DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "half": "float16", "fp64": "float64"}
_dtype_rule = also_called(DTYPE_NAMES, "bfloat16", get_args(Dtype), "bfloat16, float16 or float32")

WEIGHT_DTYPES = ("float32", "bfloat16", "float16")  # of exports and of generation


class Model(Section):
    """Architecture, initial weights, precision."""

    # pydantic reserves the name `model_config`.
    architecture: Architecture = key("Shapes of the model.", alias="model_config")
    init_method: InitMethod = key("Where the initial weights come from.")
    dtype: Annotated[Dtype, _dtype_rule] = key(
        "Dtype of the forward and backward computation: bfloat16, float16 (with dynamic loss scaling) or float32.",
        "bfloat16",
    )
    parametrization: Parametrization | None = our_key(
        "How weights and steps depend on width and depth; null: they do not, the standard parametrization.", None
    )
    make_vocab_size_divisible_by: int = key(
        "Pad the vocabulary in memory to a multiple of this times tp. Padding is never saved or predicted.", 1, ge=1
    )
    loss: Loss | None = our_key(
        "The training loss: {name: headless}, {name: distillation}, or the dotted path of f(logits, labels) → a loss "
        "for every token. null: cross entropy, without holding all logits in memory. Validation always uses cross "
        "entropy.",
        None,
    )
    ddp_bucket_cap_mb: int = key("Gradient bucket size of the all-reduce at zero_stage 0, in MiB.", 25, ge=1)
    compile: bool = our_key("Compile each block with torch.compile.", False)
    kernels: Literal["torch", "triton"] | None = our_key(
        "triton: our kernels on a GPU, and the packages for Mamba if installed; torch: torch's operators alone. null: "
        "what is fastest by measurement.",
        None,
    )
    document_masking: bool = our_key(
        "Restrict attention to the tokens of the same document, and restart positions at every document.", False
    )

    @property
    def decoder(self) -> DecoderArchitecture:
        """The architecture of a model that can be built: supported, and with references to Hugging Face resolved."""
        assert isinstance(self.architecture, DecoderArchitecture), "an architecture that was refused or not resolved"
        return self.architecture
