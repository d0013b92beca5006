"""datatrove's format `.ds`, which Nanosets consist of.

    corpus.ds            little-endian uint16 or uint32 ids, no header
    corpus.ds.index      uint64: exclusive end of each document, in tokens
    corpus.ds.loss       one byte per token, 1 if it has a loss; optional
    corpus.ds.metadata   three lines: tokenizer|2, the number of tokens, the same for humans (27.0 T)

A `.ds` does not record the width of ids. It is taken from the metadata, else derived from the index's last end and the
file size, else two bytes. Sizes that contradict each other are an error, never a guess.
"""

import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError, os_errors
from kenotron.data.formats.token_file import TokenFile, check_ends, check_width, map_array, readable
from kenotron.storage.arrays import release
from kenotron.storage.paths import AnyPath

WIDTHS: dict[int, np.dtype] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


def open_file(path: AnyPath, where: str, dtype: np.dtype | None = None) -> list[TokenFile]:
    """Open one `.ds` with its index, loss mask and metadata.

    Raises InputError if sizes, widths or counts contradict each other, or the index is not sorted.
    """
    metadata = _metadata(_beside(path, "metadata"))
    index = _beside(path, "index")
    ends = map_array(index, np.dtype("<u8"), whole=True) if index.exists() else None
    tokens = map_array(path, _width(path, ends, metadata.width, where, dtype))
    if ends is None and metadata.width is None:
        check_width(path, tokens, where)
    if metadata.tokens is not None and metadata.tokens != len(tokens):
        raise InputError(
            f"{path}: holds {len(tokens)} tokens of {tokens.itemsize} bytes, up to byte {tokens.nbytes}; "
            f"{path.name}.metadata says {metadata.tokens}"
        )
    if ends is not None:
        check_ends(index, ends, len(tokens), path)
    loss_path = _beside(path, "loss")
    loss = map_array(loss_path, np.dtype(np.bool_)) if loss_path.exists() else None
    if loss is not None and len(loss) != len(tokens):
        raise InputError(f"{loss_path}: {len(loss)} bytes, expected one for each of the {len(tokens)} tokens")
    paths = (None if ends is None else index, None if loss is None else loss_path)
    return [TokenFile(path, "datatrove", tokens, ends, loss, metadata.tokenizer, *paths)]


def _beside(path: Any, kind: str) -> Any:
    return path.with_name(f"{path.name}.{kind}")


class _Metadata(NamedTuple):
    """The content of a `.metadata`; `width`: bytes per token."""

    tokenizer: str | None = None
    width: int | None = None
    tokens: int | None = None


def _metadata(path: AnyPath) -> _Metadata:
    """Read a `.metadata`; without one, all fields are unknown. A handwritten one may lack the width or the count."""
    if not path.exists():
        return _Metadata()
    with readable(path):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None
    if not lines:
        return _Metadata()
    name, bar, width = lines[0].rpartition("|")
    if not bar:
        name, width = lines[0], ""
    name = name.removeprefix("Unknown Tokenizer|2").removeprefix("Unknown Tokenizer|4")  # datatrove's word for none
    if width not in ("", "2", "4"):
        raise InputError(f"{path}: line 1: expected the tokenizer and 2 or 4 bytes a token, found '{lines[0][:80]}'")
    count = lines[1].strip() if len(lines) > 1 else ""
    if count and not (count.isascii() and count.isdigit() and len(count) < 20):
        raise InputError(f"{path}: line 2: expected the number of tokens, found '{count[:80]}'")
    return _Metadata(name or None, int(width) if width else None, int(count) if count else None)


def _width(
    path: AnyPath, ends: NDArray[np.uint64] | None, recorded: int | None, where: str, asked: np.dtype | None
) -> np.dtype:
    """Return the type of ids: `asked`, or the metadata's (`recorded`), or derived from the index, or two bytes."""
    if asked is not None:
        if asked not in WIDTHS.values():
            raise InputError(f"{where}: {path} cannot hold {asked.name}; datatrove writes uint16 or uint32")
        if recorded not in (None, asked.itemsize):
            raise InputError(f"{where}: {asked.name} asked for, but {path}.metadata says {recorded} bytes a token")
        return asked
    if recorded is not None:
        return WIDTHS[recorded]
    if ends is None or not len(ends) or not ends[-1]:
        return WIDTHS[2]
    with readable(path):
        size = path.stat().st_size
    for width, dtype in WIDTHS.items():
        if int(ends[-1]) * width == size:
            return dtype
    raise InputError(
        f"{path}: {size} bytes, but {path.name}.index ends at token {ends[-1]}: expected {2 * int(ends[-1])} bytes "
        f"(uint16) or {4 * int(ends[-1])} (uint32)"
    )


# ---- writing -----------------------------------------------------------------------------------------------


TOKENS_AT_ONCE = 1 << 20
"""Tokens that are read, moved and written at a time."""


