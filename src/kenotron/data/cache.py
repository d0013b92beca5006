"""The token cache: text is tokenized once, kept on disk, and memory-mapped when read.

$KENOTRON_CACHE, else ~/.cache/kenotron
├── tokens/<key>/             key = hash of (content, tokenizer, rules)
│   ├── meta.json             counts and checksums, written last
│   ├── train.tokens          little-endian uint16 (vocabulary up to 65,536) or uint32, documents end to end
│   ├── train.ends            uint64, where each document ends, in tokens
│   ├── train.loss            bool, whether each token has a loss; only for prompts and answers
│   ├── validation.tokens, …
│   └── validation.npy, ends.npy    of a stream: its first held-out documents, for validation
├── tokenizers/<key>/         trained tokenizers
├── known/<signature>         content hash of files by path, size and time, so that files are hashed once
└── remote/                   blocks of files on other machines (storage/blocks.py)
"""

import contextlib
import json
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError
from kenotron.data.cached_folder import cache_entry, cached_folder, map_cached_array, writable
from kenotron.data.formats.token_file import TokenFile
from kenotron.data.manifest import checksums
from kenotron.storage.files import cache_root, replace_file
from kenotron.text.documents import DocumentChunk, DocumentSource
from kenotron.text.encode import Answer, EncodeRules, encode_documents
from kenotron.text.hash_split import AssignedChunk, assign_sides, hash_threshold, threshold_of_fraction
from kenotron.text.progress import Report, progress
from kenotron.text.tokenizer import TextTokenizer

FORMAT = 2
SPLITS = ("train", "validation")


class Stopped(Exception):
    """The run was closed while tokenization was running in the background."""


# ---- an entry ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitTokens(TokenFile):
    """The training or validation split of a cache entry, memory-mapped; `path` is the entry's folder.

    `bytes` are the UTF-8 bytes of the text, `max_id` is the largest id (-1 when empty).
    """

    ends: NDArray[np.uint64]
    bytes: int = 0
    max_id: int = -1


class TokenCache:
    """The entry of a tokenized set of texts. `content` identifies the texts, independently of the tokenizer.

    `skipped` counts files that are not UTF-8, or rows without an answer. `smallest_hash`: no document's hash fell below
    the fraction, so the document with the smallest hash is held out.
    """

    def __init__(self, path: Path, content: str) -> None:
        self.path, self.content = path, content
        meta = json.loads((path / "meta.json").read_text())
        self.train, self.validation = (_split(path, meta, split) for split in SPLITS)
        self.skipped: int = meta["skipped"]
        self.smallest_hash: bool = meta["smallest_hash"]


def open_tokens(
    texts: DocumentSource,
    tokenizer: TextTokenizer,
    rules: EncodeRules,
    val_fraction: float,
    processes: int = 1,
    overwrite: bool = False,
    report: Report = print,
    stop: threading.Event | None = None,
    chosen: Collection[int] = (),
) -> TokenCache:
    """Return the tokens of `texts` from the cache, after tokenizing them with `processes` processes if needed.

    `chosen` are hashes of texts that are held out regardless of `val_fraction` (text/hash_split.py).

    If another thread sets `stop` meanwhile, this raises Stopped and leaves nothing behind.

    Raises InputError if `texts` finds problems with its files, there is no document, or the cache cannot be written.
    """
    content = texts.content_hash() if overwrite else content_hash(texts)
    recipe = f"tokens {FORMAT} {content} {tokenizer.hash} {rules.eos} {rules.max_tokens} {val_fraction!r}"
    if chosen:
        recipe += f" {sorted(chosen)}"
    path = cache_entry("tokens", recipe)

    def build(folder: Path) -> None:
        _tokenize(folder, texts, tokenizer, rules, val_fraction, chosen, processes, report, stop)

    def usable(folder: Path) -> bool:
        meta = _meta(folder)
        return meta is not None and (rules.examples or texts.skip_bad or not meta["skipped"])

    cached_folder(path, build, report, f"tokenizing {texts.name}", overwrite, usable)
    return TokenCache(path, content)


def _meta(path: Path) -> dict[str, Any] | None:
    """Return the metadata of an entry; None if it is missing or incomplete."""
    try:
        return json.loads((path / "meta.json").read_text())
    except (OSError, ValueError):
        return None


def _split(path: Path, meta: dict[str, Any], split: str) -> SplitTokens:
    of = meta[split]
    tokens = map_cached_array(path / f"{split}.tokens", np.dtype(meta["dtype"]), of["tokens"])
    ends = map_cached_array(path / f"{split}.ends", np.dtype("<u8"), of["documents"])
    loss = map_cached_array(path / f"{split}.loss", np.dtype(np.bool_), of["tokens"]) if meta.get("loss") else None
    return SplitTokens(path, "cache", tokens, ends, loss, bytes=of["bytes"], max_id=of["max_id"])


def changed_files(path: Path) -> list[Path] | None:
    """Return the files of the entry `path` that have changed since written; None if it has no checksums."""
    recorded = (_meta(path) or {}).get("xxh3")
    if not isinstance(recorded, dict):
        return None
    found = checksums(path / name for name in recorded if (path / name).exists())
    return [path / name for name, digest in recorded.items() if found.get(name) != digest]


# ---- building an entry -------------------------------------------------------------------------------------


