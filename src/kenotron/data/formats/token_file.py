"""The common representation of token formats: memory-mapped ids, and the offsets where documents end.

    tokens   17 4 9 2 │ 5 5 2 │ 8 2          [tokens], memory-mapped, concatenated documents
    ends             4       7     9         [documents], exclusive

Each format's file in this folder implements how the two are laid out on disk. Opening does not read the tokens, so a
folder of terabytes opens at once: only sizes are compared. The index is read and checked where documents are needed
(`documents_between`, `document_blocks`).
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError, counted, nearest
from kenotron.storage.arrays import map_local_array
from kenotron.storage.paths import AnyPath, RemotePath

CHECKED_AT_OPEN = 1 << 16
"""The number of an index's ends that are checked when the file is opened; the others are checked when read."""


@dataclass(frozen=True)
class TokenFile:
    """One file of tokens.

    `tokens` ``[tokens]`` integers, memory-mapped, are the concatenated documents. `ends` ``[documents]`` uint64 is the
    exclusive end of each document in tokens, None if unknown. `loss` ``[tokens]`` bool is True for tokens with a loss,
    None if all have one; its bytes are checked when read (`checked_loss`). `tokenizer` is the name in the file's
    metadata. `index_path` and `loss_path` are the separate files, if any, that `ends` and `loss` are mapped from.
    """

    path: AnyPath
    format: str
    tokens: NDArray[np.integer]
    ends: NDArray[np.uint64] | None
    loss: NDArray[np.bool_] | None = None
    tokenizer: str | None = None
    index_path: AnyPath | None = None
    loss_path: AnyPath | None = None


def documents_between(file: TokenFile, start: int, stop: int) -> NDArray[np.int64]:
    """Return the ends of documents in tokens ``(start, stop]``, ascending; none if documents are unknown.

    Raises InputError if the index is not sorted there.
    """
    if file.ends is None:
        return np.empty(0, dtype=np.int64)
    first, last = np.searchsorted(file.ends, np.array([start, stop], dtype=np.uint64), side="right")
    ends = np.asarray(file.ends[first:last], dtype=np.int64)
    if len(ends) and not (start < ends[0] and ends[-1] <= stop and (ends[1:] >= ends[:-1]).all()):
        raise InputError(f"{file.path}: its index of documents is not sorted between entries {first} and {last}")
    return ends


