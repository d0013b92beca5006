"""Tokenized files as a source of samples: nothing is copied, nothing is indexed, any sample is one slice of a file.

With `sequence_length` = 4, `.ds` files hold windows of 5 tokens side by side, as nanotron and datatrove cut them; in
every other format the next window starts at the last token of the one before, so that no token is lost:

    a.ds    |0 1 2 3 4|5 6 7 8 9|10 11       samples 0, 1; two tokens left out
    b.npy   |0 1 2 3 (4) 5 6 7 (8)| 9 10     samples 2, 3; two tokens left out
                                    └─ of the folder's samples the last `tokens.val_fraction` are held out

A sample's file is found by bisection in the cumulative numbers of windows, so opening costs one look at each file,
however long it is. Tokens are checked when they are read: an id that the model has no row for is never fed.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError, counted
from kenotron.config.remote import RemoteData
from kenotron.kernels.hashing import derive_key

from .batch import Int64
from .formats.token_file import check_loss, checked_loss
from .order import permute
from .packing import PackedRows, packed_rows
from .progress import Report
from .remote import AnyPath, RemoteArray, as_path, fetch_ahead, is_remote, read_rows
from .sources import Part, document_numbers, held_out_samples
from .token_paths import TokenPath
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .formats import TokenFile

HASHED = 64 * 1024
"""Bytes of a file's head, and of its tail, that its fingerprint is made of."""

CHECK_EVERY = 0.01
"""Seconds for which a file that was looked at counts as unchanged: less than a step, more than many reads."""


# ---- the samples -------------------------------------------------------------------------------------------


