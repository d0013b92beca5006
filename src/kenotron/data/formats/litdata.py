"""litdata's format of token chunks, used by Gapetron for example: a folder with an index.json and chunk files.

    index.json       {"config": {"data_format": ["no_header_tensor:17"], "compression": null, …},
                      "chunks": [{"filename": "chunk-0-0.bin", "chunk_size": 3, "dim": 45, …}, …]}
    chunk-0-0.bin    number of items N (u32) · N + 1 byte offsets in this file (u32) · raw ids

An item is a document; `dim` counts the tokens of a chunk. Each chunk is one file, in the index's order.
litdata writes it with `item_loader=TokensLoader()`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from kenotron.config.errors import InputError
from kenotron.data.formats.token_file import TokenFile, map_array, readable
from kenotron.storage.hub import read_json
from kenotron.storage.paths import AnyPath

# litdata's codes: torch's dtypes for tensors, numpy's scalar types for arrays.
TENSORS = {11: "u1", 12: "i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8", 20: "<u2"}
ARRAYS = dict(enumerate(["i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8"]))
DTYPES = {"no_header_tensor": TENSORS, "no_header_numpy": ARRAYS}


def open_file(path: AnyPath, where: str, dtype: np.dtype | None = None) -> list[TokenFile]:
    """Open the chunks of one folder; `path` is its index.json.

    Raises InputError for compressed or encrypted chunks, chunks of other data than tokens, and chunks whose header
    contradicts the index or the file size.
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
    index = read_json(path)
    config, chunks = index.get("config"), index.get("chunks")
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
    return TokenFile(path, "litdata", ids, ends.astype(np.uint64))