def document_blocks(file: TokenFile, count: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield (start token of the first, lengths) of all documents of a file with known `ends`, `count` at a time.

    Raises InputError if the index is not sorted.
    """
    assert file.ends is not None
    start = 0
    for first in range(0, len(file.ends), count):
        ends = np.asarray(file.ends[first : first + count], dtype=np.int64)
        lengths = np.diff(ends, prepend=start)
        if (falls := np.flatnonzero((lengths < 0) | (ends > len(file.tokens)))).size:
            at = first + int(falls[0])
            raise InputError(f"{file.path}: its index of documents is not sorted: entry {at} is {file.ends[at]}")
        yield start, lengths
        start = int(ends[-1])


def checked_loss(file: TokenFile, start: int, stop: int) -> NDArray[np.bool_] | None:
    """Return the loss mask of tokens [start, stop); None if all have a loss.

    Raises InputError if a byte is neither 0 nor 1.
    """
    if file.loss is None:
        return None
    found = file.loss[start:stop]
    check_loss(file, start, found)
    return found


def check_loss(file: TokenFile, start: int, loss: NDArray[np.bool_]) -> None:
    """Raise InputError if a byte of `loss`, for the tokens from `start` on, is neither 0 nor 1."""
    found = loss.view(np.uint8)
    if len(found) and found.max() > 1:
        at = int(np.flatnonzero(found > 1)[0])
        where = f"{file.loss_path or file.path}: expected 0 or 1 for each token"
        raise InputError(f"{where}, found {found[at]} at byte {start + at}")


# ---- reading -----------------------------------------------------------------------------------------------


@contextmanager
def readable(path: AnyPath) -> Iterator[None]:
    """Raise an InputError of one line if the block cannot read the file, or it was deleted after it was listed."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None


def map_array(path: AnyPath, dtype: np.dtype, offset: int = 0, count: int | None = None, whole: bool = False) -> Any:
    """Memory-map `count` items of `dtype` at byte `offset`; None: to the end of the file.

    For a remote file, return a `RemoteArray`, which is read by blocks; with `whole`, download the file now and map it.

    Raises InputError if the file is missing, too short, or ends within an item.
    """
    with readable(path):
        size = path.stat().st_size
        if count is None:
            count, rest = divmod(max(size - offset, 0), dtype.itemsize)
            if rest:
                raise InputError(
                    f"{path}: truncated: {size} bytes are not a multiple of the {dtype.name} item size; "
                    f"the last one begins at byte {size - rest}"
                )
        if offset + count * dtype.itemsize > size:
            raise InputError(
                f"{path}: truncated: expected {count} {dtype.name} items from byte {offset} on, up to byte "
                f"{offset + count * dtype.itemsize}; the file ends at byte {size}"
            )
        if count and isinstance(path, RemotePath):
            return path.map_array(dtype, offset, count, download=whole)
        try:
            return map_local_array(Path(str(path)), dtype, offset, count)
        except ValueError:
            raise InputError(f"{path}: changed while it was being opened") from None
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise InputError(
                f"{path}: cannot be mapped, this process has mapped too many files already; raise vm.max_map_count, "
                f"or merge files with `kenotron data merge`"
            ) from None


def check_ends(path: AnyPath, ends: NDArray[np.uint64], tokens: int, token_path: AnyPath) -> None:
    """Check that the index's last end is the number of tokens, and that its first ends ascend.

    Raises InputError with the file and the byte offset of the wrong entry.
    """
    last = int(ends[-1]) if len(ends) else 0
    if last != tokens:
        raise InputError(
            f"{path}: its last document ends at token {last} (byte {max(len(ends) - 1, 0) * 8}), "
            f"but {token_path.name} holds {tokens} tokens"
        )
    head = ends[:CHECKED_AT_OPEN]
    falls = np.flatnonzero(head[1:] < head[:-1])
    if len(falls):
        at = int(falls[0]) + 1
        raise InputError(
            f"{path}: not sorted: document {at} (byte {8 * at}) ends at token {head[at]}, before the one in front of "
            f"it, at {head[at - 1]}"
        )


HEAD = 1 << 15
"""The number of a file's tokens that are examined for their width."""


def check_width(path: AnyPath, tokens: NDArray[np.integer], where: str) -> None:
    """Raise InputError if `tokens`, whose width the file does not record, seem to be halves of wider ids: every second
    one is 0, as for small ids with twice as many bytes."""
    head = np.asarray(tokens[:HEAD])
    if len(head) >= 16 and not head[1::2].any() and head[::2].any():
        size = tokens.itemsize
        raise InputError(
            f"{where}: {path}: every second id is 0 when a token is read as {counted(size, 'byte')} "
            f"({tokens.dtype.name}), from byte {size} on, so it seems to have {2 * size}: give its type "
            "(token_size_in_bytes or token_dtype in a config, --dtype or --source-dtype of a command), or, if those "
            "ids really are 0, write a file that records it (.npy by numpy.save, a .ds with its .index)"
        )


INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", "uint64")


def integer_dtype(name: str, where: str) -> np.dtype:
    """Return a little-endian integer type by name, such as ``uint16``; `where` is the key or argument for errors."""
    if name not in INTEGERS:
        raise InputError(
            f"{where}: unknown dtype '{name}'; expected one of {', '.join(INTEGERS)}{nearest(name, INTEGERS)}"
        )
    return np.dtype(name).newbyteorder("<")
