"""Model families: their code and their plans. `build` makes the config's model, with its weights still empty.

    model = skeleton(config.model)          # `build` on the meta device
    materialize(model, "cpu")
    initialize_model(model, std=0.02, scaling="NUM_LAYERS", seed=42)

family.py      what a family is; families/: the built-in ones, one file each
decoder.py     what all decoders share: embedding, layers, head, pipeline stages, tying; recomputation.py
blocks/        attention, MLPs, norms, …: plain modules
plan.py        how a model may be split, as data
context.py     the inputs of a model besides hidden states; recurrent_states.py, recurrent layers in generation
part.py        one stage of a pipeline, built by itself
token_loss.py  training losses other than cross entropy; headless.py, one of them
foreign.py     models that others wrote, trained as they are; foreign_model.py, their `Decoder`; foreign_decoding.py
module_state.py, document_separation.py, dropout.py    of foreign models: state, separation of documents, dropout
init_rules.py, initialization.py     fresh weights as functions of (seed, name, element)
parametrization.py     how width and depth scale initial weights and optimizer steps

Importing this package does not import torch, because the config imports the sections of the families.
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
    "skeleton",
    "zero_vocabulary_padding",
]


def build(config: Model, tensor_parallel: int = 1, part: ModelPart | None = None) -> Decoder:
    """Build the module of `config.architecture`, or the `part` of it, on the default device, with empty fp32 weights.

    The vocabulary is padded to a multiple of ``make_vocab_size_divisible_by * tensor_parallel`` rows.
    """
    from kenotron.models.decoder import Decoder
    from kenotron.models.family import family_of

    own = family_of(config.decoder).own_model(config.make_vocab_size_divisible_by, part)
    return own or Decoder(config.decoder, config.make_vocab_size_divisible_by * tensor_parallel, part)


def skeleton(config: Model, tensor_parallel: int = 1, part: ModelPart | None = None) -> Decoder:
    """As `build`, but on the meta device: names and shapes without memory."""
    import torch

    with torch.device("meta"):
        return build(config, tensor_parallel, part)


def named_parameters(*parts: Decoder) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter of the model, or of the parts that this rank holds, once, under its first name.

    A tied head is the embedding's parameter; if the two are on different stages, the head's copy is left out.
    """
    for part in parts:
        copies = part.tied_copies()
        yield from ((name, p) for name, p in part.named_parameters(remove_duplicate=True) if name not in copies)


def named_state(*parts: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a checkpoint saves: `named_parameters`, and the buffers that a foreign module saves."""
    yield from named_parameters(*parts)
    for part in parts:
        yield from part.saved_buffers().items()


def materialize(model: Decoder, device: torch.device | str, trained_on: torch.device | str | None = None) -> None:
    """Allocate a model that was built on the meta device on `device`: weights uninitialized, buffers at initial values.

    `trained_on` is the device of the trained weights, if it is another (data parallelism brings them to `device`).
    """
    import torch

    trained_on = trained_on or device
    model._apply(lambda tensor: torch.empty_like(tensor, device=trained_on if tensor.requires_grad else device))
    model.reset_buffers(device)
    model.tie_weights()  # until here, each name of a tied matrix has its own memory


def initialize_model(
    model: Decoder,
    std: float,
    scaling: str,
    seed: int,
    shard_of: Callable[[Tensor], TensorShard] | None = None,
    factor_of: Callable[[str], float] = lambda name: 1.0,
) -> None:
    """Fill every weight by the family's rules (nanotron's RandomInit), and vocabulary padding with zeros.

    `shard_of` returns the block of a parameter that this rank holds; None means that parameters are complete.
    `factor_of` returns the factor on the standard deviation of a parameter, from its name.
    """
    from kenotron.kernels.tensor_shard import TensorShard
    from kenotron.models.initialization import fill

    rules = model.init_rules(std, scaling)
    for name, parameter in named_parameters(model):
        shard = (shard_of or TensorShard.full)(parameter)
        fill(name, shard, times(rule_for(name, rules), factor_of(name)), seed)
    zero_vocabulary_padding(model, shard_of)


def zero_vocabulary_padding(model: Decoder, shard_of: Callable[[Tensor], TensorShard] | None = None) -> None:
    """Zero the rows that pad the vocabulary: no checkpoint contains them, and zeros do not change gradient norms."""
    from kenotron.kernels.tensor_shard import TensorShard

    for name, parameter in named_parameters(model):
        if name in model.vocab_parameters:
            shard = (shard_of or TensorShard.full)(parameter)
            shard.tensor.detach()[len(shard.up_to(model.config.vocab_size).tensor) :].zero_()


def flops_per_token(model: nn.Module, sequence_length: int, causal: bool) -> float:
    """Return the FLOPs of one token's forward pass, the sum over all modules that have a `flops_per_token`.

    By convention only matrix products count. `causal` False counts the whole attention matrix (nanotron, PaLM appendix
    B), True only the half that a causal mask keeps. Training costs three times as much: backward needs two products for
    each forward one.
    """
    counted = [module for module in model.modules() if hasattr(module, "flops_per_token")]
    return sum(module.flops_per_token(sequence_length, causal) for module in counted)  # type: ignore[operator]
