"""What is made once and kept: tokens on disk, memory-mapped when read.

    $KENOTRON_CACHE, else ~/.cache/kenotron
    ├── tokens/<key>/             key = hash of (content, tokenizer, rules)
    │   ├── meta.json             counts, written last
    │   ├── train.tokens          little-endian uint16 (vocabulary up to 65,536) or uint32, documents end to end
    │   ├── train.ends            uint64, where each document ends, in tokens
    │   ├── train.loss            bool, whether each token is learnt; only of prompts and answers
    │   └── validation.tokens, …
    ├── tokenizers/<key>/         trained tokenizers
    ├── known/<signature>         content hash of files by path, size and time, so that files are hashed once
    └── remote/                   blocks of files on other machines (remote/blocks.py)

An entry is built in ``<key>.tmp-<random>``, synced, and renamed: it is whole or not there. A lock file keeps several
processes from doing the same work; it is the kernel's lock, so a killed process leaves none. Where a file system
has no locks, all of them build, and the first rename wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError

from .encode import Encoded, EncodeRules, encode_documents
from .progress import Report, progress
from .split import held_out_limit, marked, share_of_hashes
from .texts import Piece, Texts
from .tokenizer import Tokenizer

FORMAT = 2
SPLITS = ("train", "validation")
PROCESS_START = time.time()


class Stopped(Exception):
    """The run was closed while this went on in the background."""


def cache_root() -> Path:
    """``$KENOTRON_CACHE``, else ``~/.cache/kenotron``."""
    return Path(os.environ.get("KENOTRON_CACHE") or "~/.cache/kenotron").expanduser()


# ---- an entry ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitTokens:
    """One side of a cache entry, memory-mapped.

    `tokens` ``[tokens]`` uint16 or uint32; `ends` ``[documents]`` uint64, the end of each document; `bytes` the UTF-8
    bytes of the text; `max_id` the largest id (-1 when empty). `loss` ``[tokens]``: whether each is to be learnt.
    """

    tokens: NDArray[np.unsignedinteger]
    ends: NDArray[np.uint64]
    bytes: int
    max_id: int
    loss: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class TokenCache:
    """A tokenized set of texts. `content` names the texts, whatever the tokenizer."""

    path: Path
    content: str
    train: SplitTokens
    validation: SplitTokens
    skipped: int
    """Files left out because they are no UTF-8, or rows without an answer."""
    smallest_hash: bool
    """Whether no document fell below the fraction, so that the one with the smallest hash is held out."""


def open_tokens(
    texts: Texts,
    tokenizer: Tokenizer,
    rules: EncodeRules,
    val_fraction: float,
    processes: int = 1,
    overwrite: bool = False,
    report: Report = print,
    stop: threading.Event | None = None,
    chosen: Collection[int] = (),
) -> TokenCache:
    """The tokens of `texts`, from the cache, or made now by `processes` processes and kept.

    `chosen` are hashes of texts that are held out whatever `val_fraction` says (split.py).

    Where `stop` is set meanwhile, by another thread, this raises Stopped and leaves nothing behind.

    Errors (InputError): whatever `texts` finds wrong with its files; no document at all; the cache cannot be written.
    """
    content = texts.content_hash() if overwrite else content_hash(texts)
    recipe = f"tokens {FORMAT} {content} {tokenizer.hash} {rules.eos} {rules.max_tokens} {val_fraction!r}"
    if chosen:
        recipe += f" {sorted(chosen)}"
    path = cache_root() / "tokens" / _digest(recipe)

    def build(folder: Path) -> None:
        _tokenize(folder, texts, tokenizer, rules, val_fraction, chosen, processes, report, stop)

    cached_folder(path, build, report, f"tokenizing {texts.name}", overwrite, lambda folder: _meta(folder) is not None)
    return _read(path, content)


def _meta(path: Path) -> dict[str, Any] | None:
    """What an entry says of itself; None where it is not there or not whole."""
    try:
        return json.loads((path / "meta.json").read_text())
    except (OSError, ValueError):
        return None


def _read(path: Path, content: str) -> TokenCache:
    meta = _meta(path)
    if meta is None:
        raise InputError(f"{path / 'meta.json'}: damaged token cache; delete {path} and it is made again")
    sides = {}
    for split in SPLITS:
        of = meta[split]
        tokens = map_array(path / f"{split}.tokens", np.dtype(meta["dtype"]), of["tokens"])
        ends = map_array(path / f"{split}.ends", np.dtype("<u8"), of["documents"])
        loss = map_array(path / f"{split}.loss", np.dtype(np.bool_), of["tokens"]) if meta.get("loss") else None
        sides[split] = SplitTokens(tokens, ends, of["bytes"], of["max_id"], loss)
    return TokenCache(path, content, sides["train"], sides["validation"], meta["skipped"], meta["smallest_hash"])


def map_array(file: Path, dtype: np.dtype, length: int) -> NDArray:
    size = file.stat().st_size if file.exists() else -1
    if size != length * dtype.itemsize:
        raise InputError(
            f"{file}: damaged token cache (expected {length * dtype.itemsize} bytes, found {size}); "
            f"delete {file.parent} and it is made again"
        )
    return np.memmap(file, dtype, "r", shape=(length,)) if length else np.empty(0, dtype)


# ---- making one --------------------------------------------------------------------------------------------


@dataclass
class _Side:
    """Counts of one split while it is written."""

    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    max_id: int = -1


class _SplitWriter:
    """Appends pieces of documents to one split's two files."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, loss: bool) -> None:
        # Unbuffered: what is written comes in large pieces, and a full disk shows where it happens.
        self.token_file = open(folder / f"{split}.tokens", "wb", buffering=0)  # noqa: SIM115 (see close)
        self.end_file = open(folder / f"{split}.ends", "wb", buffering=0)  # noqa: SIM115
        self.loss_file = open(folder / f"{split}.loss", "wb", buffering=0) if loss else None  # noqa: SIM115
        self.dtype = dtype
        self.side = _Side()

    def write(self, part: Encoded, mine: NDArray[np.bool_]) -> None:
        """Append the pieces of `part` that `mine` ``[pieces]`` marks."""
        if not mine.any():
            return
        ids, lengths, ends = part.ids[np.repeat(mine, part.lengths)], part.lengths[mine], part.ends[mine]
        largest = int(ids.max()) if len(ids) else -1
        assert largest <= np.iinfo(self.dtype).max, f"token {largest} does not fit {self.dtype}"
        _write_all(self.token_file, ids.astype(self.dtype).tobytes())
        _write_all(self.end_file, (self.side.tokens + np.cumsum(lengths))[ends].astype("<u8").tobytes())
        if self.loss_file is not None and part.loss is not None:
            _write_all(self.loss_file, part.loss[np.repeat(mine, part.lengths)].tobytes())
        self.side.tokens += len(ids)
        self.side.documents += int(ends.sum())
        self.side.bytes += int(part.sizes[mine].sum())
        self.side.max_id = max(self.side.max_id, largest)

    def close(self) -> None:
        self.token_file.close()
        self.end_file.close()
        if self.loss_file is not None:
            self.loss_file.close()


