"""Tell what a step reads: for each sample the file, the window in it, and the documents in the window.

    step 3 ──order──▶ (source, index) of every sample ──▶ file code/0.ds, window 7, tokens 231-263
                                                          document 4: 231-250, document 5: 251-263

Training records nothing of this: the order is arithmetic, so past and future steps of a run can be looked up on any
machine that has the data. No tokens are read, only the ends of documents.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError
from kenotron.data.run import RunData
from kenotron.data.source import Origin, TokenSource


@dataclass(frozen=True)
class DocumentRange:
    """Tokens [first_token, end_token) of a file, all of one document; `document` is its index in the file."""

    document: int
    first_token: int
    end_token: int


@dataclass(frozen=True)
class Fragment(DocumentRange):
    """The same in a packed row, with the name of the file."""

    file: str


@dataclass(frozen=True)
class SampleOrigin:
    """Where one sample of a step comes from.

    `sample` is its position in the run, `index` its index in its source. `file`, `window` (the index in the file) and
    the tokens [first_token, end_token) are None for random samples and a user's own source; `documents` is None if the
    ends of documents are unknown. A packed row has `pieces` instead. For a sample of a `stream`, nothing is known.
    """

    sample: int
    source: str
    index: int
    file: str | None = None
    window: int | None = None
    first_token: int | None = None
    end_token: int | None = None
    documents: list[DocumentRange] | None = None
    pieces: list[Fragment] | None = None
    stream: bool = False


def step_origins(data: RunData, step: int) -> list[SampleOrigin]:
    """Return the origins of the samples in the global batch of `step` (from 1), in order.

    Raises InputError if the run has no such step, or all of its samples are from streams.
    """
    opened = data.stage_of(step)
    if all(source.is_stream for source in opened.sources):  # the content of streams is unknown before it is read
        raise InputError(
            f"{', '.join(source.name for source in opened.sources)}: a stream is shuffled while it is read, so what a "
            "step reads of it is not known in advance; without dataset.streaming (tokenized once and cached) it is "
            "known"
        )
    if (why := data.exhausted(step)) is not None:
        raise InputError(f"step {step} is not in the run: {why}")
    positions = opened.stage.samples_before(step) + np.arange(opened.stage.batch_size(step), dtype=np.int64)
    numbers, indices = opened.order.locate(positions)
    return [
        _sample_origin(data.samples_before(step) + place, opened.sources[number], int(index))
        for place, (number, index) in enumerate(zip(numbers, indices))
    ]


def described_samples(data: RunData, step: int, only: Collection[int] = ()) -> list[dict[str, Any]] | str:
    """Return `step_origins` as JSON values (if `only` is set, of these samples); for a stream, why it has none."""
    try:
        return [asdict(origin) for origin in step_origins(data, step) if not only or origin.sample in only]
    except InputError as error:
        return str(error)


def _sample_origin(sample: int, source: TokenSource, index: int) -> SampleOrigin:
    origin = source.locate(np.array([index]))
    if origin is None:
        return SampleOrigin(sample, source.name, index, stream=source.is_stream)
    if origin.window is None:
        return SampleOrigin(sample, source.name, index, pieces=_fragments(origin))
    file, window, start = origin.files[int(origin.file[0])], int(origin.window[0]), int(origin.start[0])
    stop = start + int(origin.length)
    documents = None if file.ends is None else document_ranges(file.ends, start, stop)
    return SampleOrigin(sample, source.name, index, file.name, window, start, stop, documents)


def _fragments(origin: Origin) -> list[Fragment]:
    found = []
    for number, start, length in zip(origin.file.tolist(), origin.start.tolist(), np.asarray(origin.length).tolist()):
        file = origin.files[number]
        assert file.ends is not None  # packing needs them
        document = int(np.searchsorted(file.ends, np.uint64(start), side="right"))
        found.append(Fragment(document, start, start + length, file.name))
    return found


def document_ranges(ends: NDArray[np.uint64], start: int, stop: int) -> list[DocumentRange]:
    """Return the documents in tokens [start, stop), clipped to them; `ends` are the documents' exclusive ends."""
    first = int(np.searchsorted(ends, np.uint64(start), side="right"))
    last = int(np.searchsorted(ends, np.uint64(stop), side="left"))
    borders = [start, *(int(end) for end in ends[first:last]), stop]
    return [
        DocumentRange(first + place, begin, end)
        for place, (begin, end) in enumerate(pairwise(borders))
        if end > begin  # documents without a token are in no window
    ]
