"""Megatron's indexed dataset, with ids in `.bin` and their description in `.idx`.

    corpus.bin   ids of concatenated sequences, no header
    corpus.idx   MMIDIDX\\0\\0, version 1 (u64), dtype code (u8), sequences S (u64), D (u64)      34 bytes
                 S lengths (i32) · S byte offsets in .bin (i64) · D document starts, in sequences (i64)

A document has one or more sequences; the last of the D = documents + 1 starts is S. All integers are little-endian.
"""

import struct

import numpy as np

from kenotron.config.errors import InputError
from kenotron.data.formats.token_file import TokenFile, map_array, readable
from kenotron.storage.paths import AnyPath

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
CODES: dict[int, str] = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOATS = {6: "float64", 7: "float32"}


def open_file(path: AnyPath, where: str, dtype: np.dtype | None = None) -> list[TokenFile]:
    """Open one pair of `.bin` and `.idx`. Takes 8 bytes of memory per document.

    Raises InputError for a missing or different magic, version or dtype code, sizes that contradict each other,
    sequences that are not contiguous, and documents that are not sorted.
    """
    index = path.with_suffix(".idx")
    of_ids, sequences, starts = _header(index)
    if dtype is not None and dtype != of_ids:
        raise InputError(f"{where}: {dtype.name} asked for, but {index} says {of_ids.name}")
    tokens = map_array(path, of_ids)
    lengths = map_array(index, np.dtype("<i4"), HEADER.size, sequences, whole=True)
    offsets = map_array(index, np.dtype("<i8"), HEADER.size + 4 * sequences, sequences, whole=True)
    documents = map_array(index, np.dtype("<i8"), HEADER.size + 12 * sequences, starts, whole=True)

    ends = np.zeros(sequences + 1, dtype=np.int64)
    np.cumsum(lengths, out=ends[1:])
    wrong = np.flatnonzero((lengths < 0) | (offsets != ends[:-1] * of_ids.itemsize))
    if len(wrong):
        at = int(wrong[0])
        raise InputError(
            f"{index}: sequence {at} (length at byte {HEADER.size + 4 * at}, offset at byte "
            f"{HEADER.size + 4 * sequences + 8 * at}) has length {lengths[at]} at byte {offsets[at]} of {path.name}; "
            f"expected it at byte {ends[at] * of_ids.itemsize}"
        )
    if ends[-1] != len(tokens):
        raise InputError(
            f"{path}: {tokens.nbytes} bytes; its index ends at byte {ends[-1] * of_ids.itemsize} ({of_ids.name})"
        )
    at_byte = HEADER.size + 12 * sequences
    if not starts or documents[0] != 0 or documents[-1] != sequences or (documents[1:] < documents[:-1]).any():
        raise InputError(
            f"{index}: the starts of documents from byte {at_byte} on do not ascend from 0 to the {sequences} sequences"
        )
    return [TokenFile(path, "megatron", tokens, ends[documents[1:]].astype(np.uint64))]


def _header(index: AnyPath) -> tuple[np.dtype, int, int]:
    """Return the type of ids, the number of sequences, and the number of document starts."""
    with readable(index):
        size = index.stat().st_size
        with index.open("rb") as file:
            head = file.read(HEADER.size)
    if head[: len(MAGIC)] != MAGIC:
        raise InputError(f"{index}: not a Megatron index: expected {MAGIC!r} at byte 0, found {head[: len(MAGIC)]!r}")
    if len(head) < HEADER.size:
        raise InputError(f"{index}: truncated: expected a header of {HEADER.size} bytes, found {size}")
    _, version, code, sequences, starts = HEADER.unpack(head)
    if version != 1:
        raise InputError(f"{index}: expected version 1 at byte 9, found {version}")
    if code not in CODES:
        found = f"{code} ({FLOATS[code]}, not integers)" if code in FLOATS else str(code)
        raise InputError(f"{index}: expected a dtype code of {', '.join(map(str, CODES))} at byte 17, found {found}")
    expected = HEADER.size + 12 * sequences + 8 * starts
    if sequences and size == expected + sequences:
        raise InputError(f"{index}: a multimodal index (modes from byte {expected} on) is not read")
    if size != expected:
        raise InputError(
            f"{index}: expected {expected} bytes for {sequences} sequences and {starts} document starts (bytes 18 to "
            f"33), found {size}"
        )
    return np.dtype(CODES[code]), sequences, starts
