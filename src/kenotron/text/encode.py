"""Encode text to token ids on several processes, in order and in bounded memory.

This process reads documents and writes tokens; in between, batches of about a megabyte go to workers:

    documents ──▶ batch 0 ──▶ worker A ──▶ ids of batch 0 ──▶
                  batch 1 ──▶ worker B ──▶ ids of batch 1 ──▶  (in the order of the documents)

A worker is a new Python process with an input and an output pipe: no fork of a process with threads, no second run of
the user's script, and it ends when its pipe closes, also if this process is killed. With one process no worker is
started: the library's own threads do the work in this process.
"""

import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError
from kenotron.text.documents import TextChunk
from kenotron.text.pretoken_cache import CachedBPE
from kenotron.text.sft import encode_examples
from kenotron.text.tokenizer import all_cores, library_ids

BATCH_CHARACTERS = 1 << 20


class Answer(NamedTuple):
    """Concatenated ids of a batch of texts ``[tokens]``, and the numbers of ids and UTF-8 bytes of each ``[texts]``.

    For fine-tuning it also has whether each token is in the loss ``[tokens]``.
    """

    ids: NDArray[np.uint32]
    lengths: NDArray[np.int64]
    sizes: NDArray[np.int64]
    loss: NDArray[np.bool_] | None = None


AnyChunk = TypeVar("AnyChunk", bound=TextChunk)


@dataclass(frozen=True)
class EncodeRules:
    """The rules of tokenization: a document is cut to `max_tokens`, and `eos` is appended unless it ends so already.

    With `examples` a document is an example of text/sft.py, whose tokens have a loss mask.

    With `max_tokens` every chunk of a long text counts as a document. With `bare`, the tokens that the tokenizer adds
    around a text are left out, and every document begins with `bos` unless that is None.
    """

    eos: int | None
    max_tokens: int | None
    bos: int | None = None
    bare: bool = False
    examples: bool = False


def encode_documents(
    chunks: Iterable[AnyChunk], tokenizer_json: str, rules: EncodeRules, processes: int
) -> Iterator[tuple[list[AnyChunk], Answer]]:
    """Encode `chunks` in batches, in order; with one process by the library's threads."""
    batches = in_batches(chunks)
    if processes > 1:
        yield from encode_batches(batches, tokenizer_json, rules, processes)
        return
    answer = _answerer(tokenizer_json, rules)
    for batch in batches:
        with all_cores():
            found = answer(*_texts(batch))
        yield batch, found


def encode_batches(
    batches: Iterable[list[AnyChunk]], tokenizer_json: str, rules: EncodeRules, processes: int
) -> Iterator[tuple[list[AnyChunk], Answer]]:
    """Yield every batch with its ids, in order, from `processes` workers; at most two batches per worker in flight."""
    with ExitStack() as stack:
        idle: queue.Queue[subprocess.Popen] = queue.Queue()
        workers = [stack.enter_context(_worker()) for _ in range(processes)]  # they import concurrently
        for worker in workers:
            with _end_reported(worker):
                _send(worker.stdin, (tokenizer_json, rules))
            idle.put(worker)
        pool = stack.enter_context(ThreadPoolExecutor(processes))
        waiting: deque[tuple[list[AnyChunk], Future]] = deque()
        for batch in batches:
            waiting.append((batch, pool.submit(_ask, idle, _texts(batch))))
            if len(waiting) > 2 * processes:
                batch, future = waiting.popleft()
                yield batch, future.result()
        for batch, future in waiting:
            yield batch, future.result()


def encode_chunks(
    encode: Callable[[list[str], bool], list[list[int]]],
    texts: list[str],
    starts: list[bool],
    ends: list[bool],
    rules: EncodeRules,
) -> Answer:
    """Return the ids of all `texts`, from `encode(texts, add_special_tokens)`.

    Special tokens are added around documents, not around their chunks; none but bos and eos with `rules.bare`.
    """
    parts: list[list[int]] = [[]] * len(texts)
    for start in (True, False):
        chosen = [place for place, starts_here in enumerate(starts) if starts_here == start]
        for place, found in zip(chosen, encode([texts[place] for place in chosen], start and not rules.bare)):
            ids = found[: rules.max_tokens]
            if start and rules.bos is not None and ids[:1] != [rules.bos]:
                ids.insert(0, rules.bos)
            has_end = rules.eos is not None and ids[-1:] == [rules.eos]
            if rules.eos is not None and ends[place] and not has_end:
                ids.append(rules.eos)
            elif has_end and not ends[place] and not rules.bare:
                ids.pop()
            parts[place] = ids
    return _end_to_end(parts, [len(text.encode()) for text in texts])