class _SplitWriter:
    """Appends chunks of documents to the files of one split; `counts` are the split's numbers in the metadata."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, split: str, dtype: np.dtype, loss: bool) -> None:
        """Create the files, which are closed with `stack`."""
        self.token_file = stack.enter_context(open(folder / f"{split}.tokens", "wb"))  # noqa: SIM115 (see above)
        self.end_file = stack.enter_context(open(folder / f"{split}.ends", "wb"))  # noqa: SIM115
        self.loss_file = stack.enter_context(open(folder / f"{split}.loss", "wb")) if loss else None  # noqa: SIM115
        self.dtype = dtype
        self.counts = {"tokens": 0, "documents": 0, "bytes": 0, "max_id": -1}

    def write(self, batch: Sequence[AssignedChunk], answer: Answer, held_out: bool) -> None:
        """Append the chunks of a batch that belong to this split."""
        mine = np.array([chunk.held_out == held_out for chunk in batch])
        if not mine.any():
            return
        tokens, lengths = np.repeat(mine, answer.lengths), answer.lengths[mine]
        ids, ends = answer.ids[tokens], np.array([chunk.ends for chunk in batch])[mine]
        largest = int(ids.max()) if len(ids) else -1
        assert largest <= np.iinfo(self.dtype).max, f"token {largest} does not fit in {self.dtype}"
        self.token_file.write(ids.astype(self.dtype).tobytes())
        self.end_file.write((self.counts["tokens"] + np.cumsum(lengths))[ends].astype("<u8").tobytes())
        if self.loss_file is not None and answer.loss is not None:
            self.loss_file.write(answer.loss[tokens].tobytes())
        self.counts["tokens"] += len(ids)
        self.counts["documents"] += int(ends.sum())
        self.counts["bytes"] += int(answer.sizes[mine].sum())
        self.counts["max_id"] = max(self.counts["max_id"], largest)


def _tokenize(
    folder: Path,
    texts: DocumentSource,
    tokenizer: TextTokenizer,
    rules: EncodeRules,
    val_fraction: float,
    chosen: Collection[int],
    processes: int,
    report: Report,
    stop: threading.Event | None,
) -> None:
    """Tokenize `texts` and write the entry into `folder`."""
    # The end-of-document token may be the model config's, with an id beyond the tokenizer's vocabulary.
    dtype = np.dtype("<u2" if max(tokenizer.vocab_size, (rules.eos or 0) + 1) <= 1 << 16 else "<u4")

    def watched() -> Iterator[DocumentChunk]:
        for piece in texts.documents():
            if stop is not None and stop.is_set():
                raise Stopped(f"tokenizing {texts.name} was stopped")
            yield piece

    started = time.monotonic()
    limit = _threshold(texts, val_fraction, watched())
    with contextlib.ExitStack() as stack:
        update = stack.enter_context(progress(f"tokenizing {texts.name}", texts.size, report))
        writers = {split: _SplitWriter(stack, folder, split, dtype, rules.examples) for split in SPLITS}
        chunks = assign_sides(watched(), limit, chosen, separate=rules.max_tokens is not None)
        for batch, answer in encode_documents(chunks, tokenizer.to_json(), rules, processes):
            writers["train"].write(batch, answer, held_out=False)
            writers["validation"].write(batch, answer, held_out=True)
            update(batch[-1].done)
    meta: dict[str, Any] = {split: writer.counts for split, writer in writers.items()}
    if not any(meta[split]["documents"] for split in SPLITS):
        why = "no row has an answer" if rules.examples else "every file or row is empty"
        raise InputError(f"{texts.name}: no text in it ({why})")
    meta |= {
        "format": FORMAT,
        "dtype": dtype.str,
        "skipped": texts.skipped,
        "texts": texts.name,
        "loss": rules.examples,
    }
    meta |= {"tokenizer": tokenizer.name, "created": time.time(), "xxh3": checksums(folder.iterdir())}
    meta |= {"smallest_hash": limit > threshold_of_fraction(val_fraction)}
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    tokens = sum(meta[split]["tokens"] for split in SPLITS)
    for problem in texts.first_skipped:
        report(f"left out: {problem}")
    report(f"tokenized {texts.name}: {tokens:,} tokens in {time.monotonic() - started:.1f} s")


# ---- keys --------------------------------------------------------------------------------------------------


def content_hash(texts: DocumentSource) -> str:
    """Return `texts.content_hash()`, cached by signature."""
    signature = texts.signature()
    if signature is None:
        return texts.content_hash()
    note = cache_root() / "known" / signature
    with contextlib.suppress(OSError):
        if known := note.read_text().strip():  # a crash of the machine may have left it empty
            return known
    content = texts.content_hash()
    if texts.signature() == signature:
        _remember(note, content)
    return content


def chosen_hash(texts: DocumentSource, val_fraction: float) -> int | None:
    """Return the hash of the document that is held out because none falls below `val_fraction`.

    Return None if one does, or if there is only one document.
    """
    limit = _threshold(texts, val_fraction, texts.documents())
    return limit - 1 if limit > threshold_of_fraction(val_fraction) else None


def _threshold(texts: DocumentSource, val_fraction: float, documents: Iterator[DocumentChunk]) -> int:
    """Return `hash_threshold` of the `documents` of `texts`, cached by content, since it may read all of them."""
    note = cache_entry("known", f"limit of texts {content_hash(texts)} {val_fraction!r}")
    try:
        return int(note.read_text())
    except (OSError, ValueError):  # not cached, or a crash of the machine has left it empty
        limit = hash_threshold(documents, val_fraction)
        _remember(note, str(limit))
        return limit


def _remember(note: Path, text: str) -> None:
    with writable(note.parent):
        note.parent.mkdir(parents=True, exist_ok=True)
        replace_file(note, (text + "\n").encode())
