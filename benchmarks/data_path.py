"""The data path alone: cached tokens on disk → shuffled order → micro-batches in numpy, in one process.

    python benchmarks/data_path.py

Two claims: at least 20 M tokens/s from a memory map, and a resume at sample 10^9 costs what a start at sample 0 costs.
The tokens are random numbers in a file like the cache's (64 M tokens of 2 bytes, in the page cache). What is timed is
`OpenStage.read`, which is all that a step asks of data: order, gather, cut into inputs and labels (with `masking` also
documents, positions and masked borders).
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from kenotron.config.data_stages import Data
from kenotron.data.cache import SplitTokens
from kenotron.data.open_stage import OpenStage
from kenotron.data.order import Mixing, Order
from kenotron.data.ramps import levels
from kenotron.data.source import SampleRange, TokenSource
from kenotron.data.sources.token_folder import TokenFolder
from kenotron.data.stage_plan import StagePlan
from kenotron.kernels.hashing import derive_key
from kenotron.storage.arrays import map_local_array

TOKENS = 64 * 2**20
DOCUMENT = 700  # tokens of a document
BAR = 20e6
SECONDS = 1.5


def make_split(folder: Path) -> SplitTokens:
    """A memory map of random 2-byte tokens."""
    rng = np.random.default_rng(0)
    file = folder / "train.tokens"
    with open(file, "wb") as stream:
        for _ in range(0, TOKENS, 2**22):
            stream.write(rng.integers(0, 32768, 2**22, dtype=np.uint16).tobytes())
    ends = np.arange(DOCUMENT, TOKENS + 1, DOCUMENT, dtype=np.uint64)
    tokens = map_local_array(file, np.dtype("<u2"), 0, TOKENS)
    return SplitTokens(file, "cache", tokens, ends, bytes=4 * TOKENS, max_id=32767)


def open_sources(split: SplitTokens, sequence_length: int, sources: int) -> OpenStage:
    """A stage of `sources` equal sources on the same file, each as text in the cache is read."""
    windows = TokenFolder("made", [split], sequence_length, vocab_size=1 << 16, watched=False)
    opened: list[TokenSource] = [SampleRange(windows, 0, len(windows)) for _ in range(sources)]
    order = Order(
        [len(source) for source in opened],
        [derive_key("bench", number) for number in range(sources)],
        Mixing([1.0 + number for number in range(sources)]),
    )
    stage = StagePlan(0, "bench", 1, 10**12, sequence_length, levels(None, 1), Data(dataset=None), ())
    return OpenStage(stage, opened, order)


def tokens_per_second(opened: OpenStage, sequences: int, start: int, masking: bool) -> float:
    """Batches of `sequences` samples from sample `start` on, for `SECONDS`."""
    began, position = time.perf_counter(), start
    while time.perf_counter() - began < SECONDS:
        positions = np.arange(position, position + sequences, dtype=np.int64)
        opened.read(positions, positions, masking)
        position += sequences
    return (position - start) * opened.stage.sequence_length / (time.perf_counter() - began)


def first_batch_seconds(split: SplitTokens, start: int) -> float:
    """Opening a stage and its first batch at sample `start`; the median of many."""
    times = []
    for number in range(30):
        began = time.perf_counter()
        opened = open_sources(split, 1024, 3)
        positions = np.arange(start + number, start + number + 8, dtype=np.int64)
        opened.read(positions, positions, False)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        split = make_split(folder)
        np.asarray(split.tokens).sum()  # into the page cache
        print(f"{'sequence':>8} {'batch':>6} {'sources':>8} {'masking':>8} {'M tokens/s':>11}")
        for sequence_length, sequences in [(256, 8), (256, 64), (1024, 8), (2048, 8), (4096, 4), (4096, 16)]:
            for sources, masking in [(1, False), (3, False), (1, True)]:
                opened = open_sources(split, sequence_length, sources)
                speed = tokens_per_second(opened, sequences, 0, masking)
                below = "" if speed >= BAR else "   below the bar"
                print(f"{sequence_length:8} {sequences:6} {sources:8} {masking!s:>8} {speed / 1e6:11.1f}{below}")
        for start in (0, 10**9, 10**12):
            print(f"open and first batch at sample {start:>13,}: {first_batch_seconds(split, start) * 1e3:.2f} ms")
        print(f"bar: {BAR / 1e6:.0f} M tokens/s, and the same cost at every sample")


if __name__ == "__main__":
    main()
