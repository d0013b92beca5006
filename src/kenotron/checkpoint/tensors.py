"""Tensors from disk: one safetensors file a rank and one JSON index.

    model/
    ├── index.json             name → dtype, shape, and the place of each chunk (file, first byte)
    ├── rank0.safetensors      what rank 0 wrote
    └── rank1.safetensors

What a rank holds of a logical tensor is a `TensorShard`: its block, the tensor's shape, and the block's offset in it.
Which rank wrote which chunk was planned by `plan.py`. When a run comes back on another layout, each rank copies what
its blocks share with each chunk:

    saved by tp 2        [ rows 0-3 ][ rows 4-7 ]        loaded by dp_shard 3: rows 0-2, 3-5, 6-7;
    wanted by rank 1 of 3         [ 3 ][ 4 5 ]           the second one reads from both files

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
"""By name: tensors, DTensors, or what this rank holds of them; on any device."""


def shards(tensors: Tensors) -> dict[str, TensorShard]:
    """What this rank holds of `tensors`, sharing their memory."""
    return {name: shard_of(value.detach()) if isinstance(value, Tensor) else value for name, value in tensors.items()}


def fill_tensors(folder: Path, index: Index, tensors: Tensors) -> None:
    """Fill `tensors` in place from `folder`. Names and shapes must fit."""
    files = MappedFiles(folder)
    for name, shard in shards(tensors).items():
        copy_block(files, index[name], shard.offset, shard.tensor.detach())


def copy_block(files: MappedFiles, entry: Entry, offset: Sequence[int], block: Tensor) -> None:
    """Fill `block` with the elements of a tensor from `offset` on, from the chunks that have them."""
    for chunk in entry.chunks:
        if places := _overlap(chunk, offset, block.shape):
            here, there = places
            block[here].copy_(files.view(entry, chunk)[there])


Places = tuple[slice, ...]


def _overlap(chunk: Chunk, offset: Sequence[int], shape: Sequence[int]) -> tuple[Places, Places] | None:
    """What a block of `shape` at `offset` shares with `chunk`: its place in the block, and in the chunk."""
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
    """The files of a folder as tensors over mapped memory; each is opened once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._maps: dict[str, mmap.mmap] = {}

    def view(self, entry: Entry, chunk: Chunk) -> Tensor:
        """The chunk's elements, `chunk.shape`, where they lie on disk."""
        dtype, count = torch_dtype(entry.dtype), math.prod(chunk.shape)
        if count == 0:
            return torch.empty(chunk.shape, dtype=dtype)
        if chunk.file not in self._maps:
            path = self.folder / chunk.file
            try:
                with open(path, "rb") as file:
                    # Private pages: torch wants memory that could be written, the file stays as it is.
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
    """`torch.float32` → `F32`; an error for what safetensors has no name for."""
    wanted = str(dtype).removeprefix("torch.")
    names = {torch_name: name for name, (torch_name, _) in DTYPES.items()}
    if wanted not in names:
        raise CheckpointError(f"tensors of dtype {wanted} cannot be saved; known are {', '.join(names)}")
    return names[wanted]


def torch_dtype(name: str) -> torch.dtype:
    """`F32` → `torch.float32`."""
    return getattr(torch, DTYPES[name][0])
