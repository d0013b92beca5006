"""The text records that documents of the token cache came from: file and number in it, for people to look at.

    <cache>/train.tokens document 14      texts/b.jsonl record 3

The cache does not keep them. They are counted by reading the text again, as it was read when it was tokenized.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kenotron.config.errors import InputError
from kenotron.data.sources.text import CachedText
from kenotron.text.documents import LONGEST_CHUNK, DocumentChunk, DocumentSource, split_long_chunk
from kenotron.text.file_documents import FileDocuments
from kenotron.text.hash_split import assign_sides, hash_threshold
from kenotron.text.hub_datasets import HubDocuments
from kenotron.text.progress import progress

if TYPE_CHECKING:
    from kenotron.data.provenance import SampleOrigin
    from kenotron.data.run import RunData
    from kenotron.data.source import TokenSource

WHOLE = 1 << 62  # bytes of a range: more than a file has


class Record(NamedTuple):
    """A line or row of `file`, counted from 0, or a text file, which is one record; of a dataset, a row of it."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


def records(source: CachedText) -> Iterator[tuple[int, Record]]:
    """Every document of `source` that is trained on, by its number, with its record.

    A long record may be several documents, where chunks of it are held out. Nothing for prompts and answers. Raises
    InputError if the text can no longer be read.
    """
    texts, rules = source.texts, source.rules
    if not isinstance(texts, FileDocuments | HubDocuments):
        return
    places: list[Record] = []  # of the chunks that are not assigned yet, two at most

    def chunks() -> Iterator[DocumentChunk]:
        for chunk, record in _placed(texts):
            places.append(record)
            yield chunk

    limit, document = hash_threshold(texts.documents(), source.val_fraction), 0
    for piece in assign_sides(chunks(), limit, source.chosen, separate=rules.max_tokens is not None):
        record = places.pop(0)
        if not piece.held_out:
            if piece.starts:
                yield document, record
            document += piece.ends


def records_of(source: CachedText, documents: Collection[int]) -> dict[int, Record]:
    """The records of `documents`, numbers as in `records`; reads no further than it must."""
    found: dict[int, Record] = {}
    for document, record in records(source):
        if document in documents:
            found[document] = record
            if len(found) == len(set(documents)):
                break
    return found


def records_of_step(data: RunData, step: int, origins: Sequence[SampleOrigin]) -> dict[tuple[str, int], Record]:
    """The records of the documents in `origins`, those of `step`: by file of the cache and number in it."""
    wanted: dict[str, set[int]] = defaultdict(set)
    for origin in origins:
        for each in origin.documents or ():
            wanted[origin.file or ""].add(each.document)
        for piece in origin.pieces or ():
            wanted[piece.file].add(piece.document)
    return {
        (file, document): record
        for file, source in _cached(data.stage_of(step).sources).items()
        if file in wanted
        for document, record in records_of(source, wanted[file]).items()
    }


def documents_of(data: RunData, record: Record) -> list[tuple[str, int]]:
    """The documents of the cache that `record` became: file and number; empty: no cached text of the run has its file.

    Raises InputError: one has the file, and trains on no such record.
    """
    opened = [source for stage in data.stages if stage.steps for source in data.stage_of(stage.start).sources]
    texts = {file: text for file, text in _cached(opened).items() if record.file in part_names(text.texts)}
    found = sorted((file, document) for file, text in texts.items() for document, of in records(text) if of == record)
    if texts and not found:
        raise InputError(f"{record}: held out for validation, empty, or no such record")
    return found


def _cached(sources: Iterable[TokenSource]) -> dict[str, CachedText]:
    """Those of cached text, by their file in the cache: each text once, however many stages have it."""
    return {file.name: source for source in sources if isinstance(source, CachedText) for file in source.files}


def _placed(texts: FileDocuments | HubDocuments) -> Iterator[tuple[DocumentChunk, Record]]:
    names, parts, before = part_names(texts), list(texts.byte_ranges(WHOLE)), 0
    with progress(f"reading {texts.name}", sum(part.size for part in parts), _report) as update:
        for part in parts:
            for whole in texts.read(part):
                cut = not isinstance(texts, FileDocuments) or texts.chunk is not None  # as `texts.documents` does
                for chunk in split_long_chunk(whole, LONGEST_CHUNK) if cut else [whole]:
                    yield chunk, Record(names[part.part], whole.record)
                update(before + whole.done)
            before += part.size


def _report(line: str) -> None:
    print(line, file=sys.stderr)


def part_names(texts: DocumentSource) -> list[str]:
    """What the parts of `texts` are called: files, or splits of datasets."""
    if isinstance(texts, FileDocuments):
        return [str(file) for file in texts.files]
    if isinstance(texts, HubDocuments):
        return [f"{name} {split}" for name in texts.fractions for split in texts.splits]
    return []
