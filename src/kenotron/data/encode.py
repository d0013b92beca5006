"""Text to token ids on several processes, in order and in bounded memory.

This process reads documents and writes tokens; in between, batches of about a megabyte go to workers:

    documents ──▶ batch 0 ──▶ worker A ──▶ ids of batch 0 ──▶
                  batch 1 ──▶ worker B ──▶ ids of batch 1 ──▶  (in the order of the documents)

A worker is a fresh Python with a pipe in and a pipe out: no fork of a process that holds threads, no second
run of the user's script, and it ends by itself when its pipe closes, also when this process is killed. With one
process no worker is started: the library's own threads do the work here.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError

BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class EncodeRules:
    """How a document becomes tokens: cut to `max_tokens`, then ended by `eos` unless it ends so already."""

    eos: int | None
    max_tokens: int | None


@dataclass(frozen=True)
class Encoded:
    """Ids of a batch of documents end to end, and how many tokens and UTF-8 bytes each document has."""

    ids: NDArray[np.uint32]
    lengths: NDArray[np.int64]
    sizes: NDArray[np.int64]
    done: int


def encode_documents(
    documents: Iterable[tuple[str, int]], tokenizer_json: str, rules: EncodeRules, processes: int
) -> Iterator[Encoded]:
    """Encode `documents` (text, work done so far) batch by batch, in order."""
    batches = _batches(documents)
    if processes <= 1:
        from .tokenizer import all_cores

        backend = _backend(tokenizer_json)
        for texts, done in batches:
            with all_cores():
                ids, lengths, sizes = encode_texts(backend, texts, rules)
            yield Encoded(ids, lengths, sizes, done)
        return
    with ExitStack() as stack:
        idle: queue.Queue[subprocess.Popen] = queue.Queue()
        for _ in range(processes):
            idle.put(stack.enter_context(_worker(tokenizer_json, rules)))
        pool = stack.enter_context(ThreadPoolExecutor(processes))
        waiting: deque[tuple[Future, int]] = deque()
        for texts, done in batches:
            waiting.append((pool.submit(_ask, idle, texts), done))
            if len(waiting) > 2 * processes:
                yield _answer(*waiting.popleft())
        while waiting:
            yield _answer(*waiting.popleft())


def encode_texts(
    backend, texts: list[str], rules: EncodeRules
) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]:
    """Ids of all `texts` end to end ``[tokens]``, tokens of each ``[texts]``, UTF-8 bytes of each ``[texts]``."""
    parts: list[list[int]] = []
    for encoding in backend.encode_batch_fast(texts):
        ids = encoding.ids[: rules.max_tokens]
        if rules.eos is not None and ids[-1:] != [rules.eos]:
            ids.append(rules.eos)
        parts.append(ids)
    lengths = np.array([len(ids) for ids in parts], dtype=np.int64)
    sizes = np.array([len(text.encode("utf-8")) for text in texts], dtype=np.int64)
    flat = np.concatenate([np.asarray(ids, dtype=np.uint32) for ids in parts])
    return flat, lengths, sizes


def _batches(documents: Iterable[tuple[str, int]]) -> Iterator[tuple[list[str], int]]:
    texts: list[str] = []
    characters = done = 0
    for text, done in documents:
        texts.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield texts, done
            texts, characters = [], 0
    if texts:
        yield texts, done


def _backend(tokenizer_json: str):
    import tokenizers

    return tokenizers.Tokenizer.from_str(tokenizer_json)


# ---- the calling side --------------------------------------------------------------------------------------


@contextmanager
def _worker(tokenizer_json: str, rules: EncodeRules) -> Iterator[subprocess.Popen]:
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", "from kenotron.data.encode import main; main()"]
    # A process group of its own: Ctrl-C is this process' affair, the worker ends with its pipe.
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0)
    try:
        _send(worker.stdin, (tokenizer_json, rules))
        yield worker
    finally:
        worker.kill()
        worker.wait()
        for pipe in (worker.stdin, worker.stdout):
            with suppress(BrokenPipeError):  # what it can no longer be told is no matter
                pipe.close()  # type: ignore[union-attr]


def _ask(idle: queue.Queue[subprocess.Popen], texts: list[str]):
    worker = idle.get()
    try:
        _send(worker.stdin, texts)
        return pickle.load(worker.stdout)  # type: ignore[arg-type]
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
        code = worker.wait()
        raise InputError(
            f"a tokenization process ended with code {code} (out of memory?); "
            "try a smaller dataset_processing_num_proc_per_process"
        ) from None
    finally:
        idle.put(worker)


def _answer(future: Future, done: int) -> Encoded:
    ids, lengths, sizes = future.result()
    return Encoded(ids, lengths, sizes, done)


def _send(pipe, message: object) -> None:
    pickle.dump(message, pipe, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.flush()


# ---- the worker --------------------------------------------------------------------------------------------


def main() -> None:
    """Answer batches until the pipe closes."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    tokenizer_json, rules = pickle.load(requests)
    backend = _backend(tokenizer_json)
    while True:
        try:
            texts = pickle.load(requests)
        except EOFError:
            return
        _send(answers, encode_texts(backend, texts, rules))
