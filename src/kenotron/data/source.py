"""What a source of tokens is, before it is opened and after: all that stages, mixtures and batches know of one.

    config section ──sources.specs_of──▶ SourceSpec ──open(opening)──▶ TokenSource ──read(indices)──▶ Samples
                     what the config says   the files or texts, tokenized and mapped      tokens, documents, loss mask

A kind of source is one file in `data/sources/`, registered there by its config section. Reading samples takes two
methods (`__len__`, `read`); everything else in `TokenSource` has a default.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kenotron.config import Config
from kenotron.config.errors import InputError, counted
from kenotron.data.batch import Int64
from kenotron.text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class SourceFile:
    """A file that samples are cut from; `ends` ``[documents]``: exclusive ends of its documents, None: unknown."""

    name: str
    ends: NDArray[np.uint64] | None


@dataclass(frozen=True)
class Origin:
    """Which tokens of which files samples hold: fragment f is the tokens ``[start[f], start[f] + length[f])`` of
    ``files[file[f]]``.

    Windows are one fragment a sample, and `window` their numbers in the file. Samples put together from several
    fragments have `row` instead, the sample of each fragment.
    """

    files: Sequence[SourceFile]
    file: Int64
    start: Int64
    length: int | Int64
    window: Int64 | None = None
    row: Int64 | None = None


@dataclass(frozen=True)
class Samples:
    """What a source returns for n indices: `tokens` ``[n, sequence_length + 1]``, any integer type.

    `document_ids` (same shape, non-decreasing in a row) number the document of every token, None: unknown or not asked
    for. `loss_mask` (same shape) is False where a token carries no loss, None: all of them do. `origin`: where the
    tokens are from, None: not from files, or not known.
    """

    tokens: NDArray[np.integer]
    document_ids: Int64 | None = None
    loss_mask: NDArray[np.bool_] | None = None
    origin: Origin | None = None


class TokenSource(ABC):
    """An open source: random access to its training samples. `held_out` are the samples that validation reads.

    Reads come from several threads at once and must not change the source.
    """

    name: str
    is_stream: bool = False
    """Whether samples are only read in ascending order, without an end: `StreamSource`."""
    is_remote: bool = False
    """Whether `fetch_ahead` does anything."""
    masks_documents: bool = False
    """Whether its documents are masked from each other, whatever `model.document_masking` says."""
    bytes_per_token: float | None = None
    """Mean UTF-8 bytes of a token; None where the tokens are not known to be text."""
    size_in_bytes: int | None = None
    """Of what is trained on, for a mixture by "size"."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def read(self, indices: Int64, document_ids: bool = True) -> Samples:
        """The samples `indices` ``[n]``; without `document_ids` these are not needed.

        Raises InputError for data that are wrong, with the file and the offset in it.
        """

    def at_borders(self, indices: Int64) -> NDArray[np.bool_] | None:
        """For held-out text: whether each token of these samples is its document's first or last; None: not known."""
        return None

    @property
    def held_out(self) -> TokenSource:
        """The samples that validation reads; none by default."""
        return SampleRange(self, 0, 0)

    @property
    def fingerprint(self) -> str | None:
        """A key that changes with the data; None where nothing identifies the data (random, a user's own)."""
        return None

    def locate(self, indices: Int64) -> Origin | None:
        """Where the samples `indices` come from, without reading a token; None: unknown."""
        return None

    def training_ends(self) -> Sequence[tuple[str, str, int]]:
        """For every file whose last tokens are held out: its real path, its name, and the tokens before them."""
        return ()

    def fetch_ahead(self, indices: Int64) -> list[Future[bytes]]:
        """Start downloading what `read` will need of other machines."""
        return []

    def measure(self, unit: str) -> int:
        """How much is trained on: samples ("tokens": all have the same number), or bytes ("size").

        Error (InputError): not known.
        """
        if unit == "tokens":
            return len(self)
        if self.size_in_bytes is None:
            raise InputError(f"dataset.weight: size: {self.name} has no size in bytes; give it a number, or tokens")
        return self.size_in_bytes

    def describe(self) -> str:
        """One line for the console."""
        return f"{self.name}: {counted(len(self), 'sample')}, {len(self.held_out):,} held out"

    def found(self) -> str:
        """What there is, for the error about a source without a training sample."""
        return "no sample"


