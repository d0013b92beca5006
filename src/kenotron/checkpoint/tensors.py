"""Tensors from disk: one safetensors file a rank and one JSON index, with planning and resharding left to DCP.

    model/
    ├── index.json             name → dtype, shape, and the place of each chunk (file, first byte)
    ├── rank0.safetensors      what rank 0 wrote
    └── rank1.safetensors

What a rank holds of a logical tensor is a `TensorShard`: its block, the tensor's shape, and the block's offset in it.
`torch.distributed.checkpoint` (DCP) sees nothing but these boxes. It decides which rank writes which chunk
(replicas once, the load spread) and, when a run comes back on another layout, which bytes of which chunk each
rank needs:

    saved by tp 2        [ rows 0-3 ][ rows 4-7 ]        loaded by dp_shard 3: rows 0-2, 3-5, 6-7;
    wanted by rank 1 of 3         [ 3 ][ 4 5 ]           the second one reads from both files

How bytes get to the disk and back is a `StorageWriter` (`tensor_writer.py`) and a `StorageReader`; these are ours, for
three reasons. The files are plain safetensors that any tool opens; nothing on disk is a pickle; and a tensor goes to
the disk straight from its own memory through one hash, where DCP's own writer makes a zip archive of each tensor.
Sharded files carry the `DCP_SHARDING_INFO` that torch's own `HuggingFaceStorageReader` understands.

What is not a tensor (an optimizer's `param_groups.model.norm.weight.lr`) is a value in the index.

This file imports DCP and is itself imported only by functions that need it.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from kenotron.checkpoint.durable import refusal
from kenotron.checkpoint.index import DTYPES, Chunk, Entry, Index
from kenotron.config.errors import CheckpointError
from kenotron.kernels.tensor_shard import TensorShard
from kenotron.parallel.ranks import describe, rank_and_size
from kenotron.parallel.shards import shard_of


def shards(tensors: dict[str, Any]) -> dict[str, Any]:
    """Every tensor and DTensor of `tensors` as the `TensorShard` that this rank holds; other values unchanged."""
    return {name: shard_of(value.detach()) if isinstance(value, Tensor) else value for name, value in tensors.items()}


def fill_tensors(folder: Path, index: Index, tensors: dict[str, Any]) -> None:
    """Fill `tensors` in place from `folder`; values in the dict are replaced. Names and shapes must fit."""
    reader = _Reader(folder, index)
    pieces = shards(tensors)
    through_dcp(
        lambda: dcp.load(pieces, storage_reader=reader, planner=_LoadPlanner(), no_dist=rank_and_size()[1] == 1)
    )
    tensors.update({name: value for name, value in pieces.items() if not isinstance(value, TensorShard)})


def files_read(index: Index, tensors: dict[str, Any]) -> set[str]:
    """The files from which `fill_tensors` reads."""
    boxes = {name: box_of(value) for name, value in shards(tensors).items() if isinstance(value, TensorShard)}
    return {
        chunk.file
        for name, box in boxes.items()
        for chunk in index.tensors[name].chunks
        if all(
            start < offset + size and offset < start + length
            for start, length, offset, size in zip(chunk.offset, chunk.shape, box.offsets, box.sizes, strict=True)
        )
    }


def through_dcp(call: Callable[[], None]) -> None:
    """Run a call of DCP; its own exception, which is no `Exception`, is replaced by what was raised inside."""
    try:
        with warnings.catch_warnings():
            # "torch.distributed is disabled, ... assuming the intent is to save in a single process": it is.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            call()
    except CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items())
        if not isinstance(error, Exception) or rank_and_size()[1] == 1:
            raise error from None
        raise CheckpointError(f"rank {rank}: {describe(error)}") from error


class _LoadPlanner(DefaultLoadPlanner):
    """DCP's planner over `TensorShard`s and values; the values come from JSON where it would unpickle."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        items = [_read_items(name, saved[name], value) for name, value in self.state_dict.items()]
        return LoadPlan([item for of_name in items for item in of_name])

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        loaded = json.loads(value.getvalue())
        self.state_dict[name] = tuple(loaded) if isinstance(self.state_dict[name], tuple) else loaded


def _read_items(name: str, saved: Any, value: Any) -> list[ReadItem]:
    """The plan to read `value`: one item for each saved chunk that its box meets."""
    if isinstance(value, TensorShard):
        return create_read_items_for_chunk_list(name, saved, [box_of(value)])
    where, nothing = MetadataIndex(name), torch.Size((0,))
    return [ReadItem(LoadItemType.BYTE_IO, where, nothing, where, nothing, nothing)]


def box_of(shard: TensorShard) -> ChunkStorageMetadata:
    """The block of a shard in DCP's words."""
    return ChunkStorageMetadata(torch.Size(shard.offset), shard.tensor.shape)


class _Reader(StorageReader):
    """One rank's side of a load, from an index that was read and checked before."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self.index = index
        self.chunks = {
            (name, chunk.offset): (entry, chunk) for name, entry in index.tensors.items() for chunk in entry.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        described: dict[str, Any] = {name: BytesStorageMetadata() for name in self.index.values}
        for name, entry in self.index.tensors.items():
            boxes = [ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.shape)) for c in entry.chunks]
            described[name] = TensorStorageMetadata(
                TensorProperties(dtype=torch_dtype(entry.dtype)), torch.Size(entry.shape), boxes
            )
        return Metadata(described)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        mapped = MappedFiles(self.folder)
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(json.dumps(self.index.values[name]).encode()))
                continue
            entry, chunk = self.chunks[name, tuple(item.storage_index.offset or ())]
            source = mapped.view(entry, chunk)
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


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


def torch_dtype(name: str) -> torch.dtype:
    """`F32` → `torch.float32`."""
    return getattr(torch, DTYPES[name][0])