def _write_all(file: io.FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _tokenize(
    folder: Path,
    texts: Texts,
    tokenizer: Tokenizer,
    rules: EncodeRules,
    val_fraction: float,
    chosen: Collection[int],
    processes: int,
    report: Report,
    stop: threading.Event | None,
) -> None:
    """Fill `folder` with an entry."""
    # The end-of-document token may be the model config's, beyond the tokenizer's own.
    dtype = np.dtype("<u2" if max(tokenizer.vocab_size, (rules.eos or 0) + 1) <= 1 << 16 else "<u4")

    def watched() -> Iterator[Piece]:
        for piece in texts.documents():
            if stop is not None and stop.is_set():
                raise Stopped(f"tokenizing {texts.name} was stopped")
            yield piece if rules.max_tokens is None else piece._replace(last=True)

    started = time.monotonic()
    limit = held_out_limit(watched(), val_fraction)
    with contextlib.ExitStack() as stack:
        update = stack.enter_context(progress(f"tokenizing {texts.name}", texts.size, report))
        writers = {
            split: stack.enter_context(contextlib.closing(_SplitWriter(folder, split, dtype, rules.examples)))
            for split in SPLITS
        }
        for part in encode_documents(marked(watched(), limit, chosen), tokenizer.to_json(), rules, processes):
            writers["train"].write(part, ~part.held_out)
            writers["validation"].write(part, part.held_out)
            update(part.done)
    sides = {split: writer.side for split, writer in writers.items()}
    if not any(side.documents for side in sides.values()):
        why = "no row has an answer" if rules.examples else "every file or row is empty"
        raise InputError(f"{texts.name}: no text in it ({why})")
    meta: dict[str, Any] = {split: asdict(side) for split, side in sides.items()}
    meta |= {
        "format": FORMAT,
        "dtype": dtype.str,
        "skipped": texts.skipped,
        "texts": texts.name,
        "loss": rules.examples,
    }
    meta |= {"tokenizer": tokenizer.name, "created": time.time()}
    meta |= {"smallest_hash": limit > share_of_hashes(val_fraction)}
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    tokens = sum(side.tokens for side in sides.values())
    report(f"tokenized {texts.name}: {tokens:,} tokens in {time.monotonic() - started:.1f} s")


# ---- keys --------------------------------------------------------------------------------------------------


def content_hash(texts: Texts) -> str:
    """`texts.content_hash()`, remembered by signature."""
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


def chosen_hash(texts: Texts, val_fraction: float) -> int | None:
    """The hash of the one document that is held out because none falls below `val_fraction`; None where one does, or
    where there is but one. Remembered by content.
    """
    note = cache_root() / "known" / _digest(f"limit {content_hash(texts)} {val_fraction!r}")
    try:
        limit = int(note.read_text())
    except (OSError, ValueError):  # not known, or a crash of the machine has left it empty
        limit = held_out_limit(texts.documents(), val_fraction)
        _remember(note, str(limit))
    return limit - 1 if limit > share_of_hashes(val_fraction) else None


def _remember(note: Path, text: str) -> None:
    with _writable(note.parent):
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary = note.with_name(f"{note.name}.tmp-{os.getpid()}-{time.monotonic_ns()}")
        with open(temporary, "w") as stream:
            stream.write(text + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, note)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# ---- whole or not there ------------------------------------------------------------------------------------


def cached_folder(
    path: Path,
    build: Callable[[Path], None],
    report: Report,
    what: str,
    overwrite: bool = False,
    is_whole: Callable[[Path], bool] = Path.is_dir,
) -> None:
    """Make sure that the folder `path` is there and whole, by ``build(temporary folder)`` and a rename if it is not.

    `overwrite` builds it again, unless another process has done so since this one started.
    """
    if is_whole(path) and not overwrite:
        return
    with _writable(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(path.name + ".lock"), report, what) as alone:
            if is_whole(path) and not (overwrite and path.stat().st_mtime < PROCESS_START):
                return
            if alone:  # what lies there was left by a killed process
                for old in path.parent.glob(f"{path.name}.tmp-*"):
                    shutil.rmtree(old, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(prefix=f"{path.name}.tmp-", dir=path.parent))
            try:
                build(folder)
                _publish(folder, path)
            finally:
                shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, path: Path) -> None:
    """Sync and rename; if `path` came into being meanwhile, replace it."""
    os.chmod(folder, 0o755)
    for file in folder.iterdir():
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())
    if path.is_dir():
        aside = Path(tempfile.mkdtemp(prefix=f"{path.name}.tmp-", dir=path.parent))
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, aside / "old")
        shutil.rmtree(aside, ignore_errors=True)
    try:
        os.rename(folder, path)
    except OSError:
        if not path.is_dir():  # otherwise another process was first, with the same content
            raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(file: Path, report: Report, what: str) -> Iterator[bool]:
    """Hold the kernel's lock on `file`; say once that another process is waited for. Yields False without locks."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system: the rename alone keeps entries whole
        yield False
        return
    with open(file, "w") as stream:
        told = alone = False
        while not alone:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                if not told:
                    report(f"waiting for another process that is {what}")
                told = True
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        yield alone


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """One line for a cache that cannot be written."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write the cache {folder}: {error.strerror or error}; set KENOTRON_CACHE to a folder with space"
        ) from None
