"""What a step reads: for each of its samples the file, the window in it, and the documents that lie in the window.

    step 3 ──order──▶ (source, index) of every sample ──▶ file code/0.ds, window 7, tokens 231-263
                                                          document 4: 231-250, document 5: 251-263

Nothing of this is recorded while training: the order is arithmetic, so the past and the future of a run can be asked
for alike, on any machine that has the data. No token is read, only where documents end.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .batch import TokenSource
from .run import RunData
from .sources import Part, TokenWindows
from .stages import OpenSource
from .token_folder import TokenFolder


@dataclass(frozen=True)
class DocumentRange:
    """Tokens [first_token, end_token) of a file, all of one document; `document` counts the file's from 0."""

    document: int
    first_token: int
    end_token: int


@dataclass(frozen=True)
class SampleOrigin:
    """Where one sample of a step comes from.

    `sample` is its position in the run, `index` its number in its source. `file`, `window` (its number in the file) and
    the tokens [first_token, end_token) are None where the samples are made up or come from a user's own source;
    `documents` is None where it is not known where documents end.
    """

    sample: int
    source: str
    index: int
    file: str | None = None
    window: int | None = None
    first_token: int | None = None
    end_token: int | None = None
    documents: list[DocumentRange] | None = None


def step_origins(data: RunData, step: int) -> list[SampleOrigin]:
    """The samples of the global batch of `step` (from 1), in their order.

    Errors (InputError): no such step in the run.
    """
    opened, total = data.stage_of(step), data.config.global_batch_size
    positions = np.arange(total, dtype=np.int64) + (step - opened.stage.start) * total
    numbers, indices = opened.order.locate(positions)
    return [
        _origin((step - 1) * total + place, opened.sources[number], int(index))
        for place, (number, index) in enumerate(zip(numbers, indices))
    ]


def _origin(sample: int, opened: OpenSource, index: int) -> SampleOrigin:
    source: TokenSource = opened.train
    if isinstance(source, Part):
        index += source.start
        source = source.whole
    if isinstance(source, TokenFolder):
        number, window, start = (int(each[0]) for each in source.locate(np.array([index])))
        name, ends = str(source.files[number].path), source.files[number].ends
    elif isinstance(source, TokenWindows) and opened.cache is not None:
        name, ends, window, start = str(opened.cache.path), source.split.ends, index, index * source.sequence_length
    else:
        return SampleOrigin(sample, source.name, index)
    stop = start + source.sequence_length + 1
    documents = None if ends is None else document_ranges(ends, start, stop)
    return SampleOrigin(sample, source.name, index, name, window, start, stop, documents)


def document_ranges(ends: NDArray[np.uint64], start: int, stop: int) -> list[DocumentRange]:
    """The documents of the tokens [start, stop), each with its part of them; `ends` are their exclusive ends."""
    first = int(np.searchsorted(ends, np.uint64(start), side="right"))
    last = int(np.searchsorted(ends, np.uint64(stop), side="left"))
    borders = [start, *(int(end) for end in ends[first:last]), stop]
    return [
        DocumentRange(first + place, begin, end)
        for place, (begin, end) in enumerate(pairwise(borders))
        if end > begin  # documents without a token are in no window
    ]