class TokenWriter:
    """Writes a `.ds` with its index, metadata and, if there is one, loss mask, in chunks and bounded memory.

        with TokenWriter(path, np.dtype("uint16")) as writer:
            writer.write(ids, lengths)

    If an error ends the block, nothing is left behind. Raises InputError for a type that a `.ds` cannot hold, or if a
    file cannot be created or written.
    """

    def __init__(self, path: Path, dtype: np.dtype, tokenizer: str | None = None) -> None:
        self.path = path
        self.dtype = dtype.newbyteorder("<")
        self.tokenizer = tokenizer
        self.tokens = 0
        self.documents = 0
        if self.dtype not in WIDTHS.values():
            raise InputError(f"{path}: datatrove's .ds holds uint16 or uint32, not {dtype.name}")
        self._files: list[BinaryIO] = []
        self._ids, self._index = self._open(path), self._open(_beside(path, "index"))
        self._loss: BinaryIO | None = None
        _beside(path, "loss").unlink(missing_ok=True)  # an older file's

    def write(
        self, ids: NDArray[np.integer], lengths: NDArray[np.int64], loss: NDArray[np.bool_] | None = None
    ) -> None:
        """Append whole documents: concatenated `ids` ``[tokens]``, `lengths` ``[documents]``, `loss` ``[tokens]``.

        Raises InputError if the dtype cannot hold an id, or the disk is full.
        """
        ends, done = np.cumsum(lengths), 0
        for start in range(0, max(len(ids), 1), TOKENS_AT_ONCE):  # `ids` may be mapped, and larger than memory
            part = slice(start, start + TOKENS_AT_ONCE)
            last = int(np.searchsorted(ends, part.stop, side="right"))
            self.append(ids[part], ends[done:last] - start, None if loss is None else loss[part])
            done = last
            release(ids)

    def append(
        self, ids: NDArray[np.integer], ends: NDArray[np.integer], loss: NDArray[np.bool_] | None = None
    ) -> None:
        """Append a chunk that may begin and end within a document; `ends` counts from the chunk's first token."""
        _check_range(self.path, ids, self.dtype, self.tokens)
        with os_errors(f"cannot write {self.path}"):
            if loss is not None and self._loss is None:
                self._loss = self._open(_beside(self.path, "loss"))
                for start in range(0, self.tokens, TOKENS_AT_ONCE):  # all tokens so far had a loss
                    self._loss.write(b"\1" * min(TOKENS_AT_ONCE, self.tokens - start))
            if self._loss is not None:
                self._loss.write((np.ones(len(ids), np.bool_) if loss is None else loss.astype(np.bool_)).tobytes())
            self._ids.write(ids.astype(self.dtype).tobytes())
            self._index.write((np.asarray(ends, "<u8") + np.uint64(self.tokens)).tobytes())
        self.tokens += len(ids)
        self.documents += len(ends)

    def close(self) -> None:
        """Finish the files and sync them."""
        name = self.tokenizer or f"Unknown Tokenizer|{self.dtype.itemsize}"
        metadata = f"{name}|{self.dtype.itemsize}\n{self.tokens}\n{_human(self.tokens)}"
        with os_errors(f"cannot write {self.path}"):
            self._open(_beside(self.path, "metadata")).write(metadata.encode())
            if self.tokens and not self.documents:  # their ends are not known
                _beside(self.path, "index").unlink()
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())
                file.close()

    def _open(self, path: Path) -> BinaryIO:
        """Create one of this writer's files."""
        with os_errors(f"cannot write {self.path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files.append(open(path, "wb"))  # noqa: SIM115 (see close, __exit__)
        return self._files[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        for file in self._files:
            file.close()
            Path(file.name).unlink(missing_ok=True)


def _check_range(path: Path, ids: NDArray[np.integer], dtype: np.dtype, start: int) -> None:
    """Raise InputError if an id of `ids` ``[tokens]``, the tokens from `start` on, does not fit `dtype`."""
    if ids.min(initial=0) < 0:
        at = int(ids.argmin())
        raise InputError(f"{path}: token {start + at} is negative ({ids[at]})")
    if ids.max(initial=0) > np.iinfo(dtype).max:
        at = int(ids.argmax())
        raise InputError(
            f"{path}: token {start + at} is {ids[at]}, beyond {dtype.name} (largest {np.iinfo(dtype).max})"
        )


def narrowest_dtype(vocab_size: int) -> np.dtype:
    """Return the narrowest type that holds `vocab_size` ids."""
    return WIDTHS[2 if vocab_size <= 1 << 16 else 4]


def _human(tokens: int) -> str:
    """Format with three digits and a prefix, like datatrove with `humanize`: 27 → ``27.0 T``, 1500 → ``1.50 kT``."""
    exponent = int(f"{tokens:.2e}".partition("e")[2])  # of the rounded number: 999999 is 1.00 M
    prefix = " kMGTPEZY"[exponent // 3].strip()
    return f"{tokens / 10 ** (exponent // 3 * 3):.{2 - exponent % 3}f} {prefix}T"
