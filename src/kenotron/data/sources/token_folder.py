"""Tokenized files as a source of samples, without a copy or an index: a sample is a slice of a file.

With `sequence_length` = 4, `.ds` files have consecutive windows of 5 tokens, as in nanotron and datatrove; in all other
formats the next window starts at the last token of the previous one, so that no token is lost:

    a.ds    |0 1 2 3 4|5 6 7 8 9|10 11       samples 0, 1; two tokens left out
    b.npy   |0 1 2 3 (4) 5 6 7 (8)| 9 10     samples 2, 3; two tokens left out
                                    └─ the last `tokens.val_fraction` of the folder's samples are held out

A sample's file is found by bisection in the cumulative numbers of windows, so the cost of opening does not depend on
the files' lengths. Tokens are checked when they are read, so no id without a row in the embedding reaches the model.
"""

import hashlib
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError, counted
from kenotron.data.batch import Int64
from kenotron.data.formats.token_file import TokenFile, check_loss, checked_loss
from kenotron.data.source import Origin, Samples, SourceFile, TokenSource
from kenotron.data.sources.windows import document_numbers
from kenotron.storage.arrays import fetch_ahead, read_rows
from kenotron.storage.paths import AnyPath, RemoteArray

HASHED = 64 * 1024
"""Bytes of a file's head and of its tail that its fingerprint includes."""

CHECK_EVERY = 0.01
"""Seconds for which a checked file counts as unchanged: less than a step, more than many reads."""


