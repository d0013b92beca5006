"""`model`: its architecture, where its first weights come from, and what it computes in."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Tag

from kenotron.config.architecture import Architecture
from kenotron.config.section import OURS, LocalPath, Section, by_rule, has, key, null_means, upper_case


class RandomInit(Section):
    """Normal weights of one standard deviation; those that write to the residual stream are scaled down."""

    std: float = key("Standard deviation of the first weights.", gt=0)
    scaling_method: Annotated[Literal["NONE", "NUM_LAYERS", "LAYER_INDEX", "MODEL_SCALE"], upper_case("NUM_LAYERS")] = (
        key(
            "Scale of the projections that write to the residual stream: NUM_LAYERS divides by sqrt(2 * layers), "
            "NONE leaves std (LAYER_INDEX and MODEL_SCALE are not supported yet).",
            "NUM_LAYERS",
        )
    )


class SpectralMupInit(Section):
    """Spectral parametrization, muP (not supported yet)."""

    use_mup: Literal[True] = key("Initialize and scale learning rates by spectral muP.")


class ExistingCheckpointInit(Section):
    """Weights of a checkpoint or of a Hugging Face model; optimizer, schedule and step start afresh."""

    path: LocalPath = key("Checkpoint, or folder or hub name of a Hugging Face model, that gives the weights.")


def _choose_init(value: Any) -> str | None:
    if not isinstance(value, dict | RandomInit | SpectralMupInit | ExistingCheckpointInit):
        return None
    found = [tag for name, tag in _INIT_TAGS.items() if has(value, name)]
    return found[-1] if found else None


# The key that decides; with keys of several variants the later wins and the others are named as out of place.
_INIT_TAGS = {"std": "(random)", "use_mup": "(mup)", "path": "(existing)"}
_init_rule = by_rule(_choose_init, "one of {std}, {use_mup: true}, {path}", _INIT_TAGS)
InitMethod = Annotated[
    Annotated[RandomInit, Tag("(random)")]
    | Annotated[SpectralMupInit, Tag("(mup)")]
    | Annotated[ExistingCheckpointInit, Tag("(existing)")],
    _init_rule,
]

Dtype = Literal[
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float16",
    "bfloat16",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
]


TRAINING_DTYPES = ("float32", "bfloat16")
WEIGHT_DTYPES = (*TRAINING_DTYPES, "float16")  # of exports and of generation


class Model(Section):
    # pydantic keeps the name `model_config` for itself.
    architecture: Architecture = key("Shapes of the model.", alias="model_config")
    init_method: InitMethod = key("Where the first weights come from.")
    dtype: Annotated[Dtype, null_means("bfloat16")] = key(
        "Type of the forward and backward computation (bfloat16 and float32 are supported).", "bfloat16"
    )
    make_vocab_size_divisible_by: int = key(
        "Pad the vocabulary in memory to a multiple of this times tp; padding is never saved or predicted.",
        1,
        ge=1,
    )
    ddp_bucket_cap_mb: int = key("MiB of gradients summed in one collective at zero_stage 0.", 25, ge=1)
    compile: bool = key("Compile every block with torch.compile.", False, mark=OURS)
    document_masking: bool = key(
        "Attention and positions start anew at every document of a sequence.", False, mark=OURS
    )
