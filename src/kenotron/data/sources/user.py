"""`{source: package.module.make}` names a user's own token source, by dotted path or entry point.

The class or function returns one of

    a `TokenSource`                                         used unchanged; it may hold out its own samples
    `__len__` and `samples(indices)`, optionally `documents` and `loss`
    `__len__` and `__getitem__`: `sequence_length + 1` ids (list, array, tensor), or a dict with `input_ids`
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kenotron.config.data_stages import CustomSource
from kenotron.config.dotted import import_registered
from kenotron.config.errors import InputError, nearest
from kenotron.data.batch import Int64
from kenotron.data.source import Opening, SampleRange, Samples, SourceSpec, TokenSource, held_out_samples
from kenotron.data.sources import DATASETS


@dataclass(frozen=True)
class UserSpec(SourceSpec):
    """A `source` of the config, with its `kwargs`."""

    section: CustomSource

    @property
    def title(self) -> str:
        """The dotted path or registered name."""
        return self.section.source

    def identity(self) -> dict[str, object]:
        """Return the path and its keyword arguments."""
        return {"source": self.section.source, "kwargs": self.section.kwargs}

    def open(self, opening: Opening) -> TokenSource:
        """Call the user's class or function."""
        path, run = self.section.source, opening.run
        made = user_object(path, self.section.kwargs, opening.sequence_length, opening.seed)
        if isinstance(made, TokenSource):
            source = made
        else:
            source = UserSource(path, made, opening.sequence_length, run.vocab_size, f"{opening.at}.source")
        if len(source.held_out):
            return source
        return UserRange.without_last(source, held_out_samples(len(source), run.val_fraction))


class UserRange(SampleRange):
    """Samples of a user's source, which may override `measure` and `describe`."""

    def __init__(self, whole: TokenSource, start: int, stop: int, held_out: TokenSource | None = None) -> None:
        super().__init__(whole, start, stop, held_out)
        self.bytes_per_token = whole.bytes_per_token

    def measure(self, unit: str) -> int:
        """Return the complete source's own measure, if it has one; else count the samples that are not held out."""
        own = type(self.whole).measure is not TokenSource.measure
        return self.whole.measure(unit) if own else super().measure(unit)

    def describe(self) -> str:
        """Return the complete source's own line, if it has one."""
        own = type(self.whole).describe is not TokenSource.describe
        return self.whole.describe() if own else super().describe()


def specs(section: CustomSource) -> list[tuple[float | str, SourceSpec]]:
    """Return the single source of such a dataset."""
    return [(1.0, UserSpec(section))]


class UserSource(TokenSource):
    """Wraps an object with `samples` or `__getitem__` as a `TokenSource`; checks shapes, types and ids of every batch.

    `name` is its dotted path, `key` the config's key for errors.
    """

    def __init__(self, name: str, items: Any, sequence_length: int, vocab_size: int, key: str) -> None:
        self.name, self.items, self.key = name, items, key
        self.sequence_length, self.vocab_size = sequence_length, vocab_size
        self._samples = self._method("samples")
        needed = ["__len__"] if self._samples else ["__len__", "__getitem__"]
        missing = [method for method in needed if not hasattr(items, method)]
        if missing:
            raise InputError(
                f"{key}: {name} returned a {type(items).__name__}, which has no {' and no '.join(missing)}"
            )

    def __len__(self) -> int:
        with _named(self.key, f"len({self.name})"):
            return len(self.items)

    def read(self, indices: Int64, document_ids: bool = True) -> Samples:
        """Return the samples `indices` ``[n]``, after checking them."""
        rows = self._rows(indices)
        documents = None
        if document_ids:
            documents = self._beside("documents", indices, "iu", "integer document numbers")
        if documents is not None and (row := np.flatnonzero((documents[:, 1:] < documents[:, :-1]).any(axis=1))).size:
            index = int(indices[row[0]])
            raise InputError(f"{self.key}: {self.name}: the document numbers of sample {index} do not ascend")
        loss_mask = self._beside("loss", indices, "b", "booleans")
        return Samples(rows, None if documents is None else documents.astype(np.int64), loss_mask)

    def _method(self, name: str) -> Callable[[Int64], Any] | None:
        method = getattr(self.items, name, None)
        return method if callable(method) else None

    def _rows(self, indices: Int64) -> NDArray[np.integer]:
        if self._samples is None:
            rows = [self._item(int(index)) for index in indices]
        else:
            with _named(self.key, f"{self.name}.samples({indices.tolist()})"):
                found = np.asarray(self._samples(indices))
            rows = list(found) if found.ndim == 2 and len(found) == len(indices) else [found] * len(indices)
        for index, row in zip(indices, rows):
            self._check(int(index), row)
        return np.stack(rows)

    def _beside(self, method: str, indices: Int64, kinds: str, expected: str) -> NDArray[Any] | None:
        """Return the result of the source's `method`, a value of numpy's `kinds` per token; None without the method."""
        known = self._method(method)
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

    def _item(self, index: int) -> NDArray[Any]:
        with _named(self.key, f"{self.name}[{index}]"):
            item = self.items[index]
        if isinstance(item, dict):
            if "input_ids" not in item:
                found = ", ".join(map(str, item))
                raise InputError(f"{self.name}[{index}]: no key 'input_ids'; found {found}{nearest('input_ids', item)}")
            item = item["input_ids"]
        return np.asarray(item)

    def _check(self, index: int, ids: NDArray[Any]) -> None:
        expected = self.sequence_length + 1
        if ids.shape != (expected,) or ids.dtype.kind not in "iu":
            raise InputError(
                f"{self.name}[{index}]: expected {expected} integer ids (sequence_length + 1), "
                f"found {ids.dtype} of shape {ids.shape}"
            )
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            bad = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise InputError(f"{self.name}[{index}]: token {bad} is not in [0, vocab_size = {self.vocab_size})")


def user_object(path: str, kwargs: dict[str, object], sequence_length: int, seed: int) -> Any:
    """Call the class or function at `path` (dotted, or an entry point) with `sequence_length`, `seed` and `kwargs`.

    Raises InputError for an unknown name, and for exceptions of the call.
    """
    factory = import_registered(path, "dataset.source", DATASETS)
    if not callable(factory):
        if kwargs:
            raise InputError(f"dataset.kwargs: {path} is a {type(factory).__name__}, which cannot be called with them")
        return factory
    with _named("dataset.source", f"{path}(sequence_length, seed, **kwargs)"):
        return factory(sequence_length=sequence_length, seed=seed, **kwargs)


@contextmanager
def _named(key: str, call: str) -> Iterator[None]:
    """Turn exceptions of a user's code into an InputError of one line that names the call."""
    try:
        yield
    except Exception as error:
        raise InputError(f"{key}: {call} raised {type(error).__name__}: {error}") from error
