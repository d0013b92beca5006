"""Tensors on disk: one safetensors file a rank and one JSON index, with planning and resharding left to DCP.

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

How bytes get to the disk is a `StorageWriter` and a `StorageReader`; these are ours, for three reasons. The files
are plain safetensors that any tool opens; nothing on disk is a pickle; and a tensor goes to the disk straight from
its own memory through one hash, where DCP's own writer makes a zip archive of each tensor. Sharded files carry
the `DCP_SHARDING_INFO` that torch's own `HuggingFaceStorageReader` understands.

What is not a tensor (an optimizer's `param_groups.model.norm.weight.lr`) is a value in the index.

Format of safetensors: 8 bytes, little-endian length of the header; the header, JSON, padded with spaces to 8
bytes; the tensors' bytes without gaps. The widest types come first, so every tensor is aligned.

This file imports DCP and is itself imported only by functions that need it.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from kenotron.checkpoint.durable import FileRecord, HashedFile, refusal, write_file
from kenotron.checkpoint.index import DTYPES, INDEX, Chunk, Entry, Index
from kenotron.checkpoint.manifest import plain
from kenotron.config.errors import CheckpointError
from kenotron.kernels.tensor_shard import TensorShard
from kenotron.parallel.ranks import describe, gather, rank_and_size
from kenotron.parallel.shards import shard_of

ALIGNMENT = 8


def shards(tensors: dict[str, Any]) -> dict[str, Any]:
    """Every tensor and DTensor of `tensors` as the `TensorShard` that this rank holds; other values unchanged."""
    return {name: shard_of(value.detach()) if isinstance(value, Tensor) else value for name, value in tensors.items()}


def write_tensors(folder: Path, tensors: dict[str, Any]) -> dict[str, FileRecord]:
    """Write `tensors` (shards, tensors or DTensors, any device, and plain values) below the existing `folder`.

    Every rank calls it; each writes its share. Host memory above the tensors' own is one tensor at most (a
    copy from the device, or of one that is not contiguous).

    Returns the records of all ranks' files by name in the folder, on every rank.
    """
    writer = Writer(folder)
    write_through_dcp(writer, shards(tensors))
    return {name: record for files in gather(writer.files) for name, record in files.items()}


def write_through_dcp(writer: Writer, pieces: dict[str, Any]) -> None:
    """Have DCP plan which rank writes which of `pieces` (of `shards`) and call `writer` so. All ranks call it."""
    _through_dcp(
        lambda: dcp.save(pieces, storage_writer=writer, planner=_SavePlanner(), no_dist=rank_and_size()[1] == 1)
    )


def fill_tensors(folder: Path, index: Index, tensors: dict[str, Any]) -> None:
    """Fill `tensors` in place from `folder`; values in the dict are replaced. Names and shapes must fit."""
    reader = _Reader(folder, index)
    pieces = shards(tensors)
    _through_dcp(
        lambda: dcp.load(pieces, storage_reader=reader, planner=_LoadPlanner(), no_dist=rank_and_size()[1] == 1)
    )
    tensors.update({name: value for name, value in pieces.items() if not isinstance(value, TensorShard)})


def _through_dcp(call: Callable[[], None]) -> None:
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


class _SavePlanner(DefaultSavePlanner):
    """DCP's planner over `TensorShard`s and values; the values become JSON where it would pickle.

    Its global plan keeps one of the equal boxes of all ranks, on the rank that has least to write so far.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(name, value) for name, value in self.state_dict.items()]
        self.plan = SavePlan([item for item in items if item is not None])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        value = self.state_dict[write_item.index.fqn]
        if isinstance(value, TensorShard):
            return value.tensor if value.read is None else value.read()
        return io.BytesIO(json.dumps(plain(value, write_item.index.fqn)).encode())


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


