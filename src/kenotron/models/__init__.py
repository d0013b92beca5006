"""Model families: maths and plan. `build` makes the family that the config names, weights still empty.

    with torch.device("meta"):
        model = build(config.model)
    materialize(model, "cpu")
    initialize_model(model, std=0.02, scaling="NUM_LAYERS", seed=42)

family.py      what a family is; families/: the built-in ones, one file each
decoder.py     what all decoders share: embedding, layers, head, parts of a pipeline, tying; recomputation.py
blocks/        the maths, plain modules
plan.py        how a model may be split, as data
context.py     what flows through a model besides hidden states; recurrent_states.py, from token to token
part.py        one stage of a pipeline, built by itself
token_loss.py  what a head computes in training instead of cross entropy; headless.py, one such
foreign.py     models that others wrote, trained as they are; foreign_model.py, their form here; foreign_decoding.py
module_state.py, document_separation.py, dropout.py    what they keep from call to call, and of documents; dropout
init_rules.py, initialization.py     fresh weights as functions of (seed, name, element)
parametrization.py     what a width or depth does to fresh weights and to steps

Importing this package imports no torch: the config reads the sections of the families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kenotron.models.context import Context, MicroBatch
from kenotron.models.init_rules import rule_for, times
from kenotron.models.part import ModelPart
from kenotron.models.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from kenotron.config.model import Model
    from kenotron.kernels.tensor_shard import TensorShard
    from kenotron.models.decoder import Decoder

__all__ = [
    "Context",
    "MicroBatch",
    "ModelPart",
    "Plan",
    "build",
    "flops_per_token",
    "initialize_model",
    "materialize",
    "named_parameters",
    "named_state",
    "zero_vocabulary_padding",
]


def build(config: Model, tensor_parallel: int = 1, part: ModelPart | None = None) -> Decoder:
    """The module of `config.architecture`, or the `part` of it, on the current default device, weights empty in fp32.

    The vocabulary is padded to a multiple of ``make_vocab_size_divisible_by * tensor_parallel`` rows.
    """
    from kenotron.models.decoder import Decoder
    from kenotron.models.family import family_of

    own = family_of(config.decoder).own_model(config.make_vocab_size_divisible_by, part)
    return own or Decoder(config.decoder, config.make_vocab_size_divisible_by * tensor_parallel, part)


def named_parameters(*parts: Decoder) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter of the model, or of the parts of it that this rank holds, once, under its first name.

    A tied head is part of the embedding; where the two live in different parts, the head's copy is not a parameter.
    """
    for part in parts:
        copies = part.tied_copies()
        yield from ((name, p) for name, p in part.named_parameters(remove_duplicate=True) if name not in copies)


def named_state(*parts: Decoder) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint holds of the model: `named_parameters`, and the buffers that a foreign module saves."""
    yield from named_parameters(*parts)
    for part in parts:
        yield from part.saved_buffers().items()


def materialize(model: Decoder, device: torch.device | str, trained_on: torch.device | str | None = None) -> None:
    """Give a model that was built on the meta device memory on `device`: weights undefined, buffers as they begin.

    `trained_on`: where the trained weights are, if not there (data parallelism brings them to `device`).
    """
    import torch

    trained_on = trained_on or device
    model._apply(lambda tensor: torch.empty_like(tensor, device=trained_on if tensor.requires_grad else device))
    model.reset_buffers(device)
    model.tie_weights()  # the two names of a tied matrix have got a memory each


def initialize_model(
    model: Decoder,
    std: float,
    scaling: str,
    seed: int,
    shard_of: Callable[[Tensor], TensorShard] | None = None,
    factor_of: Callable[[str], float] = lambda name: 1.0,
) -> None:
    """Fill every weight by the family's own rules (nanotron's RandomInit), vocabulary padding with zeros.

    `shard_of` returns the block of a parameter that this rank holds; None: every rank holds complete ones. `factor_of`
    a parameter's name multiplies its standard deviation.
    """
    from kenotron.kernels.tensor_shard import TensorShard
    from kenotron.models.initialization import fill

    rules = model.init_rules(std, scaling)
    for name, parameter in named_parameters(model):
        shard = (shard_of or TensorShard.full)(parameter)
        fill(name, shard, times(rule_for(name, rules), factor_of(name)), seed)
    zero_vocabulary_padding(model, shard_of)


def zero_vocabulary_padding(model: Decoder, shard_of: Callable[[Tensor], TensorShard] | None = None) -> None:
    """Clear the rows that pad the vocabulary: no checkpoint contains them, and zeros keep them out of norms."""
    from kenotron.kernels.tensor_shard import TensorShard

    for name, parameter in named_parameters(model):
        if name in model.vocab_parameters:
            shard = (shard_of or TensorShard.full)(parameter)
            shard.tensor.detach()[len(shard.up_to(model.config.vocab_size).tensor) :].zero_()


def flops_per_token(model: nn.Module, sequence_length: int, causal: bool) -> float:
    """FLOPs of one token's forward pass: the sum over the modules that have a method of this name, as all with a matrix
    product do (by the field's convention only those count).

    `causal` False counts the whole attention square (nanotron, PaLM appendix B), True only the half that a
    causal mask keeps. Training costs three times this: backward needs two products for each forward one.
    """
    parts = [part for part in model.modules() if hasattr(part, "flops_per_token")]
    return sum(part.flops_per_token(sequence_length, causal) for part in parts)  # type: ignore[operator]
