"""The weights that a run begins with: random ones, or those of a checkpoint or a Hugging Face model.

The reader of Hugging Face weights is an argument: `kenotron.launch.training` passes `kenotron.interop.initial_tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

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
    from kenotron.config.decoder import DecoderArchitecture
    from kenotron.config.model import InitMethod

COPY_BYTES = 1 << 20  # read at a time


class WeightReader(Protocol):
    """Tensors on disk, by parameter name."""

    def __iter__(self) -> Iterator[str]:
        """Their names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor `name`."""
        ...

    def block(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The elements of tensor `name` from `offset` on, `shape` of them."""
        ...


class OpenWeights(Protocol):
    """Opens what `model.init_method.path` names, as weights of a model of `architecture`."""

    def __call__(self, path: str, architecture: DecoderArchitecture, *, verify: bool = True) -> WeightReader:
        """`verify`: compare checksums first. Raises InputError if there is nothing, or not such a model."""
        ...


def fill_weights(
    parts: Sequence[Decoder],
    init: InitMethod,
    seed: int,
    open_weights: OpenWeights | None = None,
    factor_of: Callable[[str], float] = lambda name: 1.0,
) -> None:
    """Fill the weights of this rank's `parts` as `model.init_method` says; `open_weights` opens the path that it names.

    `factor_of` the name of a parameter multiplies the standard deviation of random ones.
    Raises InputError if the named checkpoint lacks a parameter, or has it in another shape.
    """
    if isinstance(init, ExistingCheckpointInit):
        logger.info("Weights from %s", init.path)
        if open_weights is None:
            raise InputError("model.init_method.path: training.train needs open_weights for it; kenotron.train has it")
        load_initial_weights(parts, init.path, open_weights, "model.init_method.path")
        return
    logger.info("Weights drawn with std %g (%s), seed %d", init.std, init.scaling_method, seed)
    for part in parts:
        initialize_model(part, init.std, init.scaling_method, seed, shard_of, factor_of)


@torch.no_grad()
def load_initial_weights(parts: Sequence[Decoder], path: str, open_weights: OpenWeights, key: str) -> None:
    """Copy the weights of the checkpoint or Hugging Face model at `path`; every rank reads its own blocks.

    Raises InputError, which names the config's `key`, if it lacks a parameter, or has it in another shape.
    """
    config = parts[0].config
    run_on_rank0(lambda: len(list(open_weights(path, config))))  # downloaded and verified once
    raise_on_any_rank(
        lambda: _copy_from(open_weights(path, config, verify=False), model_tensors(*parts), f"{key}: {path}")
    )


def _copy_from(source: WeightReader, targets: dict[str, TensorShard], path: str) -> None:
    missing = sorted(set(targets) - set(source))
    if missing:
        raise InputError(f"{path} lacks {missing[0]!r} ({len(missing)} missing in all)")
    for name, shard in targets.items():
        if source.shape(name) != shard.shape:
            raise InputError(
                f"{path}: {name} is {list(source.shape(name))} there, but the config says {list(shard.shape)}"
            )
        if not shard.shape:
            shard.tensor.copy_(source.block(name, (), ()))
        for row, rows in _in_rows(shard.tensor) if shard.shape else ():
            rows.copy_(source.block(name, (shard.offset[0] + row, *shard.offset[1:]), tuple(rows.shape)))


def _in_rows(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first row, some rows) in order, few enough at a time that a copy of them needs no memory to speak of."""
    at_once = max(1, COPY_BYTES // max(1, tensor[:1].nbytes))
    for first in range(0, tensor.shape[0], at_once):
        yield first, tensor[first : first + at_once]
