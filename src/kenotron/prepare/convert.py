"""From one token format to another, file by file, in bounded memory.

    data/a.ds, data/b/c.ds  --to megatron→  out/a.bin, out/a.idx, out/b/c.bin, out/b/c.idx
                            --to litdata→   out/a/index.json, out/a/chunk-0-0.bin, …, out/b/c/index.json, …

Ids, documents and, in `.ds`, loss masks come out as they went in. A type that cannot hold the largest id is refused
before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kenotron.config.errors import InputError
from kenotron.data.formats import (
    TokenFile,
    check_holds_loss,
    is_file_of,
    open_token_files,
    open_writer,
    token_chunks,
    written_suffix,
)
from kenotron.data.formats.token_file import check_range, integer_dtype
from kenotron.data.manifest import Json
from kenotron.storage.paths import AnyPath, as_path
from kenotron.text.progress import Report, progress

CHUNK_TOKENS = 1 << 22
"""Tokens that are in memory at a time."""


def convert(
    source: str | AnyPath,
    target: Path,
    to: str,
    dtype: str | None = None,
    source_dtype: str | None = None,
    report: Report = print,
) -> Json:
    """Write the token files of `source` as `to` under `target`, a file where it has the format's suffix, else a folder.
    For litdata each file becomes a folder of chunks.

    `dtype` of the ids is the source's where the format holds it, else the narrowest. Returns what was written.

    Errors (InputError): what is wrong with a source file; a type too narrow; a file that is there already; a loss mask
    for a format that has none.
    """
    suffix = written_suffix(to, folders=True)
    files = open_token_files(source, "SRC", source_dtype)
    check_holds_loss(files, to)
    wanted = integer_dtype(dtype, "--dtype") if dtype else _dtype(files, to)
    for file in files:
        if np.iinfo(wanted).max < np.iinfo(file.tokens.dtype).max:
            for chunk in token_chunks(file, CHUNK_TOKENS):
                if len(chunk.ids):
                    check_range(file.path, chunk.ids, wanted, chunk.start)
    targets = _targets(as_path(source), target, files, suffix, bool(suffix) and is_file_of(target, to, "DST"))
    total, documents = 0, 0
    with progress("converting", sum(len(file.tokens) for file in files), report) as update:
        for file, path in zip(files, targets, strict=True):
            with open_writer(path, to, wanted, file.tokenizer) as writer:
                for chunk in token_chunks(file, CHUNK_TOKENS):
                    ends = np.empty(0, np.int64) if chunk.ends is None else chunk.ends
                    writer.append(chunk.ids, ends, chunk.loss)
                    update(total + writer.tokens)
            total += writer.tokens
            documents += writer.documents
    return {
        "format": to,
        "dtype": wanted.name,
        "files": [str(path) for path in targets],
        "tokens": total,
        "documents": documents if to != "numpy" and all(file.ends is not None for file in files) else None,
    }


def _dtype(files: Sequence[TokenFile], to: str) -> np.dtype:
    """The sources' common type where `to` holds it, else uint16 if the largest id fits, else its wider one."""
    held = {
        "datatrove": ("uint16", "uint32"),
        "litdata": ("uint16", "int32", "int64"),
        "megatron": ("uint16", "int32", "int64", "uint8", "int8", "int16"),
    }
    own = {file.tokens.dtype for file in files}
    if len(own) == 1 and (to not in held or next(iter(own)).name in held[to]):
        return next(iter(own)).newbyteorder("<")
    largest = max(
        (int(p.ids.max()) for file in files for p in token_chunks(file, CHUNK_TOKENS) if len(p.ids)), default=0
    )
    if largest < 1 << 16:
        return np.dtype("<u2")
    if to in ("litdata", "megatron"):
        return np.dtype("<i4" if largest < 1 << 31 else "<i8")
    return np.dtype("<u4")


def _targets(source: Any, target: Path, files: Sequence[TokenFile], suffix: str, one_file: bool) -> list[Path]:
    """The files to write, in an order of path that is the sources' order."""
    if one_file and len(files) > 1:
        raise InputError(f"DST: expected a folder for {len(files)} files, found {target}")
    if one_file:
        targets = [target]
    elif files[0].format == "litdata":  # whose order is the index's, not the names'
        targets = [target / f"{number:06d}{suffix}" for number in range(len(files))]
    else:
        root = source if source.is_dir() else source.parent
        targets = [target / file.path.relative_to(root).with_suffix(suffix) for file in files]
    seen: set[Path] = set()
    for path in targets:
        if path.exists():
            raise InputError(f"DST: {path} already exists; choose another one or remove it")
        if path in seen:
            raise InputError(f"SRC: two files of {source} would both become {path}")
        seen.add(path)
    return targets