def _end_to_end(parts: list[list[int]], sizes: list[int], loss: NDArray[np.bool_] | None = None) -> Answer:
    ids = np.concatenate([np.asarray(part, dtype=np.uint32) for part in parts])
    return Answer(ids, np.array([len(part) for part in parts], np.int64), np.array(sizes, np.int64), loss)


def _answerer(tokenizer_json: str, rules: EncodeRules) -> Callable[[list[str], list[bool], list[bool]], Answer]:
    """Return a function (texts, starts, ends of documents) → Answer."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(tokenizer_json)
    words = CachedBPE.of(backend) if rules.bare else None

    def encode(texts: list[str], special: bool) -> list[list[int]]:
        return words.encode(texts) if words else library_ids(backend, texts, special)

    def answer(texts: list[str], starts: list[bool], ends: list[bool]) -> Answer:
        if not rules.examples:
            return encode_chunks(encode, texts, starts, ends, rules)
        found = encode_examples(backend, texts, rules.eos, rules.max_tokens)
        loss = np.concatenate([example.loss_mask for example in found])
        return _end_to_end([example.ids for example in found], [example.bytes for example in found], loss)

    return answer


def _texts(batch: Sequence[TextChunk]) -> tuple[list[str], list[bool], list[bool]]:
    return [p.text for p in batch], [p.starts for p in batch], [p.ends for p in batch]


def in_batches(chunks: Iterable[AnyChunk]) -> Iterator[list[AnyChunk]]:
    """Yield batches of about a megabyte."""
    batch: list[AnyChunk] = []
    characters = 0
    for chunk in chunks:
        batch.append(chunk)
        characters += len(chunk.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


# ---- the calling side --------------------------------------------------------------------------------------


@contextmanager
def _worker() -> Iterator[subprocess.Popen]:
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", "from kenotron.text.encode import main; main()"]
    # A separate process group: Ctrl-C stops only this process, and the worker ends with its pipe.
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0)
    try:
        yield worker
    finally:
        worker.kill()
        worker.wait()
        for pipe in (worker.stdin, worker.stdout):
            with suppress(BrokenPipeError):  # the worker has already exited
                pipe.close()  # type: ignore[union-attr]


def _ask(idle: queue.Queue[subprocess.Popen], texts: tuple[list[str], list[bool], list[bool]]):
    worker = idle.get()
    try:
        with _end_reported(worker):
            _send(worker.stdin, texts)
            answer = pickle.load(worker.stdout)  # type: ignore[arg-type]
    finally:
        idle.put(worker)
    if isinstance(answer, InputError):
        raise answer
    return answer


@contextmanager
def _end_reported(worker: subprocess.Popen) -> Iterator[None]:
    """Raise InputError if the worker has ended, or sends an invalid answer."""
    try:
        yield
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
        with suppress(subprocess.TimeoutExpired):
            worker.wait(1)
        worker.kill()
        raise InputError(
            f"a tokenization process ended with code {worker.wait()} (out of memory?); "
            "try fewer of them (dataset_processing_num_proc_per_process, --workers)"
        ) from None


def _send(pipe, message: object) -> None:
    pickle.dump(message, pipe, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.flush()


# ---- the worker --------------------------------------------------------------------------------------------


def main() -> None:
    """Encode batches until the pipe closes."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of libraries must not mix with answers
    tokenizer_json, rules = pickle.load(requests)
    answer_to = _answerer(tokenizer_json, rules)
    while True:
        try:
            texts = pickle.load(requests)
        except EOFError:
            return
        answer: Answer | InputError
        try:
            answer = answer_to(*texts)
        except InputError as error:
            answer = error
        _send(answers, answer)
