"""Tensors to disk: the files that `tensors.py` reads, one safetensors file a rank.

Format of safetensors: 8 bytes, little-endian length of the header; the header, JSON, padded with spaces to 8
bytes; the tensors' bytes without gaps. The widest types come first, so every tensor is aligned.

Engines that save in the background list what a `Writer` would write, and write it themselves (`engines/plan.py`).
"""

from __future__ import annotations

import io
import json
import math
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from kenotron.checkpoint.durable import FileRecord, hashed_file, write_file
from kenotron.checkpoint.file_writer import OpenFile
from kenotron.checkpoint.index import DTYPES, INDEX, Chunk, Entry, Index
from kenotron.checkpoint.manifest import plain
from kenotron.checkpoint.tensors import shards
from kenotron.config.errors import CheckpointError
from kenotron.kernels.tensor_shard import TensorShard
from kenotron.parallel.ranks import describe, gather_at, rank_and_size

ALIGNMENT = 8


def write_tensors(folder: Path, tensors: dict[str, Any], open_file: OpenFile = hashed_file) -> dict[str, FileRecord]:
    """Write `tensors` (shards, tensors or DTensors, any device, and plain values) below the existing `folder`.

    Every rank calls it; each writes its share. Host memory above the tensors' own is one tensor at most (a
    copy from the device, or of one that is not contiguous).

    Returns the records of all files in this rank's `folder`, by name, on every rank.
    """
    writer = Writer(folder, open_file)
    write_through_dcp(writer, shards(tensors))
    return {name: record for files in gather_at(str(folder), writer.files) for name, record in files.items()}


def write_through_dcp(writer: Writer, pieces: dict[str, Any]) -> None:
    """Have DCP plan which rank writes which of `pieces` (of `shards`) and call `writer` so. All ranks call it.

    DCP's own exception, which is no `Exception`, is replaced by what was raised inside.
    """
    alone = rank_and_size()[1] == 1
    try:
        with warnings.catch_warnings():
            # "torch.distributed is disabled, ... assuming the intent is to save in a single process": it is.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(pieces, storage_writer=writer, planner=_SavePlanner(), no_dist=alone)
    except CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items())
        if not isinstance(error, Exception) or alone:
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


def _write_item(name: str, value: Any) -> WriteItem | None:
    """The plan to write `value`; None for a block without elements, unless the tensor has none."""
    if not isinstance(value, TensorShard):
        return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
    if value.tensor.numel() == 0 and 0 not in value.shape:
        return None
    box = ChunkStorageMetadata(torch.Size(value.offset), value.tensor.shape)
    properties = TensorProperties.create_from_tensor(value.tensor)
    return WriteItem(
        MetadataIndex(name, box.offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(box, properties, torch.Size(value.shape)),
    )


class Writer(StorageWriter):
    """One rank's side of a save. `files`: the records of what this rank wrote."""

    def __init__(self, folder: Path, open_file: OpenFile = hashed_file) -> None:
        self.folder, self.open_file = folder, open_file
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
        with self.open_file(self.folder / name, len(header) + sum(map(_size, items))) as file:
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