def _write_item(name: str, value: Any) -> WriteItem | None:
    """The plan to write `value`; None for a block without elements, unless the tensor has none."""
    if not isinstance(value, TensorShard):
        return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
    if value.tensor.numel() == 0 and 0 not in value.shape:
        return None
    box = _box_of(value)
    properties = TensorProperties.create_from_tensor(value.tensor)
    return WriteItem(
        MetadataIndex(name, box.offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(box, properties, torch.Size(value.shape)),
    )


def _read_items(name: str, saved: Any, value: Any) -> list[ReadItem]:
    """The plan to read `value`: one item for each saved chunk that its box meets."""
    if isinstance(value, TensorShard):
        return create_read_items_for_chunk_list(name, saved, [_box_of(value)])
    where, nothing = MetadataIndex(name), torch.Size((0,))
    return [ReadItem(LoadItemType.BYTE_IO, where, nothing, where, nothing, nothing)]


def _box_of(shard: TensorShard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(shard.offset), shard.tensor.shape)


class Writer(StorageWriter):
    """One rank's side of a save. `files`: the records of what this rank wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, FileRecord] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        results = self._write_file(tensors, planner) if tensors else []
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                text = planner.resolve_data(item).getvalue()  # type: ignore[union-attr]
                results.append(WriteResult(item.index, len(text), json.loads(text)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_file(self, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        name = f"rank{rank_and_size()[0]}.safetensors"
        items = sorted(items, key=lambda item: (-_width(item), item.index.fqn, tuple(item.index.offset or ())))
        header, begins = _header(items)
        self.write_file(name, header, items, planner)
        results = []
        for item, begin in zip(items, begins, strict=True):
            box = _box(item)
            chunk = Chunk(name, tuple(box.offsets), tuple(box.sizes), begin)
            results.append(WriteResult(item.index, _size(item), chunk))
        return results

    def write_file(self, name: str, header: bytes, items: list[WriteItem], planner: SavePlanner) -> None:
        """Write this rank's file: the header, then the tensors of `items` without gaps."""
        with HashedFile(self.folder / name) as file:
            file.write(header)
            for item in items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                file.write(_bytes_of(tensor))
        self.files[name] = file.record

    def write_index(self, index: Index) -> None:
        """Write the index of all ranks' files; rank 0's writer alone."""
        self.files[INDEX] = write_file(self.folder / INDEX, index.render())

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        index = Index()
        chunks: dict[str, list[Chunk]] = {}
        for result in (result for of_rank in results for result in of_rank):
            if isinstance(metadata.state_dict_metadata[result.index.fqn], BytesStorageMetadata):
                index.values[result.index.fqn] = result.storage_data
            else:
                chunks.setdefault(result.index.fqn, []).append(result.storage_data)
        for name, parts in sorted(chunks.items()):
            stored = metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            index.tensors[name] = Entry(dtype_name(stored.properties.dtype), tuple(stored.size), tuple(parts))
        self.write_index(index)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


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

    def block(self, entry: Entry, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The elements of a tensor from `offset` on, `shape` of them, put together from the chunks that have them."""
        block = torch.empty(tuple(shape), dtype=torch_dtype(entry.dtype))
        for chunk in entry.chunks:
            spans = [
                (max(start, begin), min(start + size, begin + length))
                for start, size, begin, length in zip(offset, shape, chunk.offset, chunk.shape, strict=True)
            ]
            if all(first < last for first, last in spans):
                here, there = (
                    tuple(slice(first - origin, last - origin) for (first, last), origin in zip(spans, origins))
                    for origins in (offset, chunk.offset)
                )
                block[here].copy_(self.view(entry, chunk)[there])
        return block

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
            raise CheckpointError(f"{self.folder / chunk.file} is damaged: it was cut to {len(mapped)} bytes")
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=chunk.begin).view(chunk.shape)


def torch_dtype(name: str) -> torch.dtype:
    """`F32` → `torch.float32`."""
    return getattr(torch, DTYPES[name][0])


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` → `F32`; an error for what safetensors has no name for."""
    wanted = str(dtype).removeprefix("torch.")
    for name, (torch_name, _) in DTYPES.items():
        if torch_name == wanted:
            return name
    raise CheckpointError(
        f"tensors of dtype {wanted} cannot be saved; known are {', '.join(t for t, _ in DTYPES.values())}"
    )


def _box(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _width(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype.itemsize


def _size(item: WriteItem) -> int:
    return math.prod(_box(item).sizes) * _width(item)


def _header(items: Iterable[WriteItem]) -> tuple[bytes, list[int]]:
    """The head of a safetensors file that holds `items` in this order, and the byte where each one begins."""
    entries: dict[str, Any] = {}
    boxes: dict[str, Any] = {}
    ends = [0]
    for item in items:
        assert item.tensor_data is not None
        offset = list(_box(item).offsets)
        # A second chunk of one tensor in one file needs another key; our readers use the index.
        key = item.index.fqn if item.index.fqn not in entries else f"{item.index.fqn}@{offset}"
        begin, end = ends[-1], ends[-1] + _size(item)
        dtype = dtype_name(item.tensor_data.properties.dtype)
        entries[key] = {"dtype": dtype, "shape": list(_box(item).sizes), "data_offsets": [begin, end]}
        boxes[key] = {"saved_offsets": offset}
        ends.append(end)
    notes = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(boxes)}
    text = json.dumps({"__metadata__": notes} | entries).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    start = ALIGNMENT + len(text)
    return len(text).to_bytes(ALIGNMENT, "little") + text, [start + end for end in ends[:-1]]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's elements, row by row, as bytes: its own memory if it is contiguous and on the host."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data
