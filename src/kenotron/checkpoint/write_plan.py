"""Plan which rank writes which blocks of the tensors to which file; planned again when the ranks' blocks change.

    rank 0 holds  a[0:4]  norm        model/rank0.safetensors   header │ a[0:4] │ norm
    rank 1 holds  a[4:8]  norm        model/rank1.safetensors   header │ a[4:8]
                                      model/index.json          written by rank 0: file and offset of every block

Rank 0 plans. Each rank sends the blocks that it holds, receives the blocks that it writes, and sends their offsets for
the index. A block that several ranks hold is written once, by the rank among them with the fewest bytes so far.

The format of safetensors is: 8 bytes with the little-endian length of the header; the header, JSON padded with spaces
to a multiple of 8 bytes; the tensors' bytes without gaps. The widest types come first, so every tensor is aligned.
"""

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from kenotron.checkpoint.index import INDEX, Chunk, Entry, Index, render_index
from kenotron.checkpoint.tensors import dtype_name
from kenotron.config.errors import CheckpointError
from kenotron.kernels.tensor_shard import TensorShard
from kenotron.parallel.ranks import gather, gather_on_rank0, raise_on_any_rank, rank_and_size, scatter_from_rank0

ALIGNMENT = 8

Parts = dict[str, dict[str, TensorShard]]
"""Folder ("model", "optimizer", "hooks") → name → this rank's shard of the tensor."""


class Block(NamedTuple):
    """A block of a tensor, with everything that a plan depends on."""

    folder: str
    name: str
    dtype: torch.dtype
    tensor_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The size of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FilePlan:
    """One file: its name in the checkpoint, its header, and the blocks that follow."""

    name: str
    header: bytes
    blocks: Sequence[Block]

    @property
    def bytes(self) -> int:
        """The size of its blocks."""
        return sum(block.bytes for block in self.blocks)


