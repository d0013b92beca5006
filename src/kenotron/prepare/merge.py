"""`kenotron data merge`: files of tokens become one, or a few of limited size; end to end, or shuffled.

    a/00000.ds  a/00001.ds  b/  ──▶  all/00000.ds  all/00001.ds  all/manifest.json

A document is never split, nor is its loss mask. Made beside the output and renamed: the output is complete or does not
exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError
from kenotron.data.formats import SUFFIX, TokenFile, open_token_files
from kenotron.data.formats.datatrove import WIDTHS, TokenWriter
from kenotron.data.formats.token_file import checked_loss, document_blocks
from kenotron.data.manifest import MANIFEST, Json, checksums, manifests_beside, sums_of_files, write_json
from kenotron.prepare.scratch import new_token_files
from kenotron.prepare.shuffle import Documents, DocumentShuffle, Loss, some_documents
from kenotron.storage.arrays import release
from kenotron.storage.paths import AnyPath, as_path
from kenotron.text.progress import Report, progress

DOCUMENTS_AT_ONCE = 1 << 20

MANIFEST_KEYS = ("tokenizer", "tokenizer_hash", "vocab_size", "eos", "bos")
"""What sources with a manifest must agree on, and hand on."""


def merge(
    sources: Sequence[str],
    output: Path,
    shuffle: bool = False,
    seed: int = 0,
    max_tokens: int | None = None,
    report: Report = print,
) -> Json:
    """Write the documents of `sources` (files or folders) to `output`: a file where it ends in .ds, else a
    folder of files of at most `max_tokens` tokens each (a longer document has a file of its own); the manifest.

    Raises InputError: `output` exists; sources of different tokenizers; document ends not known.
    """
    files = [file for source in sources for file in open_token_files(source, "SRC")]
    for file in files:
        if file.ends is None:
            raise InputError(f"{file.path}: where its documents end is not known, so documents cannot be packed whole")
    known = _common_keys(sources, files)
    with new_token_files(output) as (scratch, as_file):
        if as_file and max_tokens is not None:
            raise InputError(f"--max-tokens-per-file: expected a folder as --output, found the file {output}")
        widest = max(file.tokens.dtype.itemsize for file in files)
        dtype = WIDTHS[2 if widest <= 2 else 4]
        stem = output.stem if as_file else None
        target = _Files(scratch, dtype, known.get("tokenizer"), stem, max_tokens)
        _copy(files, target, scratch / "shuffle", dtype, [seed] if shuffle else None, report)
        target.close()
        options = {"shuffle": shuffle, "seed": seed, "max_tokens": max_tokens}
        manifest = {
            "made_by": {"inputs": list(sources), "options": options},
            "format": "datatrove",
            "dtype": dtype.name,
            **known,
            "documents": sum(file["documents"] for file in target.written),
            "tokens": sum(file["tokens"] for file in target.written),
            "files": target.written,
        }
        write_json(scratch / (f"{output.name}.{MANIFEST}" if as_file else MANIFEST), manifest)
    return manifest


def _common_keys(sources: Sequence[str], files: Sequence[TokenFile]) -> Json:
    """Return what all sources say of their tokenizer: by its hash where all of `files` have one, else by its name.

    Raises InputError: they differ.
    """
    known: dict[str, tuple[Any, str]] = {}

    def agree(key: str, value: Any, where: str) -> None:
        before, first = known.setdefault(key, (value, where))
        if before != value:
            raise InputError(
                f"{where}: {key} is {value!r}, but {before!r} in {first}: their tokens have different meanings"
            )

    manifests = list(manifests_beside(files, above=[folder for folder in map(as_path, sources) if folder.is_dir()]))
    hashed = {path for place, made in manifests if "tokenizer_hash" in made for path in _described(place, made)}
    by_hash = all(str(file.path) in hashed for file in files)
    for file in files if not by_hash else ():
        if file.tokenizer is not None:
            agree("tokenizer", file.tokenizer, str(file.path))
    for place, made in manifests:
        for key in MANIFEST_KEYS:
            if key in made and not (key == "tokenizer" and by_hash and key in known):
                agree(key, made[key], str(place))
    return {key: value for key, (value, _) in known.items()}


def _described(place: AnyPath, made: Json) -> Iterator[str]:
    """Yield the paths of the files that a manifest is about: the one whose name it has, or those that it lists."""
    if place.name != MANIFEST:
        yield str(place.with_name(place.name.removesuffix(f".{MANIFEST}")))
        return
    for sums in sums_of_files(made):
        yield from (str(place.parent / name) for name in sums)


def _copy(
    files: Sequence[TokenFile], target: _Files, scratch: Path, dtype: np.dtype, seed: list[int] | None, report: Report
) -> None:
    tokens = sum(len(file.tokens) for file in files)
    with_loss = any(file.loss is not None for file in files)
    done = 0
    with progress("merging", tokens * (1 if seed is None else 2), report) as update, ExitStack() as stack:
        mixed = stack.enter_context(DocumentShuffle(scratch, dtype, tokens, seed, with_loss)) if seed else None
        for some in _documents(files, with_loss):
            (mixed or target).write(*some)
            done += len(some[0])
            update(done)
        for some in mixed.documents() if mixed else ():
            target.write(*some)
            done += len(some[0])
            update(done)


def _documents(files: Sequence[TokenFile], with_loss: bool) -> Iterator[Documents]:
    """Yield all documents of `files`, about a million tokens at a time; `with_loss` each with a mask."""
    for file in files:
        for start, lengths in document_blocks(file, DOCUMENTS_AT_ONCE):
            part = slice(start, start + int(lengths.sum()))
            for ids, some, _ in some_documents(file.tokens[part], lengths, None):
                loss = checked_loss(file, start, start + len(ids))
                yield ids, some, np.ones(len(ids), bool) if with_loss and loss is None else loss
                start += len(ids)
                release(file.tokens)


@dataclass
class _Files:
    """A writer of documents that begins another file before one grows beyond `max_tokens`."""

    folder: Path
    dtype: np.dtype
    tokenizer: str | None
    stem: str | None
    max_tokens: int | None
    written: list[Json] = field(default_factory=list)
    _writer: TokenWriter | None = None

    def write(self, ids: NDArray[np.integer], lengths: NDArray[np.int64], loss: Loss = None) -> None:
        ends = np.cumsum(lengths)
        first = 0
        while first < len(lengths):
            before = int(ends[first] - lengths[first])
            last = self._fitting(ends, before, first)
            if last == first:
                self.close()
                last = max(self._fitting(ends, before, first), first + 1)
            stop = int(ends[last - 1])
            self._writer = self._writer or TokenWriter(self._path(), self.dtype, self.tokenizer)
            self._writer.write(ids[before:stop], lengths[first:last], None if loss is None else loss[before:stop])
            first = last

    def _fitting(self, ends: NDArray[np.int64], before: int, first: int) -> int:
        """Return the end of the documents from `first` on that fit into the file that is open."""
        if self.max_tokens is None:
            return len(ends)
        room = self.max_tokens - (self._writer.tokens if self._writer else 0)
        return max(int(np.searchsorted(ends, before + room, side="right")), first)

    def _path(self) -> Path:
        return self.folder / f"{self.stem or f'{len(self.written):05d}'}{SUFFIX}"

    def close(self) -> None:
        """End the file that is open, if any; the next document begins another one."""
        if self._writer is None:
            return
        self._writer.close()
        sums = checksums(self.folder.glob(f"{self._path().stem}.*"))
        self.written.append({"documents": self._writer.documents, "tokens": self._writer.tokens, "xxh3": sums})
        self._writer = None
