"""The interface of a source of tokens, before and after it is opened, for stages, mixtures and batches.

    config section ──sources.specs_of──▶ SourceSpec ──open(opening)──▶ TokenSource ──read(indices)──▶ Samples
                     from the config        the files or texts, tokenized and mapped      tokens, documents, loss mask

A kind of source is one file in `data/sources/`, registered there by its config section. Reading samples takes two
methods (`__len__`, `read`); everything else in `TokenSource` has a default.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kenotron.config import Config
from kenotron.config.errors import InputError, counted
from kenotron.data.batch import Int64
from kenotron.text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class SourceFile:
    """A file that samples are read from; `ends` ``[documents]``: exclusive ends of its documents, None: unknown."""

    name: str
    ends: NDArray[np.uint64] | None


@dataclass(frozen=True)
class Origin:
    """The tokens of files that samples consist of: fragment f is tokens ``[start[f], start[f] + length[f])`` of
    ``files[file[f]]``.

    A sample that is a window has one fragment, and `window` is its index in the file. For samples of several fragments,
    `row` is the sample of each fragment instead.
    """

    files: Sequence[SourceFile]
    file: Int64
    start: Int64
    length: int | Int64
    window: Int64 | None = None
    row: Int64 | None = None


@dataclass(frozen=True)
class Samples:
    """The samples that a source returns for n indices: `tokens` ``[n, sequence_length + 1]`` of any integer type.

    `document_ids` (same shape, non-decreasing in a row) number the document of every token; None: unknown or not
    requested. `loss_mask` (same shape) is False for tokens without a loss; None: all have one. `origin` locates the
    tokens in files; None: unknown, or not from files.
    """

    tokens: NDArray[np.integer]
    document_ids: Int64 | None = None
    loss_mask: NDArray[np.bool_] | None = None
    origin: Origin | None = None


class TokenSource(ABC):
    """An open source with random access to its training samples; `held_out` returns the samples of validation.

    Reads come from several threads at once and must not change the source.
    """

    name: str
    is_stream: bool = False
    """Whether samples are read only in ascending order, without an end: `StreamSource`."""
    is_remote: bool = False
    """Whether `fetch_ahead` does anything."""
    masks_documents: bool = False
    """Whether its documents are always masked from each other, regardless of `model.document_masking`."""
    bytes_per_token: float | None = None
    """Mean UTF-8 bytes of a token; None if the tokens are not known to be text."""
    size_in_bytes: int | None = None
    """The size of the training data, for a mixture by "size"."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def read(self, indices: Int64, document_ids: bool = True) -> Samples:
        """Return the samples `indices` ``[n]``; if `document_ids` is False, these may be left out.

        Raises InputError for wrong data, with the file and the offset in it.
        """

    def at_borders(self, indices: Int64) -> NDArray[np.bool_] | None:
        """Return, for held-out text, whether each token is the first or last of its document; None if unknown."""
        return None

    @property
    def held_out(self) -> TokenSource:
        """Return the samples of validation; none by default."""
        return SampleRange(self, 0, 0)

    @property
    def fingerprint(self) -> str | None:
        """Return a key that changes with the data; None if nothing identifies the data (random, a user's own)."""
        return None

    def locate(self, indices: Int64) -> Origin | None:
        """Return the origin of the samples `indices` without reading a token; None if unknown."""
        return None

    def training_ends(self) -> Sequence[tuple[str, str, int]]:
        """Return (real path, name, number of training tokens) of every file whose last tokens are held out."""
        return ()

    def fetch_ahead(self, indices: Int64) -> list[Future[bytes]]:
        """Start downloading the remote blocks that `read` will need."""
        return []

    def measure(self, unit: str) -> int:
        """Return the amount of training data: samples ("tokens": all have the same number), or bytes ("size").

        Raises InputError if it is unknown.
        """
        if unit == "tokens":
            return len(self)
        if self.size_in_bytes is None:
            raise InputError(f"dataset.weight: size: {self.name} has no size in bytes; give it a number, or tokens")
        return self.size_in_bytes

    def describe(self) -> str:
        """Return one line for the console."""
        return f"{self.name}: {counted(len(self), 'sample')}, {len(self.held_out):,} held out"

    def found(self) -> str:
        """Return the content of the source, for the error about a source without a training sample."""
        return "no sample"


