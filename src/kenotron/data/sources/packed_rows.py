"""Best-fit packing puts whole documents together into rows, so that no document that fits into a row is cut.

Rows have ``sequence_length + 1`` slots. For documents of 5, 7, 2, 3, 4 tokens in rows of 8:

    windows      aaaaabbb bbbbccdd dee|ee           three of five documents are cut
    best fit     bbbbbbb. aaaaaddd eeeecc..         none is; 22 of 24 slots are filled

Documents go in by decreasing length, each into the fullest row that still has space for it (best-fit decreasing; Ding
et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv 2404.10830). A document longer than a row is cut into
whole rows that share one token, as windows do, and its rest is packed.

The plan of which row holds which tokens is a function of the documents' ends and of the sequence length. It is computed
once, kept in the cache, and memory-mapped when read:

    $KENOTRON_CACHE/packing/<key>/
    ├── meta.json          counts, written last
    ├── starts, lengths    int64 [fragments], in order of rows; `starts` are offsets in the concatenated files
    └── first              int64 [rows + 1], the first fragment of each row
"""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from kenotron.config.errors import InputError, counted
from kenotron.data.batch import Int64
from kenotron.data.cached_folder import cached_folder, map_cached_array
from kenotron.data.formats.token_file import TokenFile, document_blocks
from kenotron.data.source import Origin, Samples, SourceFile, TokenSource
from kenotron.data.sources.token_folder import fetch_origin
from kenotron.kernels.hashing import mix64
from kenotron.storage.files import cache_root
from kenotron.storage.paths import RemoteArray
from kenotron.text.progress import Report, progress

FORMAT = 1
AT_ONCE = 1 << 20
"""The number of documents that are packed at a time, so that memory is bounded; their last rows stay partly empty."""


# ---- the bins ----------------------------------------------------------------------------------------------