class SampleRange(TokenSource):
    """Samples [start, stop) of another source, beside others that are held out."""

    def __init__(self, whole: TokenSource, start: int, stop: int, held_out: TokenSource | None = None) -> None:
        self.name, self.whole, self.start, self.stop, self._held_out = whole.name, whole, start, stop, held_out
        self.is_remote, self.masks_documents = whole.is_remote, whole.masks_documents
        self.size_in_bytes = whole.size_in_bytes

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the complete source."""
        return self.whole.fingerprint

    def read(self, indices: Int64, document_ids: bool = True) -> Samples:
        """The samples `indices` of the range."""
        return self.whole.read(indices + self.start, document_ids)

    @property
    def held_out(self) -> TokenSource:
        """The samples to validate on."""
        return super().held_out if self._held_out is None else self._held_out

    def locate(self, indices: Int64) -> Origin | None:
        """Where the samples come from."""
        return self.whole.locate(indices + self.start)

    def fetch_ahead(self, indices: Int64) -> list[Future[bytes]]:
        """Start downloading what `read` will need."""
        return self.whole.fetch_ahead(indices + self.start)


class StreamSource(TokenSource):
    """A source that is read forward only. What comes next is a state that checkpoints hold."""

    is_stream = True

    @abstractmethod
    def advance(self, step: int, samples: int) -> None:
        """`step` ends after so many `samples` of the stream: go there."""

    @abstractmethod
    def state(self, step: int, samples: int) -> Callable[[], bytes] | None:
        """The state after `step`, which ends after so many `samples`; None if this process has not been there."""

    @abstractmethod
    def restore(self, step: int, samples: int, state: bytes, where: str) -> None:
        """Continue from a `state`. Raises InputError, with the file `where`: another stream's."""


# ---- before it is opened -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSettings:
    """What opening a source takes from its run.

    `eos` is the id that ends documents, `first_sequence_length` the first stage's: validation reads at most
    `validation_samples` (None: all) of it, if it `validates` on what stages hold out.
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
    """Hashes of documents that the checkpoint which the run begins with held out because their set was small."""
    stop: threading.Event | None = None
    """Set when the run is closed: tokenizing in the background ends."""

    @property
    def padding(self) -> int:
        """The id that fills up packed rows."""
        return self.eos if 0 <= self.eos < self.vocab_size else 0


@dataclass(frozen=True)
class Opening:
    """What one source of one stage is opened with.

    `at` is its key in the config, `seed` its stage's, `order_key` seeds its shuffling. `reserved` are hashes of
    documents that validation reads though they are not below `val_fraction`, so no source trains on them. `opened` is
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
    """A source as the config describes it; nothing is opened or read."""

    is_stream: bool = False
    splits_files: bool = False
    """Whether it holds out the last tokens of files (`TokenSource.training_ends`)."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Its path or name."""

    @abstractmethod
    def identity(self) -> dict[str, object]:
        """Which data it is and how they are read: equal for equal samples. What JSON can hold, or `str` makes so."""

    @abstractmethod
    def open(self, opening: Opening) -> TokenSource:
        """Open it. Raises InputError if that fails."""

    def paths(self) -> tuple[str, Sequence[str]]:
        """The files and folders that have to exist before the run starts, under the key that names them."""
        return "dataset", ()

    def check_files(self) -> None:  # noqa: B027 (most sources have no files to check)
        """List or open the files that it names, and read none. Error (InputError): one is damaged or missing."""


class TextSpec(SourceSpec):
    """A source whose documents are text, which this run tokenizes."""

    @abstractmethod
    def training_texts(self, run: RunSettings) -> Iterator[str]:
        """The documents that are not held out, as text."""

    @abstractmethod
    def content_key(self, run: RunSettings) -> tuple[str, str]:
        """Its name, and a key that changes with the documents."""

    @abstractmethod
    def reserved_hash(self, run: RunSettings) -> int | None:
        """Hash of the document that is held out because none falls below `val_fraction`; None where one does."""
