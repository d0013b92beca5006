"""The index of a folder of tensors: names, shapes and byte offsets, as JSON and without torch.

    {"format": "kenotron-tensors", "version": 1,
     "tensors": {"model.norm.weight": {"dtype": "F32", "shape": [64], "chunks": [
         {"file": "rank0.safetensors", "offset": [0], "shape": [32], "begin": 4096},
         {"file": "rank1.safetensors", "offset": [32], "shape": [32], "begin": 2048}]}}}

A chunk is a box of its tensor: the offset of its first element, its shape, and the byte offset in its file, where its
elements follow in row-major order. Dtypes have their safetensors names.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from kenotron.checkpoint.durable import FileRecord, refusing
from kenotron.config.errors import CheckpointError

INDEX = "index.json"
FORMAT = "kenotron-tensors"
VERSION = 1

# safetensors name → (name in torch, bytes of one element)
DTYPES = {
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "F32": ("float32", 4),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the file and offset of its bytes."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class Entry:
    """One logical tensor. `dtype` is a key of `DTYPES`."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        """The size of all elements."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


Index: TypeAlias = dict[str, Entry]
"""The tensors in one folder, by name."""


def render_index(index: Index) -> bytes:
    """Return the content of `index.json`."""
    tensors = {
        name: {"dtype": entry.dtype, "shape": entry.shape, "chunks": [vars(chunk) for chunk in entry.chunks]}
        for name, entry in index.items()
    }
    return json.dumps({"format": FORMAT, "version": VERSION, "tensors": tensors}).encode()


def read_index(folder: Path, files: dict[str, FileRecord]) -> Index:
    """Read `<folder>/index.json`; `files` are the manifest's, so that nothing beyond them is ever opened.

    Raises:
        CheckpointError: it is missing, not an index, or points outside of the folder's files.
    """
    path = folder / INDEX
    try:
        with refusing("read", path):
            content = json.loads(path.read_bytes())
        if content["format"] != FORMAT or content["version"] > VERSION:
            raise ValueError(f"format {content['format']!r}, version {content['version']!r}")
        tensors = {name: _entry(entry) for name, entry in content["tensors"].items()}
        prefix = f"{folder.name}/"
        sizes = {name.removeprefix(prefix): file.bytes for name, file in files.items() if name.startswith(prefix)}
        for name, entry in tensors.items():
            _check(name, entry, sizes)
        return tensors
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a valid index of tensors: {error}") from error


def _entry(content: dict[str, Any]) -> Entry:
    chunks = tuple(
        Chunk(str(chunk["file"]), tuple(chunk["offset"]), tuple(chunk["shape"]), int(chunk["begin"]))
        for chunk in content["chunks"]
    )
    return Entry(content["dtype"], tuple(content["shape"]), chunks)


def _check(name: str, entry: Entry, sizes: dict[str, int]) -> None:
    if entry.dtype not in DTYPES:
        raise ValueError(f"{name!r} has the unknown dtype {entry.dtype!r}")
    width = DTYPES[entry.dtype][1]
    for chunk in entry.chunks:
        if not len(chunk.offset) == len(chunk.shape) == len(entry.shape):
            raise ValueError(f"{name!r} has a chunk with a different number of dimensions")
        for start, length, size in zip(chunk.offset, chunk.shape, entry.shape, strict=True):
            if not 0 <= start <= start + length <= size:
                raise ValueError(f"{name!r} has a chunk beyond its shape")
        if chunk.file not in sizes:
            raise ValueError(f"{name!r} is in {chunk.file!r}, which the manifest does not list")
        end = chunk.begin + math.prod(chunk.shape) * width
        if chunk.begin < 0 or chunk.begin % width or end > sizes[chunk.file]:
            raise ValueError(f"{name!r} reaches beyond the end of {chunk.file!r}")
    if sum(math.prod(chunk.shape) for chunk in entry.chunks) != math.prod(entry.shape):
        raise ValueError(f"the chunks of {name!r} do not add up to its shape")
