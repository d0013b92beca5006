"""Initial weights of a run: random, or read from a checkpoint or a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from kenotron.config.dotted import import_dotted
from kenotron.config.errors import InputError
from kenotron.config.model import ExistingCheckpointInit
from kenotron.kernels.tensor_shard import TensorShard
from kenotron.models import initialize_model
from kenotron.models.decoder import Decoder
from kenotron.parallel.ranks import raise_on_any_rank, run_on_rank0
from kenotron.parallel.shards import shard_of
from kenotron.training.console import logger
from kenotron.training.saved_state import model_tensors

if TYPE_CHECKING:
    from kenotron.config.model import InitMethod
    from kenotron.interop.hf_weights import Weights

OPEN = "kenotron.interop.sources.initial_tensors"  # imported only if there are weights to read
COPIED = 1 << 18  # elements that are copied at once, a negligible amount of memory


def fill_weights(
    parts: Sequence[Decoder], init: InitMethod, seed: int, factor_of: Callable[[str], float] = lambda name: 1.0
) -> None:
    """Fill the weights of this rank's `parts` by `init`, the config's `model.init_method`.

    `factor_of` maps a parameter's name to a factor of the standard deviation of its random weights.
    Raises InputError if the checkpoint of `init` lacks a parameter, or has it in another shape.
    """
    if isinstance(init, ExistingCheckpointInit):
        logger.info("Weights from %s", init.path)
        load_initial_weights(parts, init.path, "model.init_method.path")
        return
    logger.info("Weights drawn with std %g (%s), seed %d", init.std, init.scaling_method, seed)
    for part in parts:
        initialize_model(part, init.std, init.scaling_method, seed, shard_of, factor_of)


@torch.no_grad()
def load_initial_weights(parts: Sequence[Decoder], path: str, key: str) -> None:
    """Copy the weights of the checkpoint or Hugging Face model at `path`; every rank reads its own blocks.

    Raises InputError, which names the config's `key`, if a parameter is missing or has another shape.
    """
    config, initial_tensors = parts[0].config, import_dotted(OPEN, key)
    run_on_rank0(lambda: len(initial_tensors(path, config, logger.warning)))  # downloaded and verified once
    raise_on_any_rank(
        lambda: _copy_from(initial_tensors(path, config, verify=False), model_tensors(*parts), f"{key}: {path}")
    )


def _copy_from(source: Weights, targets: dict[str, TensorShard], path: str) -> None:
    missing = sorted(set(targets) - set(source))
    if missing:
        raise InputError(f"{path} lacks {missing[0]!r} ({len(missing)} missing in all)")
    for name, shard in targets.items():
        if source.shape(name) != shard.shape:
            raise InputError(
                f"{path}: {name} is {list(source.shape(name))} there, but the config says {list(shard.shape)}"
            )
        for part in shard.parts(COPIED):
            target = shard.tensor[part]
            offset = tuple(first + along.start for first, along in zip(shard.offset, part))
            target.copy_(source.block(name, offset, tuple(target.shape)))