class SampleRange(TokenSource):
    """Samples [start, stop) of another source, with other samples held out."""

    def __init__(self, whole: TokenSource, start: int, stop: int, held_out: TokenSource | None = None) -> None:
        self.name, self.whole, self.start, self.stop, self._held_out = whole.name, whole, start, stop, held_out
        self.is_remote, self.masks_documents = whole.is_remote, whole.masks_documents
        self.size_in_bytes = whole.size_in_bytes

    @classmethod
    def without_last(cls, whole: TokenSource, count: int) -> Self:
        """Return `whole` without its last `count` samples, which are held out."""
        border = len(whole) - count
        return cls(whole, 0, border, cls(whole, border, len(whole)))

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def fingerprint(self) -> str | None:
        """Return the fingerprint of the complete source."""
        return self.whole.fingerprint

    def read(self, indices: Int64, document_ids: bool = True) -> Samples:
        """Return the samples `indices` of the range."""
        return self.whole.read(indices + self.start, document_ids)

    @property
    def held_out(self) -> TokenSource:
        """Return the held-out samples."""
        return super().held_out if self._held_out is None else self._held_out

    def locate(self, indices: Int64) -> Origin | None:
        """Return the origin of the samples."""
        return self.whole.locate(indices + self.start)

    def fetch_ahead(self, indices: Int64) -> list[Future[bytes]]:
        """Start downloading the blocks that `read` will need."""
        return self.whole.fetch_ahead(indices + self.start)


def held_out_samples(samples: int, fraction: float) -> int:
    """Return how many of `samples` samples are held out: at least one if there are two or more."""
    return max(int(samples * fraction), 1 if samples > 1 else 0)


class StreamSource(TokenSource):
    """A source that is only read forward. Its position is a state, which checkpoints hold."""

    is_stream = True

    @abstractmethod
    def advance(self, step: int, samples: int) -> None:
        """Go to the end of `step`, after `samples` samples of the stream."""

    @abstractmethod
    def state(self, step: int, samples: int) -> Callable[[], bytes] | None:
        """Return the state after `step`, which ends after `samples` samples; None if this process has not seen it."""

    @abstractmethod
    def restore(self, step: int, samples: int, state: bytes, where: str) -> None:
        """Continue from a `state`. Raises InputError, with the file `where`, for the state of another stream."""


# ---- before a source is opened -----------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run that opening a source needs.

    `eos` is the id that ends documents; `first_sequence_length` is the first stage's. If the run `validates` on data
    that stages hold out, it reads at most `validation_samples` (None: all) of this length.
    """

    config: Config
    vocab_size: int
    eos: int
    val_fraction: float
    validates: bool
    validation_samples: int | None
    first_sequence_length: int
    tokenizer: TextTokenizer | None
    report: Callable[[str], None]
    held_out: frozenset[int] = frozenset()
    """Hashes of documents that the run's first checkpoint held out because their set was small."""
    stop: threading.Event | None = None
    """Set when the run is closed, to end tokenization in the background."""

    @property
    def padding(self) -> int:
        """The id that pads packed rows."""
        return self.eos if 0 <= self.eos < self.vocab_size else 0


@dataclass(frozen=True)
class Opening:
    """The arguments with which a source of a stage is opened.

    `at` is its key in the config, `seed` its stage's seed, `order_key` the seed of its shuffling. `reserved` are hashes
    of documents that validation reads although they are not below `val_fraction`; no source trains on them. `opened` is
    the stream that another stage of the run has opened by the same key.
    """

    run: RunSettings
    at: str
    sequence_length: int
    seed: int
    order_key: int
    first_stage: bool
    reserved: frozenset[int] = frozenset()
    opened: TokenSource | None = None


class SourceSpec(ABC):
    """A source as described by the config; nothing is opened or read."""

    is_stream: bool = False
    splits_files: bool = False
    """Whether the source holds out the last tokens of files (`TokenSource.training_ends`)."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The source's path or name."""

    @abstractmethod
    def identity(self) -> dict[str, object]:
        """Return which data are read and how, equal for equal samples; the values are JSON's, or become so by `str`."""

    @abstractmethod
    def open(self, opening: Opening) -> TokenSource:
        """Open the source. Raises InputError if that fails."""

    def paths(self) -> tuple[str, Sequence[str]]:
        """Return (key in the config, paths) of files and folders that have to exist before the run starts."""
        return "dataset", ()

    def check_files(self) -> None:  # noqa: B027 (most sources have no files to check)
        """List or open the source's files without reading them. Raises InputError if one is damaged or missing."""


class TextSpec(SourceSpec):
    """A source of text, which the run tokenizes."""

    @abstractmethod
    def training_texts(self, run: RunSettings) -> Iterator[str]:
        """Yield the documents that are not held out, as text."""

    @abstractmethod
    def content_key(self, run: RunSettings) -> tuple[str, str]:
        """Return the source's name, and a key that changes with the documents."""

    @abstractmethod
    def reserved_hash(self, run: RunSettings) -> int | None:
        """Return the hash of the document that is held out because none is below `val_fraction`; None if one is."""
