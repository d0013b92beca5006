"""litdata's chunks of tokens, Gapetron's for example: a folder with an index.json and chunk files.

    index.json       {"config": {"data_format": ["no_header_tensor:17"], "compression": null, …},
                      "chunks": [{"filename": "chunk-0-0.bin", "chunk_size": 3, "dim": 45, …}, …]}
    chunk-0-0.bin    items N (u32) · N + 1 byte offsets in this file (u32) · the items' ids, raw

An item is a document; `dim` counts the tokens of a chunk. Each chunk is a file of its own, in the index's order.
litdata's `StreamingDataset` reads what is written here with `item_loader=TokensLoader(block_size)`.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kenotron.config.errors import InputError
from kenotron.data.formats.token_file import PartialFile, TokenFile, TokenWriter, map_array, readable
from kenotron.storage.paths import AnyPath

INDEX = "index.json"
# The numbers of litdata's own tables: torch's dtypes for tensors, numpy's scalar types for arrays.
TENSORS = {11: "u1", 12: "i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8", 20: "<u2"}
ARRAYS = dict(enumerate(["i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8"]))
WRITTEN = {"<u2": 20, "<i4": 16, "<i8": 18}
DTYPES = {"no_header_tensor": TENSORS, "no_header_numpy": ARRAYS}


def open_file(path: AnyPath, where: str, dtype: np.dtype | None = None) -> list[TokenFile]:
    """The chunks of one folder; `path` is its index.json.

    Raises InputError: compressed or encrypted chunks, chunks of other things than tokens, a chunk whose header
    contradicts the index or its size.
    """
    config, chunks = _index(path)
    for key in ("compression", "encryption"):
        if config.get(key):
            raise InputError(f"{path}: {key} ({json.dumps(config[key])[:80]}) is not read; write the chunks without it")
    of_ids = _dtype(path, config)
    if dtype is not None and dtype != of_ids:
        raise InputError(f"{where}: {dtype.name} asked for, but {path} says {of_ids.name}")
    return [_chunk(path, number, chunk, of_ids) for number, chunk in enumerate(chunks)]


def _index(path: AnyPath) -> tuple[dict[str, Any], list[Any]]:
    with readable(path):
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: not valid JSON ({error})") from None
    config = index.get("config") if isinstance(index, dict) else None
    chunks = index.get("chunks") if isinstance(index, dict) else None
    if not isinstance(config, dict) or not isinstance(chunks, list) or not chunks:
        raise InputError(f"{path}: not a litdata index: expected an object with 'config' and 'chunks'")
    return config, chunks


def _dtype(path: AnyPath, config: dict[str, Any]) -> np.dtype:
    data_format = config.get("data_format")
    if isinstance(data_format, list) and len(data_format) == 1:
        kind, _, number = str(data_format[0]).partition(":")
        if number.isascii() and number.isdigit() and int(number[:4]) in DTYPES.get(kind, {}):
            return np.dtype(DTYPES[kind][int(number[:4])])
    raise InputError(
        f"{path}: expected one field of integers in config.data_format (no_header_tensor:17 is int64), "
        f"found {json.dumps(data_format)[:80]}"
    )


def _chunk(index: AnyPath, number: int, chunk: Any, dtype: np.dtype) -> TokenFile:
    name = chunk.get("filename") if isinstance(chunk, dict) else None
    if not isinstance(name, str) or not name.isprintable() or not name or Path(name).name != name:
        raise InputError(
            f"{index}: chunks[{number}]: expected a file name of this folder, found {json.dumps(name)[:80]}"
        )
    items, tokens = chunk.get("chunk_size"), chunk.get("dim")
    if not isinstance(items, int) or not isinstance(tokens, int) or min(items, tokens) < 0:
        raise InputError(
            f"{index}: chunks[{number}] ({name}): not a chunk of tokens: chunk_size {json.dumps(items)[:20]}, dim "
            f"{json.dumps(tokens)[:20]}; litdata writes both with item_loader=TokensLoader()"
        )
    path = index.with_name(name)
    found = int(map_array(path, np.dtype("<u4"), 0, 1)[0])
    if found != items:
        raise InputError(f"{path}: {found} items according to its byte 0, {items} according to {index.name}")
    offsets = map_array(path, np.dtype("<u4"), 4, items + 1)[:].astype(np.int64)
    start = 4 * (items + 2)
    with readable(path):
        size = path.stat().st_size
    if offsets[0] != start or offsets[-1] != size or size != start + tokens * dtype.itemsize:
        raise InputError(
            f"{path}: its items are in bytes {offsets[0]} to {offsets[-1]}; expected {start} to "
            f"{start + tokens * dtype.itemsize} ({tokens} {dtype.name} according to {index.name}), but the file "
            f"ends at byte {size}"
        )
    ends, rest = np.divmod(offsets[1:] - start, dtype.itemsize)
    wrong = np.flatnonzero((np.diff(offsets) < 0) | (rest != 0))
    if len(wrong):
        at = int(wrong[0])
        raise InputError(f"{path}: item {at} (byte {4 + 4 * at}) is in bytes {offsets[at]} to {offsets[at + 1]}")
    ids = map_array(path, dtype, start, tokens)
    return TokenFile(path, "litdata", ids, ends.astype(np.uint64), None, None)


CHUNK = 64 << 20
"""Bytes after which a chunk ends with the next document."""

LARGEST_CHUNK = (1 << 32) - 1
"""Offsets in a chunk are u32."""

COPIED = 1 << 22


class LitdataWriter(TokenWriter):
    """A folder of chunks and, when it is closed, its index.json. A chunk's ids wait in a nameless file for its header.

    Ids after the last end are a document.
    """

    def __init__(self, path: Path, dtype: np.dtype, tokenizer: str | None) -> None:
        super().__init__(path, dtype, tokenizer)
        numbers = {np.dtype(name): number for name, number in WRITTEN.items()}
        if self.dtype not in numbers:
            raise InputError(f"{path}: litdata's chunks cannot hold {dtype.name}; take int32, int64 or uint16")
        self._format = f"no_header_tensor:{numbers[self.dtype]}"
        self._index = PartialFile(path / INDEX)
        self._waiting = tempfile.TemporaryFile(dir=path)  # noqa: SIM115 (see close, discard)
        self._ends: list[NDArray[np.int64]] = []  # of the chunk's documents, in its ids
        self._first = self._held = 0  # the chunk's first token, and how many wait
        self._chunks: list[dict[str, Any]] = []
        self._digest = xxhash.xxh3_64()

    def _append(self, ids: NDArray[np.integer], ends: NDArray[np.uint64], loss: NDArray[np.bool_] | None) -> None:
        begin = self.tokens
        while len(ends):
            room = self._first + max(CHUNK // self.dtype.itemsize, 1)
            count = max(int(np.searchsorted(ends, room, side="right")), 1)
            stop = int(ends[count - 1])
            self._keep(ids[: stop - begin])
            self._ends.append(ends[:count].astype(np.int64) - self._first)
            ids, ends, begin = ids[stop - begin :], ends[count:], stop
            if len(ends) or stop >= room:
                self._write_chunk()
        self._keep(ids)

    def _keep(self, ids: NDArray[np.integer]) -> None:
        self._waiting.write(ids.tobytes())
        self._held += len(ids)

    def _write_chunk(self) -> None:
        ends = np.concatenate([np.zeros(1, np.int64), *self._ends])
        start = 4 * (len(ends) + 1)
        if start + self._held * self.dtype.itemsize > LARGEST_CHUNK:
            raise InputError(f"{self.path}: a document of 4 GiB or more does not fit in a litdata chunk")
        name = f"chunk-0-{len(self._chunks)}.bin"
        chunk = PartialFile(self.path / name)
        header = np.concatenate([[len(ends) - 1], start + ends * self.dtype.itemsize]).astype("<u4")
        chunk.write(header)
        self._digest.update(header.tobytes())
        self._waiting.seek(0)
        while block := self._waiting.read(COPIED):
            chunk.write(block)
            self._digest.update(block)
        chunk.publish()
        size = start + self._held * self.dtype.itemsize
        self._chunks.append({"chunk_bytes": size, "chunk_size": len(ends) - 1, "dim": self._held, "filename": name})
        self._waiting.seek(0)
        self._waiting.truncate()
        self._first, self._held, self._ends = self._first + self._held, 0, []

    def close(self) -> None:
        """Write the last chunk, then `index.json`, which completes the set."""
        if self._held and (not self._ends or int(self._ends[-1][-1]) < self._held):
            self._ends.append(np.array([self._held]))
        if self._ends or not self._chunks:
            self._write_chunk()
        self._waiting.close()
        config = {
            "chunk_bytes": CHUNK,
            "chunk_size": None,
            "compression": None,
            "data_format": [self._format],
            "data_spec": json.dumps([1, {"type": None, "context": None, "children_spec": []}]),
            "encryption": None,
            "item_loader": "TokensLoader",
        }
        index = {"chunks": self._chunks, "config": config, "updated_at": self._digest.hexdigest()}
        self._index.write(json.dumps(index).encode())
        self._index.publish()  # last: without it the chunks belong to no set

    def discard(self) -> None:
        """Remove the chunks written so far, and the folder if nothing else is in it."""
        self._waiting.close()
        self._index.discard()
        for chunk in self._chunks:
            (self.path / chunk["filename"]).unlink(missing_ok=True)
        with suppress(OSError):  # somebody else's files are in it
            self.path.rmdir()