class TokenFolder:
    """Samples of tokenized files, end to end (`batch.TokenSource`). Reads come from several threads at once."""

    def __init__(
        self,
        name: str,
        files: Sequence[TokenFile],
        sequence_length: int,
        vocab_size: int,
        boundaries: bool = True,
        states: list[dict[AnyPath, tuple[int, int] | None]] | None = None,
    ) -> None:
        self.name, self.files, self.sequence_length, self.vocab_size = name, list(files), sequence_length, vocab_size
        self.boundaries = boundaries and any(file.ends is not None for file in self.files)
        self.steps = np.array([window_step(file.format, sequence_length) for file in self.files], dtype=np.int64)
        counts = [count_windows(len(file.tokens), file.format, sequence_length) for file in self.files]
        self.first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        types = {file.tokens.dtype for file in self.files}
        # The narrower, the less memory moves; in this machine's order of bytes, which a `.npy` need not have.
        self.dtype = types.pop().newbyteorder("=") if len(types) == 1 else np.dtype(np.int64)
        self._states = states or [
            {path: _state(path) for path in (file.path, file.index_path, file.loss_path) if path is not None}
            for file in self.files
        ]
        self._checked = [-math.inf] * len(self.files)
        self.is_remote = any(isinstance(file.tokens, RemoteArray) for file in self.files)
        self._masked = any(file.loss is not None for file in self.files)

    @staticmethod
    def join(folders: Sequence[TokenFolder]) -> TokenFolder | None:
        """The samples of all `folders`, one after the other: a batch of several is one read. None where they allow
        different ids.
        """
        first = folders[0]
        if any(folder.vocab_size != first.vocab_size for folder in folders):
            return None
        files = [file if folder.boundaries else replace(file, ends=None) for folder in folders for file in folder.files]
        states = [state for folder in folders for state in folder._states]  # as they were opened
        return TokenFolder(first.name, files, first.sequence_length, first.vocab_size, states=states)

    def __len__(self) -> int:
        return int(self.first[-1])

    def locate(self, indices: Int64) -> tuple[Int64, Int64, Int64]:
        """File number, window in the file and first token in the file ``[n]`` of each sample."""
        file = np.searchsorted(self.first, indices, side="right") - 1
        window = indices - self.first[file]
        return file, window, window * self.steps[file]

    def samples(self, indices: Int64) -> NDArray[np.integer]:
        size = self.sequence_length + 1
        rows = np.empty((len(indices), size), dtype=self.dtype)
        files, _, starts = self.locate(indices)
        numbers = files.tolist()
        for number in set(numbers):
            self._check_unchanged(number)
        read_rows([self.files[number].tokens for number in numbers], starts.tolist(), rows)
        self._check_ids(rows, numbers, starts)
        return rows

    def check(self, number: int, start: int, ids: NDArray[np.integer]) -> None:
        """Errors (InputError): file `number` has changed; one of `ids`, its tokens from `start` on, is too large; what
        should say whether they carry a loss does not."""
        self._check_unchanged(number)
        checked_loss(self.files[number], start, start + len(ids))
        self._check_ids(ids[None], [number], np.array([start]))

    def fetch_ahead(self, indices: Int64) -> list[Future[bytes]]:
        """Begin to fetch what `samples` will need of remote files."""
        files, _, starts = self.locate(indices)
        read = [self.files[number] for number in files.tolist()]
        arrays = [file.tokens for file in read] + [file.loss for file in read]
        return fetch_ahead(arrays, 2 * starts.tolist(), [self.sequence_length + 1] * len(arrays))

    def documents(self, indices: Int64) -> Int64 | None:
        if not self.boundaries:
            return None
        size = self.sequence_length + 1
        numbers = np.zeros((len(indices), size), dtype=np.int64)
        files, _, starts = self.locate(indices)
        for number in np.unique(files):
            where, file = np.flatnonzero(files == number), self.files[number]
            if file.ends is not None:
                numbers[where] = document_numbers(file.ends, starts[where], size, str(file.path))
        return numbers

    def loss(self, indices: Int64) -> NDArray[np.bool_] | None:
        if not self._masked:
            return None
        mask = np.ones((len(indices), self.sequence_length + 1), dtype=np.bool_)
        files, _, starts = self.locate(indices)
        masks = [self.files[number].loss for number in files.tolist()]
        there = [number for number, carries in enumerate(masks) if carries is not None]
        found = np.empty((len(there), mask.shape[1]), dtype=np.bool_)
        read_rows([carries for carries in masks if carries is not None], starts[there].tolist(), found)
        if found.view(np.uint8).max(initial=0) > 1:
            for number, start, row in zip(files[there], starts[there], found):
                check_loss(self.files[number], int(start), row)
        mask[there] = found
        return mask

    @cached_property
    def content(self) -> str:
        """A key that other data change: names, sizes, types and tokenizers of the files, their heads and tails."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            digest.update(repr((file.path.name, file.format, str(file.tokens.dtype), file.tokenizer)).encode())
            for array in (file.tokens, file.ends, file.loss):
                digest.update(repr(None if array is None else len(array)).encode())
                if array is not None:
                    block = HASHED // array.itemsize
                    digest.update(array[:block].tobytes() + array[-block:].tobytes())
        return digest.hexdigest()

    def describe(self) -> str:
        """Files, documents and tokens, for the console."""
        tokens = f"{sum(len(file.tokens) for file in self.files):,} tokens in {counted(len(self.files), 'file')}"
        if any(file.ends is None for file in self.files):
            return f"{tokens} (ends of documents not known)"
        documents = sum(len(file.ends) for file in self.files if file.ends is not None)
        return f"{counted(documents, 'document')}, {tokens}"

    def _check_unchanged(self, number: int) -> None:
        if time.monotonic() - self._checked[number] < CHECK_EVERY:
            return
        self._checked[number] = time.monotonic()
        for path, state in self._states[number].items():
            if _state(path) != state:
                raise InputError(f"{path}: the file has changed or vanished since the run opened it")

    def _check_ids(self, rows: NDArray[np.integer], numbers: list[int], starts: Int64) -> None:
        unsigned = rows.view(f"u{rows.itemsize}")  # a negative id is a large one there
        if not rows.size or unsigned.max() < self.vocab_size:
            return
        row, column = (int(each[0]) for each in np.nonzero(unsigned >= self.vocab_size))
        file, at = self.files[numbers[row]], int(starts[row]) + column
        raise InputError(
            f"{file.path}: token {int(file.tokens[at])} at offset {at} is not below the vocabulary of "
            f"{self.vocab_size:,} (read as {file.tokens.dtype}; another tokenizer, or another width?)"
        )


def window_step(format: str, sequence_length: int) -> int:
    """Tokens between the starts of two windows."""
    return sequence_length + 1 if format == "datatrove" else sequence_length


def count_windows(tokens: int, format: str, sequence_length: int) -> int:
    """Whole windows of ``sequence_length + 1`` in so many tokens."""
    return max(0, (tokens - sequence_length - 1) // window_step(format, sequence_length) + 1)


def _state(path: AnyPath) -> tuple[int, int] | None:
    if not isinstance(path, Path):
        return None  # every read of another machine looks at the file's version itself
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


# ---- opening -----------------------------------------------------------------------------------------------


def open_folder(
    wanted: TokenPath, sequence_length: int, vocab_size: int, seed: int, remote: RemoteData | None = None
) -> TokenFolder:
    """The samples of one path; `seed` is for `shuffle_files`, `vocab_size` the model's, `remote` for other machines.

    Errors (InputError): whatever `formats.open_token_files` finds wrong; another format, width or vocabulary than
    the config names; a local copy of another size.
    """
    from .formats import open_token_files

    root = as_path(wanted.path, remote)
    files = open_token_files(root, wanted.key, wanted.dtype)
    if wanted.key == "dataset.dataset_folder":
        for file in files:
            if file.format != "datatrove":
                raise InputError(
                    f"{wanted.key}: expected .ds files, found {file.path} ({file.format}); "
                    f"other formats are read by the key 'tokens'"
                )
    if wanted.vocab_size is not None and wanted.vocab_size > vocab_size:
        raise InputError(
            f"dataset.vocab_size: {wanted.vocab_size} is above model.model_config.vocab_size = {vocab_size}"
        )
    if wanted.dtype is None:
        for file in files:
            _check_guessed_width(file, vocab_size)
    if wanted.read_path is not None:
        if is_remote(wanted.read_path):
            raise InputError(f"dataset.dataset_read_path: expected a folder on this machine, found {wanted.read_path}")
        is_folder = root.is_dir()
        files = [_local_copy(file, root if is_folder else root.parent, Path(wanted.read_path)) for file in files]
    if wanted.shuffle_files:
        keys = np.full(len(files), derive_key("files", seed), dtype=np.uint64)
        files = [files[i] for i in permute(np.arange(len(files)), len(files), keys)]
    return TokenFolder(
        wanted.path, files, sequence_length, min(vocab_size, wanted.vocab_size or vocab_size), wanted.return_positions
    )


def _check_guessed_width(file: TokenFile, vocab_size: int) -> None:
    """A `.ds` alone, without index and metadata, is read as two bytes a token, which a large vocabulary contradicts."""
    if file.format != "datatrove" or file.ends is not None or file.tokenizer is not None:
        return
    if vocab_size > 1 << 16:
        raise InputError(
            f"{file.path}: nothing says whether a token has 2 or 4 bytes, and it may well be 4: give "
            f"dataset.token_size_in_bytes (or token_dtype beside 'tokens')"
        )


def _local_copy(file: TokenFile, folder: Any, copies: Path) -> TokenFile:
    """`file`, which lies below `folder`, with its tokens read from the copy below `copies`, where there is one."""
    copy = copies / file.path.relative_to(folder)
    if not copy.is_file():
        return file
    size = copy.stat().st_size
    if size != len(file.tokens) * file.tokens.itemsize:
        raise InputError(
            f"dataset.dataset_read_path: {copy} has {size:,} bytes, but {file.path} has "
            f"{len(file.tokens) * file.tokens.itemsize:,}"
        )
    return replace(file, path=copy, tokens=np.asarray(np.memmap(copy, dtype=file.tokens.dtype, mode="r")))


def split_samples(
    folder: TokenFolder, wanted: TokenPath, config: Any, padding: int, report: Report
) -> tuple[Part, Part]:
    """What is trained on, windows or rows of whole documents as `wanted` says, and the held-out windows.

    What is held out are tokens, whatever a stage's sequence length and packing (`training_ends`). The cap lies only on
    training, so that no stage trains on what another validates on.
    """
    length, ends = folder.sequence_length, training_ends(folder, config)
    border = sum(count_windows(end, file.format, length) for file, end in zip(folder.files, ends))
    held_out = Part(folder, border, len(folder))
    whole: TokenFolder | PackedRows = folder
    if wanted.packing == "best_fit":
        files = [_documents_before(file, end) for file, end in zip(folder.files, ends)]
        whole = packed_rows(folder.name, files, length, padding, report, folder.check)
        border = len(whole)
    if wanted.max_tokens is not None:
        formats = ["datatrove"] if isinstance(whole, PackedRows) else [file.format for file in folder.files]
        border = min(border, max(count_windows(wanted.max_tokens, each, length) for each in formats))
    return Part(whole, 0, border), held_out


def first_length(config: Any) -> int:
    """The sequence length of the first stage."""
    return next(iter(config.sequence_lengths.values()))


def training_ends(folder: TokenFolder, config: Any) -> list[int]:
    """Of each file the tokens before the held-out part, the last `tokens.val_fraction` of the windows of all files.

    They are windows of the first stage's length, from which every validation reads.
    """
    length = first_length(config)
    counts = [count_windows(len(file.tokens), file.format, length) for file in folder.files]
    left = sum(counts) - held_out_samples(sum(counts), config.tokens.val_fraction)
    ends = [0] * len(counts)
    for number, (file, count) in enumerate(zip(folder.files, counts)):
        if left < count:  # up to the last token of the last window trained on
            ends[number] = (left - 1) * window_step(file.format, length) + length + 1 if left else 0
            break
        ends[number], left = len(file.tokens), left - count
    return ends


def _documents_before(file: TokenFile, end: int) -> TokenFile:
    """A file with its documents up to the token `end` and no others; one that goes on behind it is cut there."""
    if file.ends is None or end == len(file.tokens):
        return file
    whole = file.ends[: np.searchsorted(file.ends, np.uint64(end), side="right")]
    is_cut = end > (whole[-1] if len(whole) else 0)
    return replace(file, ends=np.append(whole, np.uint64(end)) if is_cut else whole)


def check_apart(trained: Sequence[TokenFolder], validated: Sequence[TokenFolder], config: Any) -> None:
    """Error (InputError): a training token of the folders `trained` is one that one of `validated` holds out.

    The same path holds the same tokens out wherever it stands; a folder and a file in it, or the same files in another
    order, do not.
    """
    borders: dict[str, tuple[int, str]] = {}  # of a file: the first token that is held out, by which folder
    for folder in validated:
        for file, end in zip(folder.files, training_ends(folder, config)):
            here = end, folder.name
            borders[_place(file)] = min(borders.get(_place(file), here), here)
    for folder in trained:
        for file, end in zip(folder.files, training_ends(folder, config)):
            border, other = borders.get(_place(file), (end, ""))
            if border < end:
                raise InputError(
                    f"{folder.name} would train on tokens of {file.path} from {border} on, which {other} holds out "
                    "for validation; give the same path, with the same shuffle_files, in both places (each path of a "
                    "list holds out of its own), or leave validation out (tokens.val_check_interval: -1)"
                )


def _place(file: TokenFile) -> str:
    return str(file.path) if is_remote(file.path) else os.path.realpath(str(file.path))


def check_fit(folder: TokenFolder, wanted: TokenPath, config: Any, run: Tokenizer | None, report: Report) -> None:
    """Tell what fits ill in one line each: other names of tokenizers, documents that are to be masked and not known.

    Errors (InputError): tokens too narrow for the run's tokenizer; a manifest beside them with another one's hash.
    """
    if run is not None:
        _check_manifests(folder, run)
    copies = wanted.read_path and Path(wanted.read_path).expanduser()
    if copies and not any(Path(str(file.path)).is_relative_to(copies) for file in folder.files):
        report(f"warning: {copies} (dataset_read_path) has none of the files of {folder.name}: they are read there")
    unknown = [str(file.path) for file in folder.files if file.ends is None]
    if config.model.document_masking and wanted.return_positions and unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        report(
            f"warning: {unknown[0]}{more} does not tell the ends of documents: under model.document_masking each of "
            f"its sequences counts as one document"
        )
    for file in folder.files if run is not None else ():
        most = 1 << (8 * file.tokens.itemsize)
        if file.format == "datatrove" and run is not None and run.vocab_size > most:
            raise InputError(
                f"{file.path}: tokens of {file.tokens.itemsize} bytes are not those of the run's tokenizer "
                f"{run.name}, which has {run.vocab_size:,} entries"
            )
    made_with = {name: None for file in folder.files if (name := file.tokenizer)}
    if wanted.tokenizer_name:
        made_with.setdefault(wanted.tokenizer_name)
    expected = config.tokenizer.tokenizer_name_or_path or wanted.tokenizer_name
    if expected is None:
        return
    for name in made_with:
        if _short(name) != _short(expected):
            report(f"warning: {folder.name} was tokenized with '{name}', and the tokenizer of the run is '{expected}'")


def _check_manifests(folder: TokenFolder, run: Tokenizer) -> None:
    """Error (InputError): a manifest of `kenotron data` beside the files has the hash of another tokenizer."""
    from .prepare.manifest import manifests_beside

    for place, made in manifests_beside(folder.files):
        found = made.get("tokenizer_hash")
        if found not in (None, run.hash):
            raise InputError(
                f"{place}: its tokens were made with {made.get('tokenizer')} (hash {found}), and the tokenizer of the "
                f"run is {run.name} (hash {run.hash}): give that one as tokenizer.tokenizer_name_or_path (or, if ids "
                f"mean the same in both, take tokenizer_hash out of the manifest)"
            )


def _short(name: str) -> str:
    """What is left of a tokenizer's name when the folder that it lies in is not looked at."""
    path = Path(name)
    return (path.parent if path.name == "tokenizer.json" else path).name
