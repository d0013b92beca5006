"""Read the tensors of a Hugging Face model's folder lazily.

weights = hf_weights(Path("exported"))
weights["model.norm.weight"]                      # only these bytes are read
weights.block("lm_head.weight", (4, 0), (2, 64))  # rows 4 and 5
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from kenotron.checkpoint.hf_files import ADAPTER, INDEX, SINGLE, shard_names
from kenotron.config.errors import InputError, nearest

Box = tuple[slice, ...]  # start and stop in each dimension; () is the whole tensor


class Stored(NamedTuple):
    """A tensor on disk: its shape, and a function that reads a box of it."""

    shape: tuple[int, ...]
    read: Callable[[Box], Tensor]


class Weights(Mapping[str, Tensor]):
    """A mapping of names to tensors; each access reads the tensor again, so none is kept in memory."""

    def __init__(self, stored: Mapping[str, Stored], where: str) -> None:
        self._stored, self.where = dict(stored), where

    def stored(self, name: str) -> Stored:
        """Return shape and reader of tensor `name`. Raises InputError, with the nearest name, if there is none."""
        if name not in self._stored:
            raise InputError(f"{self.where} has no tensor {name!r}{nearest(name, self._stored)}")
        return self._stored[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`."""
        return self.stored(name).shape

    def block(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Return the block of tensor `name` at `offset` with shape `shape`; only this block is read."""
        return self.stored(name).read(tuple(slice(start, start + size) for start, size in zip(offset, shape)))

    def __getitem__(self, name: str) -> Tensor:
        return self.stored(name).read(())

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def hf_weights(folder: Path) -> Weights:
    """Return the tensors of a folder that has one safetensors file, or several and an index."""
    from safetensors import SafetensorError, safe_open

    if (folder / ADAPTER).is_file():  # transformers loads it on top
        raise InputError(f"{folder} has an adapter ({ADAPTER}): merge it into the weights, or remove it")
    names = shard_names(folder / INDEX) if (folder / INDEX).is_file() else [SINGLE]
    if SINGLE not in names and (folder / SINGLE).is_file():  # programs differ in which of the two they load
        raise InputError(f"{folder} has both {SINGLE} and {INDEX}, which names other files; remove the one that is old")
    stored: dict[str, Stored] = {}
    for name in names:
        file = folder / name
        if not file.is_file():
            raise InputError(_missing(folder, name))
        try:
            opened = safe_open(str(file), framework="pt")
            keys = list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file} is damaged or not a safetensors file: {error}") from None
        stored |= {key: _stored(opened, key) for key in keys if not key.endswith("rotary_emb.inv_freq")}
    return Weights(stored, str(folder))


def _stored(opened: Any, key: str) -> Stored:
    tensor = opened.get_slice(key)
    return Stored(tuple(tensor.get_shape()), lambda box: tensor[box] if box else opened.get_tensor(key))


def _missing(folder: Path, name: str) -> str:
    if name == SINGLE and list(folder.glob("pytorch_model*.bin")):
        return f"{folder} has its weights as pickles (pytorch_model.bin), and only safetensors are read"
    return f"{folder} has no {name}" + (f", which its {INDEX} names" if name != SINGLE else "")
