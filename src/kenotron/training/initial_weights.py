"""The weights that a run begins with: random ones, or those of a checkpoint or a Hugging Face model."""

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

OPEN = "kenotron.interop.sources.initial_tensors"  # imported where there is something to open
COPIED = 1 << 18  # elements at a time: a copy of so many needs no memory to speak of


def fill_weights(
    parts: Sequence[Decoder],
    init: InitMethod,
    seed: int,
    factor_of: Callable[[str], float] = lambda name: 1.0,
) -> None:
    """Fill the weights of this rank's `parts` as `model.init_method` says.

    `factor_of` the name of a parameter multiplies the standard deviation of random ones.
    Raises InputError if the named checkpoint lacks a parameter, or has it in another shape.
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

    Raises InputError, which names the config's `key`, if it lacks a parameter, or has it in another shape.
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
            into = shard.tensor[part]
            offset = tuple(first + along.start for first, along in zip(shard.offset, part))
            into.copy_(source.block(name, offset, tuple(into.shape)))
