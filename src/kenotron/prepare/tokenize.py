"""`kenotron data tokenize`: texts become files of tokens, shard by shard.

    this process     reads shard 0, 1, 2 … in batches of about a megabyte ──────────┐
    N workers        batch ──▶ ids (encode.py)                                      ▼
    this process     ids in order ──▶ .unfinished/work-…/00000.ds ──▶ 00000.ds and .unfinished/00000.json

A shard is done when its note `.unfinished/00000.json` is there; a killed run goes on with the shards that have none.
The manifest is written when all have one, and `.unfinished` is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from kenotron.config.errors import InputError, counted, os_errors
from kenotron.data.formats import PLAN, SUFFIX, UNFINISHED
from kenotron.data.formats.datatrove import TokenWriter, narrowest_dtype
from kenotron.data.manifest import MANIFEST, Json, checksums, read_json, refuse_other_work, write_json
from kenotron.prepare.inputs import InputShard, describe_hook, describe_inputs, open_input, plan_shards, row_hook
from kenotron.prepare.shuffle import DocumentShuffle
from kenotron.storage.files import locked, sync_folder
from kenotron.text.documents import LONGEST_CHUNK, MayBeBad, StreamableDocuments, TextChunk, split_long_chunk
from kenotron.text.encode import Answer, EncodeRules, encode_batches, in_batches
from kenotron.text.file_documents import FileDocuments, unread_files
from kenotron.text.progress import Report, progress
from kenotron.text.tokenizer import TextTokenizer

WORK = "work-"
"""So begin the folders in which processes work; one that was killed leaves its own until all is done."""


@dataclass(frozen=True)
class TokenizeOptions:
    """What decides the bytes, beside the inputs and the tokenizer."""

    column: str = "text"
    split: str = "train"
    config_name: str | None = None
    eos: bool = True
    bos: bool | None = None
    """None: as the tokenizer does by itself."""
    shuffle_documents: bool = False
    seed: int = 0
    shard_megabytes: float = 256
    filter: str | None = None
    repeat: str | None = None
    skip_bad: bool = False


def tokenize(
    inputs: Sequence[str],
    tokenizer: TextTokenizer,
    output: Path,
    options: TokenizeOptions,
    workers: int = 1,
    report: Report = print,
    share: tuple[int, int] = (0, 1),
) -> Json | None:
    """Fill the folder `output`, or what is missing of it, by `workers` processes; the manifest.

    Each of n processes may take a `share` (i, n), the shards i, i + n, i + 2n …: the last of them to finish writes the
    manifest, and None is returned if shards of others are missing. Raises InputError: invalid inputs; `output` holds
    other work.
    """
    work = Tokenization(inputs, tokenizer, options)
    if (done := finished(work, output)) is not None:
        report(f"{output} is done already")
        return done
    for source in work.texts:
        if isinstance(source, FileDocuments) and (line := unread_files(source.name)):
            report(line)
    make_folder(output)
    number, count = share
    try:
        with lock_output(output, report):
            if (done := finished(work, output)) is not None:  # by the process that was waited for
                return done
            begin(work, output)
            todo = [shard for shard in missing_shards(work, output) if shard.number % count == number]
            if count == 1:  # under the lock: the same command waits for this one
                _make_all(work, output, todo, workers, report)
        if count > 1:
            make_shards(work, output, todo, workers, report)
        with lock_output(output, report):
            if (done := finished(work, output)) is not None:
                return done
            if missing := missing_shards(work, output):
                report(f"{len(missing)} of {counted(len(work.shards), 'shard')} missing, which other shares make")
                return None
            return finish(work, output)
    except FileNotFoundError:  # another process has finished everything, and removed what the lock is in
        if (done := finished(work, output)) is None:
            raise
        return done


def _make_all(work: Tokenization, output: Path, todo: Sequence[InputShard], workers: int, report: Report) -> None:
    if len(todo) < len(work.shards):
        report(f"{len(work.shards) - len(todo)} of {counted(len(work.shards), 'shard')} done already")
    try:
        make_shards(work, output, todo, workers, report)
    except BaseException:
        if len(missing_shards(work, output)) == len(work.shards):  # nothing done: another command may begin here
            (output / UNFINISHED / PLAN).unlink(missing_ok=True)
        raise


def lock_output(output: Path, report: Report) -> AbstractContextManager[bool]:
    """Hold the lock of an unfinished output folder; `report` is called if another process holds it."""
    waiting = partial(report, f"waiting for another process that is tokenizing into {output}")
    return locked(output / UNFINISHED / "lock", on_wait=waiting)


def finished(work: Tokenization, output: Path) -> Json | None:
    """Return the manifest, if there is one. Raises InputError if it is of other work."""
    done = read_json(output / MANIFEST, made_by=dict)
    if done is not None:
        refuse_other_work(output, done["made_by"], work.made_by)
    return done


def begin(work: Tokenization, output: Path) -> None:
    """Leave the plan in `output`. Raises InputError if other work was begun there."""
    plan = output / UNFINISHED / PLAN
    begun = read_json(plan, options=dict)
    if begun is not None:
        if work.options.skip_bad:  # what is finished had nothing to skip, or skipped it
            begun["options"]["skip_bad"] = True
        refuse_other_work(output, begun, work.made_by)
    write_json(plan, work.made_by)


def missing_shards(work: Tokenization, output: Path) -> list[InputShard]:
    """Return the shards that have no note yet."""
    return [shard for shard in work.shards if not _note(output / UNFINISHED, shard).exists()]


def finish(work: Tokenization, output: Path) -> Json:
    """Write and return the manifest, after all shards."""
    _refuse_changed(work)
    manifest = _manifest(work, output / UNFINISHED)
    write_json(output / MANIFEST, manifest)
    shutil.rmtree(output / UNFINISHED, ignore_errors=True)
    return manifest


def make_folder(output: Path) -> None:
    """Create the output folder. Raises InputError: it holds other files, or cannot be created."""
    if output.is_dir() and not (output / UNFINISHED).is_dir() and any(output.iterdir()):
        raise InputError(f"{output}: holds files that this command did not write; choose another --output")
    with os_errors(f"--output: cannot create {output}"):
        (output / UNFINISHED).mkdir(parents=True, exist_ok=True)


# ---- the plan ----------------------------------------------------------------------------------------------


class Tokenization:
    """One tokenization: its documents, shards and rules; `made_by` is what the manifest records of it."""

    def __init__(self, inputs: Sequence[str], tokenizer: TextTokenizer, options: TokenizeOptions) -> None:
        """Plan the shards from names and sizes. Raises InputError for invalid inputs."""
        self.tokenizer, self.options = tokenizer, options
        self.rules = _encode_rules(tokenizer, options)
        hook = row_hook(options.column, options.filter, options.repeat)
        self.texts = [
            open_input(name, options.column, options.split, options.config_name, options.skip_bad, hook)
            for name in inputs
        ]
        names = [source.name for source in self.texts]
        if doubled := [name for name in names if names.count(name) > 1]:
            raise InputError(f"INPUT: {doubled[0]} is listed twice; --repeat writes documents more than once")
        self.vocab_size = max(tokenizer.vocab_size, (self.rules.eos or 0) + 1, (self.rules.bos or 0) + 1)
        self.dtype = narrowest_dtype(self.vocab_size)
        hooks = {
            "filter": describe_hook(options.filter, "--filter"),
            "repeat": describe_hook(options.repeat, "--repeat"),
        }
        self.made_by: Json = {
            "inputs": names,
            "content": describe_inputs(self.texts),
            "tokenizer": {"name": tokenizer.name, "hash": tokenizer.hash},
            "options": asdict(options) | hooks | {"bos": self.rules.bos is not None},
        }
        self.shards = plan_shards(self.texts, max(int(options.shard_megabytes * 1e6), 1))


def _encode_rules(tokenizer: TextTokenizer, options: TokenizeOptions) -> EncodeRules:
    """Spell out both tokens, so that nothing depends on what the tokenizer adds by itself."""
    eos = tokenizer.eos_token_id if options.eos else None
    if options.eos and eos is None:
        raise InputError(f"--eos: tokenizer {tokenizer.name} names no end-of-text token; use --no-eos to do without")
    bos = tokenizer.bos_token_id
    if options.bos and bos is None:
        raise InputError(f"--bos: tokenizer {tokenizer.name} names no beginning-of-text token")
    by_itself = bos is not None and tokenizer.encode("a")[:1] == [bos]
    with_bos = by_itself if options.bos is None else options.bos
    return EncodeRules(eos=eos, max_tokens=None, bos=bos if with_bos else None, bare=True)


def _refuse_changed(work: Tokenization) -> None:
    for name, now in describe_inputs(work.texts).items():
        if now != work.made_by["content"][name]:
            raise InputError(f"{name}: changed while it was read; remove the output folder and start again")


def _manifest(work: Tokenization, notes: Path) -> Json:
    counts = {"documents": int, "tokens": int, "bytes": int, "skipped": int}
    shards = [read_json(_note(notes, shard), **counts) or {} for shard in work.shards]
    first = [problem for shard in shards for problem in shard.pop("first_skipped", [])]
    totals = {key: sum(shard[key] for shard in shards) for key in counts}
    if not totals["tokens"]:
        raise InputError(f"{', '.join(work.made_by['inputs'])}: no text in it (every file or row is empty)")
    return {
        "made_by": work.made_by,
        "tokenizer": work.tokenizer.name,
        "tokenizer_hash": work.tokenizer.hash,
        "vocab_size": work.vocab_size,
        "format": "datatrove",
        "dtype": work.dtype.name,
        "eos": work.rules.eos,
        "bos": work.rules.bos,
        **totals,
        "first_skipped": first[: MayBeBad.FIRST],
        "files": [shard for shard in shards if shard["tokens"]],
    }


def _note(notes: Path, shard: InputShard) -> Path:
    return notes / f"{shard.number:05d}.json"


# ---- shards ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _ShardChunk(TextChunk):
    """A chunk of a document of shard number `shard`; `done` bytes of input were read with it."""

    shard: int


def make_shards(work: Tokenization, output: Path, todo: Sequence[InputShard], workers: int, report: Report) -> None:
    """Write the files and the note of every shard of `todo`."""
    if not todo:
        return
    notes = output / UNFINISHED
    scratch = Path(tempfile.mkdtemp(prefix=WORK, dir=notes))
    skipped: dict[int, tuple[int, list[str]]] = {}
    batches = encode_batches(_batches(work.texts, todo, skipped), work.tokenizer.to_json(), work.rules, max(workers, 1))
    with contextlib.ExitStack() as stack:
        update = stack.enter_context(progress("tokenizing", sum(shard.size for shard in todo), report))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        stack.enter_context(contextlib.closing(batches))  # type: ignore[type-var]
        here = next(batches, None)
        for shard in todo:
            writer = _ShardWriter(work, shard, scratch)
            while here is not None and here[0][0].shard == shard.number:
                batch, answer = here
                writer.add(batch, answer)
                update(batch[-1].done)
                here = next(batches, None)
            count, first = skipped.get(shard.number, (0, []))
            note = writer.finish(output) | {"skipped": count, "first_skipped": first}
            write_json(_note(notes, shard), note)


def _batches(
    texts: Sequence[StreamableDocuments], todo: Sequence[InputShard], skipped: dict[int, tuple[int, list[str]]]
) -> Iterator[list[_ShardChunk]]:
    """Yield batches, each of one shard."""
    for shard, done in zip(todo, np.cumsum([0, *(shard.size for shard in todo)]).tolist()):
        before = sum(source.skipped for source in texts)
        for source in texts:
            source.first_skipped.clear()  # those of this shard come
        yield from in_batches(_shard_chunks(texts, shard, done))
        first = [problem for source in texts for problem in source.first_skipped]
        skipped[shard.number] = (sum(source.skipped for source in texts) - before, first)


def _shard_chunks(texts: Sequence[StreamableDocuments], shard: InputShard, done: int) -> Iterator[_ShardChunk]:
    for number, byte_range in shard.byte_ranges:
        starts = True
        for chunk in texts[number].read(byte_range):
            for each in split_long_chunk(chunk, LONGEST_CHUNK):  # a text file's are short already
                yield _ShardChunk(each.text, done + each.done, starts, each.last, shard.number)
                starts = each.last
        done += byte_range.size


class _ShardWriter:
    """Writes the chunks of a shard's documents; no file comes into being where there is no token."""

    def __init__(self, work: Tokenization, shard: InputShard, scratch: Path) -> None:
        self.work, self.shard, self.scratch = work, shard, scratch
        self.bytes = 0
        self._open = 0  # tokens of a document that goes on
        self._sink: TokenWriter | DocumentShuffle | None = None

    def add(self, batch: list[_ShardChunk], answer: Answer) -> None:
        """Append the ids of a batch."""
        ids, ends = answer.ids, np.cumsum(answer.lengths)[[chunk.ends for chunk in batch]]
        ends = ends[np.diff(ends, prepend=-self._open) > 0]  # an empty text without eos and bos is no document
        self._open = len(ids) - int(ends[-1]) if len(ends) else self._open + len(ids)
        if len(ids) or len(ends):
            self._sink = self._sink or self._open_sink()
            self._sink.append(ids, ends)
        self.bytes += int(answer.sizes.sum())

    def finish(self, output: Path) -> Json:
        """Move the files into `output`, and return what the manifest says of them."""
        sink = self._sink
        if sink is None:
            return {"documents": 0, "tokens": 0, "bytes": self.bytes, "xxh3": {}}
        if isinstance(sink, DocumentShuffle):
            with sink as shuffle:
                sink = self._open_writer()
                for ids, lengths, _ in shuffle.documents():
                    sink.write(ids, lengths)
        sink.close()
        sums = checksums(self.scratch.iterdir())
        for name in sums:
            os.replace(self.scratch / name, output / name)
        sync_folder(output)
        return {"documents": sink.documents, "tokens": sink.tokens, "bytes": self.bytes, "xxh3": sums}

    def _open_sink(self) -> TokenWriter | DocumentShuffle:
        options = self.work.options
        if not options.shuffle_documents:
            return self._open_writer()
        seed = [options.seed, self.shard.number]
        return DocumentShuffle(self.scratch / "shuffle", self.work.dtype, self.shard.size, seed)

    def _open_writer(self) -> TokenWriter:
        path = self.scratch / f"{self.shard.number:05d}{SUFFIX}"
        return TokenWriter(path, self.work.dtype, self.work.tokenizer.name)
