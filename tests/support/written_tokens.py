"""Files of tokens, written byte by byte from the published layouts, and runs that read them, for the tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kenotron.data import RunData, open_run
from support.data_runs import run_config

L = 8
LENGTHS = (5, 30, 1, 12, 40, 7, 60, 25)


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


def opened(dataset: Any, *more: Any, said: list[str] | None = None, start_step: int = 1, **changes: Any) -> RunData:
    values = {"sequence_length": L, "arch__vocab_size": 4096, "val_fraction": 0.1} | changes
    return open_run(run_config(dataset, *more, **values), start_step, (said if said is not None else []).append)


def windows(batches: Any) -> list[list[int]]:
    """Tokens of every sample and its last label, as they lie in a file."""
    rows = []
    for batch in batches:
        for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist()):
            rows.append(tokens + labels[-1:])
    return rows


def epoch(data: RunData) -> list[list[int]]:
    """Every training sample of the first stage once."""
    stage = data.stage_of(1)
    count = len(stage.sources[0])
    return windows([stage.read(np.arange(count), np.arange(count), False)])
