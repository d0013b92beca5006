"""What a step reads: for each of its samples the file, the window in it, and the documents that lie in the window.

    step 3 ──order──▶ (source, index) of every sample ──▶ file code/0.ds, window 7, tokens 231-263
                                                          document 4: 231-250, document 5: 251-263

and the other way round, the steps at which a document is seen:

    document 4 of code/0.ds ──▶ windows 6, 7 ──order backwards──▶ sample 40 (step 3), 212 (step 14), …

Nothing of this is recorded while training: the order is arithmetic, so the past and the future of a run can be asked
for alike, on any machine that has the data. No token is read, only where documents end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError, nearest

from .batch import TokenSource
from .packing import PackedRows, PackingPlan
from .run import RunData
from .sources import Part, TokenWindows
from .stages import OpenSource, OpenStage
from .token_folder import TokenFolder


@dataclass(frozen=True)
class DocumentRange:
    """Tokens [first_token, end_token) of a file, all of one document; `document` counts the file's from 0."""

    document: int
    first_token: int
    end_token: int


@dataclass(frozen=True)
class PieceOrigin:
    """Tokens [first_token, end_token) of a file, all of one document, that lie in a packed row."""

    file: str
    document: int
    first_token: int
    end_token: int


@dataclass(frozen=True)
class SampleOrigin:
    """Where one sample of a step comes from.

    `sample` is its position in the run, `index` its number in its source. `file`, `window` (its number in the file) and
    the tokens [first_token, end_token) are None where the samples are made up or come from a user's own source;
    `documents` is None where it is not known where documents end. Of a packed row there are `pieces` instead. Of a
    `stream` it is not known what it holds.
    """

    sample: int
    source: str
    index: int
    file: str | None = None
    window: int | None = None
    first_token: int | None = None
    end_token: int | None = None
    documents: list[DocumentRange] | None = None
    pieces: list[PieceOrigin] | None = None
    stream: bool = False


def step_origins(data: RunData, step: int) -> list[SampleOrigin]:
    """The samples of the global batch of `step` (from 1), in their order.

    Errors (InputError): no such step in the run; all of it is of streams.
    """
    opened = data.stage_of(step)
    _refuse_streams_alone(opened)
    if (why := data.exhausted(step)) is not None:
        raise InputError(f"step {step} is not in the run: {why}")
    positions = opened.stage.samples_before(step) + np.arange(opened.stage.batch_size(step), dtype=np.int64)
    numbers, indices = opened.order.locate(positions)
    return [
        _origin(data.samples_before(step) + place, opened.sources[number], int(index))
        for place, (number, index) in enumerate(zip(numbers, indices))
    ]


def _refuse_streams_alone(opened: OpenStage) -> None:
    """Error (InputError): all sources are streams. What these give nobody knows before it is read."""
    names = [source.stream.name for source in opened.sources if source.stream is not None]
    if len(names) == len(opened.sources):
        raise InputError(
            f"{', '.join(names)}: a stream is shuffled while it is read, so what a step reads of it is not known "
            "beforehand; without dataset.streaming, tokenized once and kept, it is"
        )


def _origin(sample: int, opened: OpenSource, index: int) -> SampleOrigin:
    source: TokenSource = opened.train
    if isinstance(source, Part):
        index += source.start
        source = source.whole
    if isinstance(source, PackedRows):
        return SampleOrigin(sample, source.name, index, pieces=_pieces(source, opened, index))
    if isinstance(source, TokenFolder):
        number, window, start = (int(each[0]) for each in source.locate(np.array([index])))
        name, ends = str(source.files[number].path), source.files[number].ends
    elif isinstance(source, TokenWindows) and opened.cache is not None:
        name, ends, window, start = str(opened.cache.path), source.split.ends, index, index * source.sequence_length
    else:
        return SampleOrigin(sample, source.name, index, stream=opened.stream is not None)
    stop = start + source.sequence_length + 1
    documents = None if ends is None else document_ranges(ends, start, stop)
    return SampleOrigin(sample, source.name, index, name, window, start, stop, documents)


def _pieces(source: PackedRows, opened: OpenSource, index: int) -> list[PieceOrigin]:
    _, files, starts, lengths = source.pieces(np.array([index]))
    known, found = _files(opened), []
    for file, start, length in zip(files.tolist(), starts.tolist(), lengths.tolist()):
        name, ends = known[file]
        assert ends is not None  # nothing is packed without them
        document = int(np.searchsorted(ends, np.uint64(start), side="right"))
        found.append(PieceOrigin(name, document, start, start + length))
    return found


