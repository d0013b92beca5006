"""What token formats share: a mapped file of ids with the places where documents end.

    tokens   17 4 9 2 │ 5 5 2 │ 8 2          [tokens], memory-mapped, documents end to end
    ends             4       7     9         [documents], exclusive

Whatever the format, that is all there is to it; each format's file in this folder knows how the two are laid out on
disk. Opening does not read the tokens, so that a folder of terabytes opens at once: sizes are compared with each other,
and an index is read, and checked, where documents are asked for (`documents_between`, `document_blocks`).
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
"""So many ends of an index are checked when the file is opened, the others where they are read."""


@dataclass(frozen=True)
class TokenFile:
    """One file of tokens.

    `tokens` ``[tokens]`` integers, memory-mapped, documents end to end; `ends` ``[documents]`` uint64, the exclusive
    end of each document in tokens, None where the format or the file does not tell; `loss` ``[tokens]`` bool, True
    where a token carries a loss, None when all do (its bytes are looked at where they are read: `checked_loss`);
    `tokenizer` what the file's own metadata calls it; `index_path` and `loss_path` the files of their own that `ends`
    and `loss` are mapped from, if they are.
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
    """The ends of documents that lie in tokens ``(start, stop]``, ascending; none where documents are not known.

    Raises InputError: the index is not sorted there.
    """
    if file.ends is None:
        return np.empty(0, dtype=np.int64)
    first, last = np.searchsorted(file.ends, np.array([start, stop], dtype=np.uint64), side="right")
    ends = np.asarray(file.ends[first:last], dtype=np.int64)
    if len(ends) and not (start < ends[0] and ends[-1] <= stop and (ends[1:] >= ends[:-1]).all()):
        raise InputError(f"{file.path}: its index of documents is not sorted between entries {first} and {last}")
    return ends


def document_blocks(file: TokenFile, count: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The lengths of all documents of a file whose `ends` are known, `count` of them at a time, with the token that
    the first of them begins at.

    Raises InputError: the index is not sorted.
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
    """Whether tokens [start, stop) carry a loss; None: all do.

    Raises InputError: a byte that is neither 0 nor 1.
    """
    if file.loss is None:
        return None
    found = file.loss[start:stop]
    check_loss(file, start, found)
    return found


def check_loss(file: TokenFile, start: int, loss: NDArray[np.bool_]) -> None:
    """Raises InputError: one of the bytes of `loss`, those of the tokens from `start` on, is neither 0 nor 1."""
    found = loss.view(np.uint8)
    if len(found) and found.max() > 1:
        at = int(np.flatnonzero(found > 1)[0])
        where = f"{file.loss_path or file.path}: expected 0 or 1 for each token"
        raise InputError(f"{where}, found {found[at]} at byte {start + at}")


# ---- reading -----------------------------------------------------------------------------------------------


@contextmanager
def readable(path: AnyPath) -> Iterator[None]:
    """One line for a file that cannot be read, or that vanished since it was listed."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None


def map_array(path: AnyPath, dtype: np.dtype, offset: int = 0, count: int | None = None, whole: bool = False) -> Any:
    """`count` items of `dtype` from byte `offset` on, memory-mapped; None: to the end of the file.

    Of a remote file a `RemoteArray`, which is read by blocks; with `whole` the file is downloaded now, and mapped.

    Raises InputError: the file is missing, too short, or ends within an item.
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
    """The index's last end must be the number of tokens, and its first ends must ascend.

    Raises InputError: name the file and the byte of the entry that is wrong.
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
"""Tokens of a file that are looked at for their width."""


def check_width(path: AnyPath, tokens: NDArray[np.integer], where: str) -> None:
    """Error (InputError): `tokens`, whose width the file does not record, are halves of wider ones: every second
    is 0, as it is where small ids have twice as many bytes."""
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
    """A little-endian integer type by name, ``uint16`` for example. `where` names the key or argument in errors."""
    if name not in INTEGERS:
        raise InputError(
            f"{where}: unknown dtype '{name}'; expected one of {', '.join(INTEGERS)}{nearest(name, INTEGERS)}"
        )
    return np.dtype(name).newbyteorder("<")