@dataclass(frozen=True)
class WritePlan:
    """This rank's files. `indexes`: on rank 0, the content of each ``index.json`` by its name in the checkpoint."""

    files: Sequence[FilePlan] = ()
    indexes: dict[str, bytes] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The size of the blocks in all files."""
        return sum(file.bytes for file in self.files)


class Planner:
    """Plans saves; a plan is reused as long as every rank holds the same blocks."""

    def __init__(self) -> None:
        self.made_for: tuple[list[str], list[Block]] | None = None
        self.latest = WritePlan()

    def plan(self, parts: Parts) -> WritePlan:
        """Return the plan to save `parts`, which are each rank's own; all ranks call it.

        Raises:
            CheckpointError: a dtype cannot be saved, or the blocks of a tensor do not add up to it.
        """
        request = list(parts), held_blocks(parts)
        if any(gather(request != self.made_for)):
            self.latest, self.made_for = make_plan(*request), request
        return self.latest


def held_blocks(parts: Parts) -> list[Block]:
    """Return the blocks of `parts` by folder, in file order; empty blocks are left out, unless the tensor is empty."""
    return [block for folder, tensors in parts.items() for block in sorted(_blocks(folder, tensors), key=_in_file)]


def _blocks(folder: str, tensors: dict[str, TensorShard]) -> Iterator[Block]:
    for name, shard in tensors.items():
        block = shard.tensor
        if block.numel() or 0 in shard.shape:
            yield Block(folder, name, block.dtype, tuple(shard.shape), tuple(shard.offset), tuple(block.shape))


def _in_file(block: Block) -> tuple[int, str, tuple[int, ...]]:
    return -block.dtype.itemsize, block.name, block.offset


def make_plan(folders: Sequence[str], blocks: list[Block]) -> WritePlan:
    """Return the plan of what this rank, which holds `blocks`, writes into `folders`; all ranks call it."""
    held = gather_on_rank0(blocks)
    shares = raise_on_any_rank(lambda: share_out(held))
    share = scatter_from_rank0(shares)
    rank, _ = rank_and_size()
    files: list[FilePlan] = []
    begins: list[int] = []
    for folder in folders:
        if blocks := [block for block in share if block.folder == folder]:
            header, places = _header(blocks)
            files.append(FilePlan(f"{folder}/{_file(rank)}", header, blocks))
            begins += places
    indexes = _indexes(folders, shares, gather_on_rank0(begins))
    return WritePlan(files, indexes if rank == 0 else {})


def share_out(held: Sequence[Sequence[Block]]) -> list[list[Block]]:
    """Return for each rank the blocks that it writes, a subset of those that it holds; every block is written once.

    Blocks that a single rank holds are assigned first, then the others, largest first.
    """
    holders: dict[Block, list[int]] = defaultdict(list)
    for rank, blocks in enumerate(held):
        for block in blocks:
            holders[block].append(rank)
    _check(holders)
    writer, load = {}, [0] * len(held)
    for block in sorted(holders, key=lambda block: (len(holders[block]) > 1, -block.bytes)):
        writer[block] = rank = min(holders[block], key=load.__getitem__)
        load[rank] += block.bytes
    return [[block for block in blocks if writer[block] == rank] for rank, blocks in enumerate(held)]


def _check(blocks: Collection[Block]) -> None:
    """Raise CheckpointError if a dtype cannot be saved, or if the blocks of a tensor do not add up to it."""
    missing: dict[tuple[str, str], int] = {}
    for dtype in {block.dtype for block in blocks}:
        dtype_name(dtype)
    for block in blocks:
        tensor = block.folder, block.name
        missing[tensor] = missing.get(tensor, math.prod(block.tensor_shape)) - math.prod(block.shape)
    for (folder, name), elements in missing.items():
        if elements:
            raise CheckpointError(f"{folder}: the blocks of {name!r} on all ranks do not add up to the tensor")


def _header(blocks: Sequence[Block]) -> tuple[bytes, list[int]]:
    """Return the header of a safetensors file with `blocks` in this order, and the offset of each block."""
    entries: dict[str, Any] = {}
    boxes: dict[str, Any] = {}
    ends = [0]
    for block in blocks:
        # A second block of one tensor in one file needs another key; Kénotron's readers use the index.
        key = block.name if block.name not in entries else f"{block.name}@{list(block.offset)}"
        begin, end = ends[-1], ends[-1] + block.bytes
        entries[key] = {"dtype": dtype_name(block.dtype), "shape": block.shape, "data_offsets": [begin, end]}
        boxes[key] = {"saved_offsets": block.offset}
        ends.append(end)
    notes = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(boxes)}
    text = json.dumps({"__metadata__": notes} | entries).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    start = ALIGNMENT + len(text)
    return len(text).to_bytes(ALIGNMENT, "little") + text, [start + end for end in ends[:-1]]


def _indexes(
    folders: Sequence[str], shares: Sequence[Sequence[Block]], begins: Sequence[Sequence[int]]
) -> dict[str, bytes]:
    """Return each folder's index.json; rank r writes the blocks `shares[r]` at the offsets `begins[r]`."""
    found: dict[tuple[str, str], list[tuple[Block, Chunk]]] = defaultdict(list)
    for rank, (blocks, places) in enumerate(zip(shares, begins, strict=True)):
        for block, begin in zip(blocks, places, strict=True):
            chunk = Chunk(_file(rank), block.offset, block.shape, begin)
            found[block.folder, block.name].append((block, chunk))
    indexes: dict[str, Index] = {folder: {} for folder in folders}
    for (folder, name), pairs in sorted(found.items()):
        block, _ = pairs[0]
        chunks = tuple(chunk for _, chunk in pairs)
        indexes[folder][name] = Entry(dtype_name(block.dtype), block.tensor_shape, chunks)
    return {f"{folder}/{INDEX}": render_index(index) for folder, index in indexes.items()}


def _file(rank: int) -> str:
    return f"rank{rank}.safetensors"
