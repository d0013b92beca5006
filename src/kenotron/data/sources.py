"""Token sources: cached tokens cut into windows, random tokens, and a user's own. (Tokenized files: token_folder.py.)

Each has a length and answers many samples at once (`batch.TokenSource`). A stream of 9 tokens with windows of 4:

    tokens    7 8 9 2 5 6 3 1 4      ends of documents  4 9
    sample 0  7 8 9 2 5              documents  0 0 0 0 1
    sample 1          5 6 3 1 4      documents  1 1 1 1 1
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kenotron.config.dotted import import_registered
from kenotron.config.errors import InputError, nearest
from kenotron.kernels.hashing import derive_key

from .batch import Int64, TokenSource
from .cache import SplitTokens
from .order import mix64

DATASETS = "kenotron.datasets"
"""The group of entry points under which packages register datasets."""


class TokenWindows:
    """Windows ``[i * S, i * S + S]`` of a token stream, S = `sequence_length`; the tail that fills none is left out."""

    def __init__(self, name: str, split: SplitTokens, sequence_length: int) -> None:
        self.name, self.split, self.sequence_length = name, split, sequence_length
        length = max(0, (len(split.tokens) - 1) // sequence_length)
        step = split.tokens.itemsize
        base = np.asarray(split.tokens)
        # Overlapping rows of the memory map: no byte is read before a row is asked for.
        shape = (length, sequence_length + 1)
        self._rows = as_strided(base, shape, (sequence_length * step, step), writeable=False)
        self._loss = None
        if split.loss is not None:
            self._loss = as_strided(np.asarray(split.loss), shape, (sequence_length, 1), writeable=False)

    def __len__(self) -> int:
        return len(self._rows)

    def samples(self, indices: Int64) -> NDArray[np.integer]:
        return self._rows[indices]

    def documents(self, indices: Int64) -> Int64:
        return document_numbers(self.split.ends, indices * self.sequence_length, self.sequence_length + 1, self.name)

    def loss(self, indices: Int64) -> NDArray[np.bool_] | None:
        return None if self._loss is None else self._loss[indices]


def document_numbers(ends: NDArray[np.uint64], starts: Int64, size: int, name: str) -> Int64:
    """Document of every token ``[n, size]`` of the windows that begin at `starts` ``[n]``.

    `ends` ``[documents]`` are the exclusive ends of the documents. Error (InputError, with `name`): ends not in order.
    """
    # Document numbers first[i] <= d < last[i] end inside window i; each end raises the number by one from there on.
    first = np.searchsorted(ends, starts.astype(np.uint64), side="right")
    last = np.searchsorted(ends, (starts + size).astype(np.uint64), side="left")
    inside = np.maximum(last - first, 0)
    row = np.repeat(np.arange(len(starts)), inside)
    document = np.arange(inside.sum()) + np.repeat(first - np.cumsum(inside) + inside, inside)
    place = ends[document].astype(np.int64) - starts[row]
    if ((place <= 0) | (place >= size)).any():
        raise InputError(f"{name}: the ends of its documents are not in order (near document {int(first.min())})")
    numbers = np.zeros((len(starts), size), dtype=np.int64)
    numbers[:, 0] = first
    np.add.at(numbers, (row, place), 1)
    return np.cumsum(numbers, axis=1, out=numbers)


class RandomTokens:
    """Endless uniformly random tokens (`dataset: null`): a hash of (seed, sample, place), the same everywhere."""

    name = "random tokens"

    def __init__(self, vocab_size: int, sequence_length: int, seed: int, length: int = 1 << 48) -> None:
        self.vocab_size, self.length = vocab_size, length
        self._key = np.uint64(derive_key("random tokens", seed))
        self._columns = np.arange(sequence_length + 1, dtype=np.uint64)

    def __len__(self) -> int:
        return self.length

    def samples(self, indices: Int64) -> NDArray[np.integer]:
        rows = mix64(indices.astype(np.uint64) ^ self._key)
        bits = mix64(rows[:, None] + self._columns) >> np.uint64(32)
        return ((bits * np.uint64(self.vocab_size)) >> np.uint64(32)).astype(np.int64)

    def documents(self, indices: Int64) -> None:
        return None

    def loss(self, indices: Int64) -> None:
        return None


class UserSource:
    """A user's own data: either `__len__` and `__getitem__`, whose items are `sequence_length + 1` ids (list, array,
    tensor) or a dict that holds them under `input_ids`; or `__len__` and `samples`, with `documents` and `loss` where
    it has them, as in `batch.TokenSource`.
    """

    def __init__(
        self, name: str, items: Any, sequence_length: int, vocab_size: int, key: str = "dataset.source"
    ) -> None:
        self.name, self.items, self.key = name, items, key
        self.sequence_length, self.vocab_size = sequence_length, vocab_size
        needed = ["__len__"] if callable(getattr(items, "samples", None)) else ["__len__", "__getitem__"]
        missing = [method for method in needed if not hasattr(items, method)]
        if missing:
            raise InputError(f"{key}: {name} gave a {type(items).__name__}, which has no {' and no '.join(missing)}")

    def __len__(self) -> int:
        with _named(self.key, f"len({self.name})"):
            return len(self.items)

    def samples(self, indices: Int64) -> NDArray[np.integer]:
        if callable(getattr(self.items, "samples", None)):
            with _named(self.key, f"{self.name}.samples({indices.tolist()})"):
                found = np.asarray(self.items.samples(indices))
            rows = list(found) if found.ndim == 2 and len(found) == len(indices) else [found] * len(indices)
        else:
            rows = [self._item(int(index)) for index in indices]
        for index, row in zip(indices, rows):
            self._check(int(index), row)
        return np.stack(rows)

    def documents(self, indices: Int64) -> Int64 | None:
        found = self._beside("documents", indices, "iu", "integer document numbers")
        if found is not None and (row := np.flatnonzero((found[:, 1:] < found[:, :-1]).any(axis=1))).size:
            index = int(indices[row[0]])
            raise InputError(f"{self.key}: {self.name}: the document numbers of sample {index} do not ascend")
        return None if found is None else found.astype(np.int64)

    def loss(self, indices: Int64) -> NDArray[np.bool_] | None:
        return self._beside("loss", indices, "b", "booleans")

    def _beside(self, method: str, indices: Int64, kinds: str, expected: str) -> NDArray | None:
        """What the source says of the tokens of samples, a value for each; None where it has no such method."""
        known = getattr(self.items, method, None)
        if known is None:
            return None
        call = f"{self.name}.{method}({indices.tolist()})"
        with _named(self.key, call):
            answer = known(indices)
        if answer is None:
            return None
        found, shape = np.asarray(answer), (len(indices), self.sequence_length + 1)
        if found.shape != shape or found.dtype.kind not in kinds:
            raise InputError(
                f"{self.key}: {call}: expected {expected} of shape {shape}, found {found.dtype} of shape {found.shape}"
            )
        return found

    def _item(self, index: int) -> NDArray:
        with _named(self.key, f"{self.name}[{index}]"):
            item = self.items[index]
        if isinstance(item, dict):
            if "input_ids" not in item:
                found = ", ".join(map(str, item))
                raise InputError(f"{self.name}[{index}]: no key 'input_ids'; found {found}{nearest('input_ids', item)}")
            item = item["input_ids"]
        return np.asarray(item)

    def _check(self, index: int, ids: NDArray) -> None:
        expected = self.sequence_length + 1
        if ids.shape != (expected,) or ids.dtype.kind not in "iu":
            raise InputError(
                f"{self.name}[{index}]: expected {expected} integer ids (sequence_length + 1), "
                f"found {ids.dtype} of shape {ids.shape}"
            )
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            bad = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise InputError(f"{self.name}[{index}]: token {bad} is not in [0, vocab_size = {self.vocab_size})")


def user_object(path: str, kwargs: dict[str, Any], sequence_length: int, seed: int) -> Any:
    """What the class or function at `path` (dotted, or an entry point) gives, called with `sequence_length`, `seed`
    and the config's `kwargs`."""
    factory = import_registered(path, "dataset.source", DATASETS)
    if not callable(factory):
        if kwargs:
            raise InputError(f"dataset.kwargs: {path} is a {type(factory).__name__}, which is not called with any")
        return factory
    try:
        return factory(sequence_length=sequence_length, seed=seed, **kwargs)
    except TypeError as error:
        raise InputError(f"dataset.source: {path}(sequence_length, seed, **kwargs): {error}") from error
    except Exception as error:
        raise _raised("dataset.source", f"{path}(sequence_length, seed, **kwargs)", error) from error


@contextmanager
def _named(key: str, call: str) -> Iterator[None]:
    """What a user's own code raises, as one line that names the call."""
    try:
        yield
    except Exception as error:
        raise _raised(key, call, error) from error


def _raised(key: str, call: str, error: Exception) -> InputError:
    return InputError(f"{key}: {call} raised {type(error).__name__}: {error}")


class Part:
    """Samples [start, stop) of another source: tokens without text are split into training and held-out samples so."""

    def __init__(self, whole: TokenSource, start: int, stop: int) -> None:
        self.name, self.whole, self.start, self.stop = whole.name, whole, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def samples(self, indices: Int64) -> NDArray[np.integer]:
        return self.whole.samples(indices + self.start)

    def documents(self, indices: Int64) -> Int64 | None:
        return self.whole.documents(indices + self.start)

    def loss(self, indices: Int64) -> NDArray[np.bool_] | None:
        return self.whole.loss(indices + self.start)


def held_out_samples(samples: int, fraction: float) -> int:
    """How many of so many samples are held out: the last ones, of two or more at least one."""
    return max(int(samples * fraction), 1 if samples > 1 else 0)
