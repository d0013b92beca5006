"""From any token format that is read to one that is written, file by file, in bounded memory.

    data/a.npy, data/b/c.npy  --to datatrove→  out/a.ds, out/b/c.ds
                              --to megatron→   out/a.bin, out/a.idx, out/b/c.bin, out/b/c.idx

Ids, documents and, in `.ds`, loss masks come out as they went in, and a manifest hands on what the source's says of the
tokenizer. A type that cannot hold the largest id is refused before anything is written.
"""

from __future__ import annotations

from collections import Counter
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
from kenotron.data.manifest import MANIFEST, Json, checksums, write_json
from kenotron.prepare.merge import common_keys
from kenotron.prepare.scratch import scratch_beside
from kenotron.storage.files import publish_folder
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

    `dtype` of the ids is the source's where the format holds it, else the narrowest. Returns what was written.

    Raises InputError: an invalid source file; a type too narrow; a file that exists; a loss mask
    for a format that has none.
    """
    suffix = written_suffix(to)
    files = open_token_files(source, "SRC", source_dtype)
    check_holds_loss(files, to)
    wanted = integer_dtype(dtype, "--dtype") if dtype else _dtype(files, to)
    for file in files:
        if np.iinfo(wanted).max < np.iinfo(file.tokens.dtype).max:
            for chunk in token_chunks(file, CHUNK_TOKENS):
                if len(chunk.ids):
                    check_range(file.path, chunk.ids, wanted, chunk.start)
    known = common_keys([source], files, strict=False)
    if is_file_of(target, to, "DST"):
        if len(files) > 1:
            raise InputError(f"DST: expected a folder for {len(files)} files, found {target}")
        if target.exists():
            raise InputError(f"DST: {target} already exists; choose another one or remove it")
        targets = [target]
        made = _written(files, targets, to, wanted, report)
        write_json(target.with_name(f"{target.name}.{MANIFEST}"), made | known)
    else:
        names = _names(as_path(source), files, suffix)
        targets = [target / name for name in names]
        with scratch_beside(target, "DST") as scratch:
            made = _written(files, [scratch / name for name in names], to, wanted, report)
            for folder in {(scratch / name).parent for name in names}:  # training looks beside the files
                own = [{"xxh3": checksums([file for file in folder.iterdir() if file.is_file()])}]
                write_json(folder / MANIFEST, {"format": to, "dtype": wanted.name, **known, "files": own})
            publish_folder(scratch, target)
    return made | {"files": [str(path) for path in targets]}


def _written(files: Sequence[TokenFile], targets: Sequence[Path], to: str, dtype: np.dtype, report: Report) -> Json:
    total, documents = 0, 0
    with progress("converting", sum(len(file.tokens) for file in files), report) as update:
        for file, path in zip(files, targets, strict=True):
            with open_writer(path, to, dtype, file.tokenizer) as writer:
                for chunk in token_chunks(file, CHUNK_TOKENS):
                    ends = np.empty(0, np.int64) if chunk.ends is None else chunk.ends
                    writer.append(chunk.ids, ends, chunk.loss)
                    update(total + writer.tokens)
            total += writer.tokens
            documents += writer.documents
    ends_known = all(file.ends is not None for file in files)
    return {"format": to, "dtype": dtype.name, "tokens": total, "documents": documents if ends_known else None}


def _dtype(files: Sequence[TokenFile], to: str) -> np.dtype:
    """The sources' common type where `to` holds it, else uint16 if the largest id fits, else its wider one."""
    held = {
        "datatrove": ("uint16", "uint32"),
        "megatron": ("uint16", "int32", "int64", "uint8", "int8", "int16"),
    }
    own = {file.tokens.dtype for file in files}
    if len(own) == 1 and next(iter(own)).name in held[to]:
        return next(iter(own)).newbyteorder("<")
    largest = max(
        (int(p.ids.max()) for file in files for p in token_chunks(file, CHUNK_TOKENS) if len(p.ids)), default=0
    )
    if largest < 1 << 16:
        return np.dtype("<u2")
    if to == "megatron":
        return np.dtype("<i4" if largest < 1 << 31 else "<i8")
    return np.dtype("<u4")


def _names(source: Any, files: Sequence[TokenFile], suffix: str) -> list[Path]:
    """The files to write, relative to their folder, in an order of path that is the sources' order."""
    if files[0].format == "litdata":  # whose order is the index's, not the names'
        return [Path(f"{number:06d}{suffix}") for number in range(len(files))]
    root = source if source.is_dir() else source.parent
    names = [Path(str(file.path.relative_to(root))).with_suffix(suffix) for file in files]
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise InputError(f"SRC: two files of {source} would both become {twice[0]}")
    return names
