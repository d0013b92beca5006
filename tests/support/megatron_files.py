"""Megatron's `.bin` and `.idx`, byte by byte from the published layout."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_megatron(stem: Path, docs: Sequence[Sequence[int]], dtype: str = "int32", split: bool = False) -> None:
    """`stem`.bin and .idx with these documents. With `split`, every one of two tokens or more is two sequences."""
    sequences = [part for doc in docs for part in ([doc[:1], doc[1:]] if split and len(doc) > 1 else [doc])]
    per_document = [2 if split and len(doc) > 1 else 1 for doc in docs]
    starts = [sum(per_document[:i]) for i in range(len(docs) + 1)]
    lengths = [len(sequence) for sequence in sequences]
    width = np.dtype(dtype).itemsize
    offsets = [width * sum(lengths[:i]) for i in range(len(lengths))]
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[dtype], len(sequences), len(starts))
    index += struct.pack(f"<{len(lengths)}i{len(offsets)}q{len(starts)}q", *lengths, *offsets, *starts)
    stem.with_name(f"{stem.name}.idx").write_bytes(index)
    stem.with_name(f"{stem.name}.bin").write_bytes(np.array([token for doc in docs for token in doc], dtype).tobytes())