def best_fit_decreasing(lengths: Int64, capacity: int) -> Int64:
    """Return the bin of every item ``[items]``; bins count from 0 in the order in which they are opened.

    Items, of lengths 1 to `capacity`, are placed by decreasing length, and equal ones in their order. Each goes to the
    bin with the least sufficient free space, and among equal bins to the one that reached this space last. The cost is
    O(items + lengths · spaces / 64), because all items of one length, which fill bin after bin, are placed at once.
    """
    order = np.argsort(-lengths, kind="stable")
    bins: list[int] = []
    stacks: dict[int, list[int]] = {}  # free space -> the bins that have it
    spaces, opened = 0, 0  # bit r of `spaces`: some bin has r free
    sizes, counts = np.unique(lengths, return_counts=True)
    for size, left in zip(sizes[::-1].tolist(), counts[::-1].tolist()):
        while left:
            fitting = spaces >> size
            space = size + (fitting & -fitting).bit_length() - 1 if fitting else capacity
            each = space // size
            needed = -(-left // each)
            if fitting:
                stack = stacks[space]
                taken = stack[: -needed - 1 : -1]
                del stack[-needed:]
                if not stack:
                    spaces &= ~(1 << space)
            else:
                taken = list(range(opened, opened + needed))
                opened += needed
            placed = min(left, each * len(taken))
            bins += taken if each == 1 else [number for number in taken for _ in range(each)][:placed]
            left -= placed
            short = each * len(taken) - placed  # items that would still fit into the last bin
            rest = space - each * size
            for inner, moved in (
                (rest, taken[:-1] if short else taken),
                (rest + short * size, taken[-1:] * bool(short)),
            ):
                if inner and moved:
                    stacks.setdefault(inner, []).extend(moved)
                    spaces |= 1 << inner
    found = np.empty(len(lengths), dtype=np.int64)
    found[order] = bins
    return found


def cut_long(starts: Int64, lengths: Int64, sequence_length: int, keep_rest: bool = True) -> tuple[Int64, Int64]:
    """Return starts and lengths of documents' fragments: full rows, which share one token with the next, and the rest.

    A rest that is only the shared token is left out, as are documents without tokens. Without `keep_rest`, only the
    first row of a document is kept.
    """
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    if not keep_rest:
        return starts, np.minimum(lengths, sequence_length + 1)
    whole = (lengths - 1) // sequence_length
    number = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
    rest = lengths - whole * sequence_length
    kept = (rest > 1) | (whole == 0)
    return (
        np.concatenate([np.repeat(starts, whole) + number * sequence_length, (starts + whole * sequence_length)[kept]]),
        np.concatenate([np.full(len(number), sequence_length + 1), rest[kept]]),
    )


def pack(starts: Int64, lengths: Int64, sequence_length: int, keep_rest: bool = True) -> tuple[Int64, Int64, Int64]:
    """Pack documents with `starts` and `lengths` ``[documents]`` into rows.

    Return the fragments' starts and lengths in order of rows, and the number of fragments in each row. Rows are
    shuffled by a hash of their numbers, so that the first rows, which a cap keeps, have the same distribution of
    lengths as the rest; the fragments of a row are in the order of the data.
    """
    starts, lengths = cut_long(starts, lengths, sequence_length, keep_rest)
    bins = best_fit_decreasing(lengths, sequence_length + 1)
    count = int(bins.max(initial=-1)) + 1
    shuffled = np.argsort(mix64(np.arange(count, dtype=np.uint64)), kind="stable")
    rows = np.empty(count, dtype=np.int64)
    rows[shuffled] = np.arange(count)
    order = np.lexsort((starts, rows[bins]))
    return starts[order], lengths[order], np.bincount(rows[bins], minlength=count)


# ---- the plan ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackingPlan:
    """The tokens of each row: fragment p is tokens ``[starts[p], starts[p] + lengths[p])`` of the concatenated files,
    and row r holds the fragments ``[first[r], first[r + 1])``.

    `cut` counts the `documents` that are longer than a row, `tokens` the slots that are filled.
    """

    starts: Int64
    lengths: Int64
    first: Int64
    documents: int
    cut: int
    tokens: int

    def describe(self, sequence_length: int) -> str:
        """Return how full the rows are, for the console."""
        filled = self.tokens / max((len(self.first) - 1) * (sequence_length + 1), 1)
        return f"packed best-fit: {filled:.1%} filled, {self.cut:,} of {counted(self.documents, 'document')} cut"


def open_plan(
    name: str, parts: Sequence[TokenFile], sequence_length: int, report: Report, keep_rest: bool = True
) -> PackingPlan:
    """Return the plan for these files from the cache, after computing it if needed; for `keep_rest` see `cut_long`.

    Raises InputError if the ends of a file's documents are unknown or not sorted, or the cache cannot be written.
    """
    digest = xxhash.xxh3_128(f"packing {FORMAT} {sequence_length} {keep_rest}".encode())
    for part in parts:
        digest.update(f"\n{len(part.tokens)}\n".encode())
        ends = _ends(part)
        for first in range(0, len(ends), AT_ONCE):
            digest.update(np.asarray(ends[first : first + AT_ONCE], "<u8").tobytes())
    path = cache_root() / "packing" / digest.hexdigest()

    def build(folder: Path) -> None:
        _write_plan(folder, name, parts, sequence_length, keep_rest, report)

    cached_folder(path, build, report, f"packing {name}", is_whole=lambda folder: (folder / "meta.json").is_file())
    meta = json.loads((path / "meta.json").read_text())
    sizes = {"starts": meta["pieces"], "lengths": meta["pieces"], "first": meta["rows"] + 1}
    arrays = {file: map_cached_array(path / file, np.dtype("<i8"), size) for file, size in sizes.items()}
    return PackingPlan(**arrays, documents=meta["documents"], cut=meta["cut"], tokens=meta["tokens"])


def _write_plan(
    folder: Path, name: str, parts: Sequence[TokenFile], sequence_length: int, keep_rest: bool, report: Report
) -> None:
    documents = cut = tokens = fragments = rows = 0
    total = sum(len(_ends(part)) for part in parts)
    with (
        open(folder / "starts", "wb") as start_file,
        open(folder / "lengths", "wb") as length_file,
        open(folder / "first", "wb") as first_file,
        progress(f"packing {name}", total, report) as update,
    ):
        first_file.write(np.zeros(1, "<i8").tobytes())
        for starts, lengths in _documents(parts):
            documents += len(lengths)
            cut += int((lengths > sequence_length + 1).sum())
            starts, lengths, pieces = pack(starts, lengths, sequence_length, keep_rest)
            start_file.write(starts.astype("<i8").tobytes())
            length_file.write(lengths.astype("<i8").tobytes())
            first_file.write((fragments + np.cumsum(pieces)).astype("<i8").tobytes())
            tokens += int(lengths.sum())
            fragments += len(starts)
            rows += len(pieces)
            update(documents)
    counts = {"documents": documents, "cut": cut, "tokens": tokens, "pieces": fragments, "rows": rows}
    (folder / "meta.json").write_text(json.dumps(counts, indent=2) + "\n")


def _documents(parts: Sequence[TokenFile]) -> Iterator[tuple[Int64, Int64]]:
    """Yield starts and lengths of all documents, `AT_ONCE` at a time; starts are offsets in the concatenated files."""
    waiting: list[tuple[Int64, Int64]] = []
    held = base = 0
    for part in parts:
        for first, lengths in document_blocks(part, AT_ONCE):
            waiting.append((base + first + np.cumsum(lengths) - lengths, lengths))
            held += len(lengths)
            if held >= AT_ONCE:
                starts, sizes = (np.concatenate(each) for each in zip(*waiting))
                yield starts[:AT_ONCE], sizes[:AT_ONCE]
                waiting, held = [(starts[AT_ONCE:], sizes[AT_ONCE:])], held - AT_ONCE
        base += len(part.tokens)
    if held:
        starts, sizes = (np.concatenate(each) for each in zip(*waiting))
        yield starts, sizes


def _ends(part: TokenFile) -> NDArray[np.uint64]:
    if part.ends is None:
        raise InputError(
            f"dataset.packing: best_fit needs the ends of documents, which {part.path} "
            "does not have; expected packing: windows for it"
        )
    return part.ends


# ---- the rows ----------------------------------------------------------------------------------------------


class PackedRows(TokenSource):
    """Rows of a plan as samples: fragments side by side, then `padding`, which has no loss.

    The first token of a fragment has no loss either, because another document precedes it. If there is a `check`,
    tokens are checked when read, by ``check(file number, first token in the file, ids)``. For `keep_rest` see
    `cut_long`, for errors `open_plan`.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[TokenFile],
        sequence_length: int,
        padding: int,
        report: Report,
        check: Callable[[int, int, NDArray[np.integer]], None] | None = None,
        keep_rest: bool = True,
    ) -> None:
        self.name, self.parts, self.sequence_length = name, list(parts), sequence_length
        self.padding, self._check = padding, check
        self.plan = open_plan(name, parts, sequence_length, report, keep_rest)
        self._files = [SourceFile(str(part.path), part.ends) for part in parts]
        self.is_remote = any(isinstance(part.tokens, RemoteArray) for part in parts)
        self.bases = np.concatenate([[0], np.cumsum([len(part.tokens) for part in parts])]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.plan.first) - 1

    def locate(self, indices: Int64) -> Origin:
        """Return the fragments of the rows `indices`, row by row."""
        first = np.asarray(self.plan.first[indices])
        count = self.plan.first[indices + 1] - first
        row = np.repeat(np.arange(len(indices)), count)
        number = np.arange(len(row)) + np.repeat(first - np.cumsum(count) + count, count)
        starts, lengths = np.asarray(self.plan.starts[number]), np.asarray(self.plan.lengths[number])
        file = np.searchsorted(self.bases, starts, side="right") - 1
        return Origin(self._files, file, starts - self.bases[file], lengths, row=row)

    def fetch_ahead(self, indices: Int64) -> list[Future[bytes]]:
        """Start downloading the fragments of the rows `indices`."""
        return fetch_origin(self.parts, self.locate(indices))

    def read(self, indices: Int64, document_ids: bool = True) -> Samples:
        """Return the rows `indices`. Every fragment is its own document, and so is the padding."""
        origin = self.locate(indices)
        if self.is_remote:
            fetch_origin(self.parts, origin)  # concurrently; each fragment then waits for its own blocks
        shape = len(indices), self.sequence_length + 1
        tokens = np.full(shape, self.padding, dtype=np.int64)
        documents = np.zeros(shape, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.bool_)
        for row, slot, file, start, length in _placed(origin):
            part, end = self.parts[file], slot + length
            ids = part.tokens[start : start + length]
            if self._check is not None:
                self._check(file, start, ids)
            tokens[row, slot:end] = ids
            mask[row, slot + 1 : end] = True if part.loss is None else part.loss[start + 1 : start + length]
            if end <= self.sequence_length:
                documents[row, end] = 1
        return Samples(tokens, np.cumsum(documents, axis=1, out=documents) if document_ids else None, mask, origin)

    def describe(self) -> str:
        """Return how full the rows are."""
        return self.plan.describe(self.sequence_length)


def _placed(origin: Origin) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (row, slot in the row, file number, first token in the file, length) of each fragment."""
    assert origin.row is not None
    length = np.asarray(origin.length)
    before = np.cumsum(length) - length
    slot = before - before[np.searchsorted(origin.row, origin.row)]
    return zip(origin.row.tolist(), slot.tolist(), origin.file.tolist(), origin.start.tolist(), length.tolist())
