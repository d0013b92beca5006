"""Files of tokens, written byte by byte from the published layouts, for the tests of sources made of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np


def write_ds(
    path: Path,
    documents: Sequence[Sequence[int]],
    size: int = 2,
    tokenizer: str | None = "robot/words",
    loss: Sequence[bool] | None = None,
) -> Path:
    """datatrove's `.ds` with its index (and loss mask, and metadata); returns the path."""
    ids = [token for document in documents for token in document]
    path.parent.mkdir(parents=True, exist_ok=True)
    np.array(ids, dtype=f"<u{size}").tofile(path)
    np.cumsum([len(document) for document in documents]).astype("<u8").tofile(f"{path}.index")
    if loss is not None:
        np.array(loss, dtype=np.bool_).tofile(f"{path}.loss")
    if tokenizer is not None:
        Path(f"{path}.metadata").write_text(f"{tokenizer}|{size}\n{len(ids)}\n{len(ids)} T")
    return path


def counting(first: int, lengths: Sequence[int]) -> list[list[int]]:
    """Documents of these lengths whose tokens count up from `first` through all of them."""
    starts = np.cumsum([0, *lengths[:-1]]) + first
    return [list(range(start, start + length)) for start, length in zip(starts, lengths)]