class TokenFolder(TokenSource):
    """Samples of tokenized files, one file after the other.

    With `boundaries`, samples have document numbers. A file that changes during a run is an error if it is `watched`;
    files of the token cache never change.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[TokenFile],
        sequence_length: int,
        vocab_size: int,
        boundaries: bool = True,
        watched: bool = True,
    ) -> None:
        self.name, self.token_files = name, list(files)
        self.sequence_length, self.vocab_size, self._watched = sequence_length, vocab_size, watched
        self.files = [SourceFile(str(file.path), file.ends) for file in files]
        self.boundaries = boundaries and any(file.ends is not None for file in self.token_files)
        self.steps = np.array([window_step(file.format, sequence_length) for file in self.token_files], dtype=np.int64)
        counts = [count_windows(len(file.tokens), file.format, sequence_length) for file in self.token_files]
        self.first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        types = {file.tokens.dtype for file in self.token_files}
        # A narrow type moves less memory; the byte order is this machine's, which a `.npy` may not have.
        self.dtype = types.pop().newbyteorder("=") if len(types) == 1 else np.dtype(np.int64)
        self._states = [
            {path: _state(path) for path in (file.path, file.index_path, file.loss_path) if path is not None}
            for file in self.token_files
        ]
        self._checked = [-math.inf] * len(self.token_files)
        self.is_remote = any(isinstance(file.tokens, RemoteArray) for file in self.token_files)
        self._has_masks = any(file.loss is not None for file in self.token_files)

    def __len__(self) -> int:
        return int(self.first[-1])

    def locate(self, indices: Int64) -> Origin:
        """Return the file and the window of each sample, found by bisection."""
        file = np.searchsorted(self.first, indices, side="right") - 1
        window = indices - self.first[file]
        return Origin(self.files, file, window * self.steps[file], self.sequence_length + 1, window=window)

    def read(self, indices: Int64, document_ids: bool = True) -> Samples:
        """Return the windows `indices` ``[n]``, with every id checked."""
        origin = self.locate(indices)
        rows = np.empty((len(indices), self.sequence_length + 1), dtype=self.dtype)
        numbers = origin.file.tolist()
        for number in set(numbers):
            self._check_unchanged(number)
        read_rows([self.token_files[number].tokens for number in numbers], origin.start.tolist(), rows)
        self._check_ids(rows, numbers, origin.start)
        return Samples(rows, self._documents(origin) if document_ids else None, self._loss_mask(origin), origin)

    def check(self, number: int, start: int, ids: NDArray[np.integer]) -> None:
        """Raise InputError if file `number` has changed, one of `ids`, its tokens from `start` on, is too large, or its
        loss mask has values other than booleans there."""
        self._check_unchanged(number)
        checked_loss(self.token_files[number], start, start + len(ids))
        self._check_ids(ids[None], [number], np.array([start]))

    def fetch_ahead(self, indices: Int64) -> list[Future[bytes]]:
        """Start downloading the windows `indices` and their loss masks."""
        return fetch_origin(self.token_files, self.locate(indices))

    def _documents(self, origin: Origin) -> Int64 | None:
        if not self.boundaries:
            return None
        numbers = np.zeros((len(origin.file), self.sequence_length + 1), dtype=np.int64)
        for number in set(origin.file.tolist()):
            where, file = np.flatnonzero(origin.file == number), self.files[number]
            if file.ends is not None:
                numbers[where] = document_numbers(file.ends, origin.start[where], numbers.shape[1], file.name)
        return numbers

    def _loss_mask(self, origin: Origin) -> NDArray[np.bool_] | None:
        if not self._has_masks:
            return None
        mask = np.ones((len(origin.file), self.sequence_length + 1), dtype=np.bool_)
        masks = [self.token_files[number].loss for number in origin.file.tolist()]
        known = [number for number, carries in enumerate(masks) if carries is not None]
        found = np.empty((len(known), mask.shape[1]), dtype=np.bool_)
        read_rows([carries for carries in masks if carries is not None], origin.start[known].tolist(), found)
        if found.view(np.uint8).max(initial=0) > 1:
            for number, start, row in zip(origin.file[known], origin.start[known], found):
                check_loss(self.token_files[number], int(start), row)
        mask[known] = found
        return mask

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        """Return a key of the files' names, sizes, types, tokenizers, heads and tails."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.token_files:
            digest.update(repr((file.path.name, file.format, str(file.tokens.dtype), file.tokenizer)).encode())
            for array in (file.tokens, file.ends, file.loss):
                digest.update(repr(None if array is None else len(array)).encode())
                if array is not None:
                    block = HASHED // array.itemsize
                    digest.update(array[:block].tobytes() + array[-block:].tobytes())
        return digest.hexdigest()

    def describe(self) -> str:
        """Return files, documents and tokens, for the console."""
        count = sum(len(file.tokens) for file in self.token_files)
        tokens = f"{count:,} tokens in {counted(len(self.token_files), 'file')}"
        if any(file.ends is None for file in self.token_files):
            return f"{tokens} (ends of documents not known)"
        documents = sum(len(file.ends) for file in self.token_files if file.ends is not None)
        return f"{counted(documents, 'document')}, {tokens}"

    def _check_unchanged(self, number: int) -> None:
        if not self._watched or time.monotonic() - self._checked[number] < CHECK_EVERY:
            return
        self._checked[number] = time.monotonic()
        for path, state in self._states[number].items():
            if _state(path) != state:
                raise InputError(f"{path}: the file has changed or vanished since the run opened it")

    def _check_ids(self, rows: NDArray[np.integer], numbers: list[int], starts: Int64) -> None:
        unsigned = rows.view(f"u{rows.itemsize}")  # a negative id becomes a large one
        if not rows.size or unsigned.max() < self.vocab_size:
            return
        row, column = (int(each[0]) for each in np.nonzero(unsigned >= self.vocab_size))
        file, at = self.token_files[numbers[row]], int(starts[row]) + column
        raise InputError(
            f"{file.path}: token {int(file.tokens[at])} at offset {at} is not below the vocabulary of "
            f"{self.vocab_size:,} (read as {file.tokens.dtype}; another tokenizer, or another width?)"
        )


def fetch_origin(files: Sequence[TokenFile], origin: Origin) -> list[Future[bytes]]:
    """Start downloading the tokens of `origin`, and their loss masks, from remote `files`."""
    read = [files[number] for number in origin.file.tolist()]
    arrays = [file.tokens for file in read] + [file.loss for file in read]
    lengths = np.broadcast_to(origin.length, len(read)).tolist()
    return fetch_ahead(arrays, 2 * origin.start.tolist(), 2 * lengths)


def window_step(format: str, sequence_length: int) -> int:
    """Return the number of tokens between the starts of two windows."""
    return sequence_length + 1 if format == "datatrove" else sequence_length


def count_windows(tokens: int, format: str, sequence_length: int) -> int:
    """Return the number of whole windows of ``sequence_length + 1`` in `tokens` tokens."""
    return max(0, (tokens - sequence_length - 1) // window_step(format, sequence_length) + 1)


def _state(path: AnyPath) -> tuple[int, int] | None:
    if not isinstance(path, Path):
        return None  # every remote read checks the file's version itself
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
