"""Read tensors from disk: one safetensors file per rank and one JSON index.

    model/
    ├── index.json             name → dtype, shape, and file and byte offset of each chunk
    ├── rank0.safetensors      the chunks that rank 0 wrote
    └── rank1.safetensors

A rank's shard of a tensor is a `TensorShard`: a block, the tensor's shape, and the block's offset in it.
`write_plan.py` decides which rank writes which chunk. When a run resumes on another layout, each rank copies the
overlap of its blocks with each chunk:

    saved by tp 2        [ rows 0-3 ][ rows 4-7 ]        loaded by dp_shard 3: rows 0-2, 3-5, 6-7;
    needed by rank 1 of 3         [ 3 ][ 4 5 ]           so rank 1 reads from both files

The files are plain safetensors that any tool opens, with the `DCP_SHARDING_INFO` that torch's own
`HuggingFaceStorageReader` understands; nothing on disk is a pickle.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kenotron.checkpoint.durable import refusal
from kenotron.checkpoint.index import DTYPES, Chunk, Entry, Index
from kenotron.config.errors import CheckpointError
from kenotron.kernels.tensor_shard import TensorShard
from kenotron.parallel.shards import shard_of

Tensors = Mapping[str, Tensor | TensorShard]
"""Name → tensor, DTensor, or this rank's `TensorShard`, on any device."""


def shards(tensors: Tensors) -> dict[str, TensorShard]:
    """Return this rank's shards of `tensors`, which share their memory."""
    return {name: shard_of(value.detach()) if isinstance(value, Tensor) else value for name, value in tensors.items()}


def fill_tensors(folder: Path, index: Index, tensors: Tensors) -> None:
    """Fill `tensors` in place from `folder`. Names and shapes must fit."""
    files = MappedFiles(folder)
    for name, shard in shards(tensors).items():
        copy_block(files, index[name], shard.offset, shard.tensor.detach())


def copy_block(files: MappedFiles, entry: Entry, offset: Sequence[int], block: Tensor) -> None:
    """Fill `block` with the elements of a tensor at `offset`, from the chunks that contain them."""
    for chunk in entry.chunks:
        if places := _overlap(chunk, offset, block.shape):
            here, there = places
            block[here].copy_(files.view(entry, chunk)[there])


Places = tuple[slice, ...]


def _overlap(chunk: Chunk, offset: Sequence[int], shape: Sequence[int]) -> tuple[Places, Places] | None:
    """Return the overlap of a block of `shape` at `offset` with `chunk`, as slices of the block and of the chunk."""
    spans = [
        (max(start, begin), min(start + size, begin + length))
        for start, size, begin, length in zip(offset, shape, chunk.offset, chunk.shape, strict=True)
    ]
    if any(first >= last for first, last in spans):
        return None
    here, there = (
        tuple(slice(first - origin, last - origin) for (first, last), origin in zip(spans, origins))
        for origins in (offset, chunk.offset)
    )
    return here, there


class MappedFiles:
    """The files of a folder as tensors over memory-mapped files; each is opened once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._maps: dict[str, mmap.mmap] = {}

    def view(self, entry: Entry, chunk: Chunk) -> Tensor:
        """Return the chunk's elements, of shape `chunk.shape`, in the mapped file."""
        dtype, count = torch_dtype(entry.dtype), math.prod(chunk.shape)
        if count == 0:
            return torch.empty(chunk.shape, dtype=dtype)
        if chunk.file not in self._maps:
            path = self.folder / chunk.file
            try:
                with open(path, "rb") as file:
                    # Private pages: torch requires writable memory, but the file stays unchanged.
                    self._maps[chunk.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise refusal("read", path, error) from error
            except ValueError as error:
                raise CheckpointError(f"{path} is damaged: it is empty") from error
        mapped = self._maps[chunk.file]
        if chunk.begin + count * dtype.itemsize > len(mapped):
            raise CheckpointError(f"{self.folder / chunk.file} is damaged: it was truncated to {len(mapped)} bytes")
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=chunk.begin).view(chunk.shape)


def dtype_name(dtype: torch.dtype) -> str:
    """Return safetensors' name of a dtype, such as F32. Raises CheckpointError if there is none."""
    name = str(dtype).removeprefix("torch.")
    names = {torch_name: short for short, (torch_name, _) in DTYPES.items()}
    if name not in names:
        raise CheckpointError(f"tensors of dtype {name} cannot be saved; known are {', '.join(names)}")
    return names[name]


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype with this safetensors name, such as F32."""
    return getattr(torch, DTYPES[name][0])
