"""Model families: maths, then plan. `build` makes the family that the config names, weights still empty.

with torch.device("meta"):
    model = build(config.model)
materialize(model, "cpu")
initialize_model(model, std=0.02, scaling="NUM_LAYERS", seed=42)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kenotron.models.context import Context, MicroBatch
from kenotron.models.family import LanguageModel
from kenotron.models.initialization import Shard, initialize, whole, zero_padding_rows
from kenotron.models.part import Part
from kenotron.models.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from kenotron.config.model import Model

__all__ = [
    "Context",
    "LanguageModel",
    "MicroBatch",
    "Part",
    "Plan",
    "build",
    "flops_per_token",
    "initialize_model",
    "materialize",
    "named_parameters",
    "zero_vocabulary_padding",
]


def build(config: Model, tensor_parallel: int = 1, part: Part | None = None) -> LanguageModel:
    """The module of `config.architecture`, or the `part` of it, on the current default device, weights empty in fp32.

    The vocabulary is padded to a multiple of ``make_vocab_size_divisible_by * tensor_parallel`` rows.
    """
    from kenotron.config.architecture import LlamaArchitecture
    from kenotron.models.llama import Llama

    assert isinstance(config.architecture, LlamaArchitecture)  # the others were refused as not supported yet
    return Llama(config.architecture, config.make_vocab_size_divisible_by * tensor_parallel, part)


def named_parameters(*parts: LanguageModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter of the model, or of the parts of it that this rank holds, once, under its first name.

    A tied head is part of the embedding; where the two live in different parts, the head's copy is no parameter.
    """
    for part in parts:
        copies = part.tied_copies()
        yield from ((name, p) for name, p in part.named_parameters(remove_duplicate=True) if name not in copies)


def materialize(model: LanguageModel, device: torch.device | str) -> None:
    """Give a model that was built on the meta device memory on `device`, its contents undefined."""
    model.to_empty(device=device)
    model.tie_weights()  # to_empty gave the two names of a tied matrix a memory each


def initialize_model(
    model: LanguageModel, std: float, scaling: str, seed: int, shard_of: Callable[[Tensor], Shard] = whole
) -> None:
    """Fill every weight by the family's own rules (nanotron's RandomInit), vocabulary padding with zeros."""
    initialize(named_parameters(model), model.init_rules(std, scaling), seed, shard_of)
    zero_vocabulary_padding(model, shard_of)


def zero_vocabulary_padding(model: LanguageModel, shard_of: Callable[[Tensor], Shard] = whole) -> None:
    """Clear the rows that pad the vocabulary: no checkpoint and no other model brings them."""
    for name, parameter in named_parameters(model):
        if name in model.vocab_parameters:
            zero_padding_rows(parameter, model.config.vocab_size, shard_of)


def flops_per_token(model: nn.Module, sequence_length: int, causal: bool) -> float:
    """FLOPs of one token's forward pass: what the modules answer, summed.

    `causal` False counts the whole attention square (nanotron, PaLM appendix B), True only the half that a
    causal mask keeps. Training costs three times this: backward needs two products for each forward one.
    """
    return sum(
        module.flops_per_token(sequence_length, causal)  # type: ignore[operator]
        for module in model.modules()
        if hasattr(module, "flops_per_token")
    )