def _files(opened: OpenSource) -> list[tuple[str, NDArray[np.uint64] | None]]:
    """Name and ends of documents of the files of a packed source: of a folder its own, of a cache the training side."""
    if opened.cache is not None:
        return [(str(opened.cache.path), opened.cache.train.ends)]
    return [(str(file.path), file.ends) for file in opened.folder.files] if opened.folder is not None else []


@dataclass(frozen=True)
class Sighting:
    """A sample of the run that holds tokens [first_token, end_token) of a document's file, all of the document."""

    step: int
    sample: int
    first_token: int
    end_token: int


def document_sightings(data: RunData, file: str, document: int) -> list[Sighting]:
    """Every sample of the run, in order, that holds a part of this document of `file`, as `step_origins` names it.

    Streams are left out. Errors (InputError): no such file, or no such document in it; ends of documents are not known.
    """
    found: list[Sighting] = []
    known: set[str] = set()
    streamed: set[str] = set()
    for stage in data.stages:
        if not stage.steps:
            continue
        opened, before = data.stage_of(stage.start), data.samples_before(stage.start)
        streamed |= {source.stream.name for source in opened.sources if source.stream is not None}
        for number, source in enumerate(opened.sources):
            for place in _places(source):
                known.add(place.name)
                if place.name != file:
                    continue
                start, stop = _document(place, document)
                for sample, first, end in place.holding(start, stop):
                    for position in opened.order.find(number, sample, stage.samples_before(opened.stop)):
                        found.append(Sighting(stage.step_of(position), before + position, first, end))
        if opened.stop < stage.stop:  # the run ends there
            break
    if file not in known:
        unknown = f" (what the streams {', '.join(sorted(streamed))} read is not known beforehand)" if streamed else ""
        raise InputError(f"--document: no source of this run reads {file}{unknown}{nearest(file, known)}")
    return sorted(found, key=lambda each: (each.sample, each.first_token))


class _Place(Protocol):
    """A file of a source."""

    name: str
    ends: NDArray[np.uint64] | None

    def holding(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Every sample of the source that holds tokens of [start, stop) of the file: its number, and which tokens."""
        ...


@dataclass
class _WindowsOfFile:
    """Its window w is sample ``first + w`` of the source, for the w of `trained`."""

    name: str
    ends: NDArray[np.uint64] | None
    step: int
    length: int
    first: int
    trained: range

    def holding(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        lowest, highest = -(-(start - self.length) // self.step), (stop - 1) // self.step
        for window in range(max(lowest, self.trained.start), min(highest + 1, self.trained.stop)):
            begin = window * self.step
            yield self.first + window, max(start, begin), min(stop, begin + self.length + 1)


@dataclass
class _RowsOfFile:
    """Its pieces lie in packed rows; those of `trained` are samples, counted from its start."""

    name: str
    ends: NDArray[np.uint64] | None
    plan: PackingPlan
    base: int
    trained: range

    def holding(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        starts = np.asarray(self.plan.starts)
        pieces = np.flatnonzero((starts >= self.base + start) & (starts < self.base + stop))
        rows = np.searchsorted(self.plan.first, pieces, side="right") - 1
        for piece, row in zip(pieces.tolist(), rows.tolist()):
            if row in self.trained:
                first = int(starts[piece]) - self.base
                yield row - self.trained.start, first, first + int(self.plan.lengths[piece])


def _places(opened: OpenSource) -> Iterator[_Place]:
    source: TokenSource = opened.train
    begin, end = 0, len(source)
    if isinstance(source, Part):
        begin, end, source = source.start, source.stop, source.whole
    if isinstance(source, PackedRows):
        trained = range(begin, end)
        for (name, ends), base in zip(_files(opened), source.bases.tolist()):
            yield _RowsOfFile(name, ends, source.plan, base, trained)
    elif isinstance(source, TokenFolder):
        for number, file in enumerate(source.files):
            first, after = int(source.first[number]), int(source.first[number + 1])
            trained = range(max(begin - first, 0), min(after, end) - first)
            yield _WindowsOfFile(
                str(file.path), file.ends, int(source.steps[number]), source.sequence_length, first - begin, trained
            )
    elif isinstance(source, TokenWindows) and opened.cache is not None:
        length = source.sequence_length
        yield _WindowsOfFile(str(opened.cache.path), source.split.ends, length, length, 0, range(end))


def _document(place: _Place, document: int) -> tuple[int, int]:
    """The tokens [start, stop) of a document."""
    if place.ends is None:
        raise InputError(f"--document: {place.name} does not tell where documents end")
    if not 0 <= document < len(place.ends):
        raise InputError(f"--document: {place.name} has documents 0 to {len(place.ends) - 1}, found {document}")
    return int(place.ends[document - 1]) if document else 0, int(place.ends[document])


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
