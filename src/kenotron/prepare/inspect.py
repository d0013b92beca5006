"""What tokens on disk hold, in one pass and bounded memory."""

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from kenotron.config.errors import InputError
from kenotron.data.formats import TokenFile, open_token_files
from kenotron.data.formats.token_file import checked_loss, document_blocks, documents_between
from kenotron.data.manifest import Json, checksums, recorded_checksums
from kenotron.storage.arrays import release
from kenotron.storage.paths import AnyPath

CHUNK_TOKENS = 1 << 20


def inspect(path: str | AnyPath, dtype: str | None = None, vocab_size: int | None = None) -> Json:
    """Describe the token files at `path`; ids from `vocab_size` on are counted.

    Raises InputError: an invalid file; a negative id.
    """
    files = open_token_files(path, "token files", dtype)
    known = all(file.ends is not None for file in files)
    tokens, documents = _Tokens(vocab_size), _Documents()
    recorded, found = recorded_checksums(files), {}
    for file in files:
        digest = xxhash.xxh3_128() if file.path in recorded else None
        for start in range(0, len(file.tokens), CHUNK_TOKENS):
            ids = file.tokens[start : start + CHUNK_TOKENS]
            if digest:
                digest.update(ids.tobytes())
            tokens.add(file, start, ids)
            release(file.tokens)
        for _, lengths in document_blocks(file, CHUNK_TOKENS) if file.ends is not None else ():
            documents.add(lengths)
        if digest and file.tokens.nbytes == file.path.stat().st_size:  # its bytes are the ids, and nothing else
            found[file.path] = digest.hexdigest()
    return {
        "path": str(path),
        "format": files[0].format,
        "files": len(files),
        "tokens": sum(len(file.tokens) for file in files),
        "documents": documents.count if known else None,
        "dtype": ", ".join(sorted({file.tokens.dtype.name for file in files})),
        "bytes": sum(file.tokens.nbytes for file in files),
        "tokenizer": ", ".join(sorted({file.tokenizer for file in files if file.tokenizer})) or None,
        "largest_id": tokens.largest if tokens.largest >= 0 else None,
        "vocab_size": vocab_size,
        "beyond_vocab": tokens.beyond if vocab_size is not None else None,
        "first_beyond_vocab": tokens.first_beyond,
        "no_loss_tokens": tokens.without_loss,
        "document_lengths": documents.summary() if known and documents.count else None,
        "checksums": _compared(recorded, found) if recorded else None,
    }


def _compared(recorded: dict[AnyPath, str], found: dict[AnyPath, str]) -> Json:
    """Return the number of checksums in manifests, and the files that have others; `found` spares reading."""
    different = []
    for path, expected in recorded.items():
        try:
            here = found.get(path) or checksums([path])[path.name]
        except FileNotFoundError:
            here = None
        if here != expected:
            different.append({"file": str(path), "expected": expected, "found": here})
    return {"files": len(recorded), "different": different}


class _Tokens:
    """The largest id, how many are `vocab_size` or more and where the first of them is, and how many have no loss."""

    def __init__(self, vocab_size: int | None) -> None:
        self.vocab_size = vocab_size
        self.largest, self.beyond, self.without_loss = -1, 0, 0
        self.first_beyond: Json | None = None

    def add(self, file: TokenFile, start: int, ids: NDArray[np.integer]) -> None:
        """Raise InputError for a negative id."""
        loss = checked_loss(file, start, start + len(ids))
        if loss is not None:
            self.without_loss += len(loss) - int(np.count_nonzero(loss))
        if ids.min() < 0:
            at = start + int(np.flatnonzero(ids < 0)[0])
            raise InputError(f"{file.path}: token {at} is negative ({file.tokens[at]})")
        largest = int(ids.max())
        self.largest = max(self.largest, largest)
        if self.vocab_size is not None and largest >= self.vocab_size:
            beyond = np.flatnonzero(ids >= self.vocab_size)
            self.beyond += len(beyond)
            if self.first_beyond is None:
                at = start + int(beyond[0])
                self.first_beyond = {"file": str(file.path), "token": at, "id": int(file.tokens[at])}


class _Documents:
    """Shortest, mean and longest document, and how many there are in each power of two."""

    def __init__(self) -> None:
        self.count = self.tokens = self.longest = 0
        self.shortest: int | None = None
        self.buckets = np.zeros(64, np.int64)

    def add(self, lengths: NDArray[np.int64]) -> None:
        self.count += len(lengths)
        self.tokens += int(lengths.sum())
        self.longest = max(self.longest, int(lengths.max()))
        self.shortest = min(int(lengths.min()), self.longest if self.shortest is None else self.shortest)
        # frexp gives the bits of a number: 0 → 0, 1 → 1, 2..3 → 2, 4..7 → 3, …
        self.buckets += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=64)

    def summary(self) -> Json:
        used = np.flatnonzero(self.buckets)
        return {
            "shortest": self.shortest,
            "mean": self.tokens / self.count,
            "longest": self.longest,
            "histogram": [
                {"from": (1 << bits) >> 1, "below": 1 << bits, "documents": int(self.buckets[bits])}
                for bits in range(int(used[0]), int(used[-1]) + 1)
            ],
        }


def starts_of_documents(files: Sequence[TokenFile], count: int, length: int) -> list[tuple[str, NDArray[np.integer]]]:
    """Return the first `length` tokens at `count` places spread evenly, at starts of documents if they are known."""
    shown = []
    total = sum(len(file.tokens) for file in files)
    for number in range(count):
        at = total * number // count
        for file in files:
            if at < len(file.tokens):
                break
            at -= len(file.tokens)
        else:
            break
        nearest = documents_between(file, at, min(at + CHUNK_TOKENS, len(file.tokens)))
        start = int(nearest[0]) if at and len(nearest) and nearest[0] < len(file.tokens) else at
        stop = min([start + length, len(file.tokens), *documents_between(file, start, start + length)[:1].tolist()])
        shown.append((f"{file.path} token {start}", file.tokens[start:stop]))
    return shown
