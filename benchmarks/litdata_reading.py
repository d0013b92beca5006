"""Reading litdata's token chunks, shuffled: ours beside litdata's own `StreamingDataset` on the same files.

    pip install --no-deps litdata lightning-utilities obstore tifffile    # its other needs are Kénotron's
    python benchmarks/litdata_reading.py

Litdata writes 2^25 tokens as int32 chunks of 2^22; both read samples of 4096 + 1 in one process, in batches of 32, and
hand over what a step eats: inputs and labels as int64. The bar: ours >= 3 x.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
from litdata.streaming.writer import BinaryWriter

from kenotron.config import load
from kenotron.data import open_run
from kenotron.kernels.host_memory import keep_freed_memory
from token_files import LENGTH, SEQUENCES, configure, tokens_per_second

TOKENS, CHUNK, DOCUMENT, ROUNDS = 1 << 25, 1 << 22, 1024, 5


def write(folder: str) -> None:
    random = np.random.default_rng(0)
    writer = BinaryWriter(folder, chunk_size=CHUNK, item_loader=TokensLoader(block_size=LENGTH + 1))
    for number in range(TOKENS // DOCUMENT):
        ids = random.integers(0, 32768, DOCUMENT, dtype=np.int32)
        writer[number] = torch.from_numpy(ids)
    writer.done()
    writer.merge(1)


def ours(folder: str) -> Callable[[int], object]:
    content = configure([folder], None).model_dump(by_alias=True)
    content["data_stages"][0]["data"]["dataset"] = {"tokens": folder}
    data = open_run(load(content), 1, lambda line: None)
    return lambda step: data.batch(step + 1)


def theirs(folder: str) -> Callable[[int], object]:
    dataset = StreamingDataset(folder, item_loader=TokensLoader(block_size=LENGTH + 1), shuffle=True, drop_last=True)

    def batches() -> Iterator[object]:
        while True:
            for rows in StreamingDataLoader(dataset, batch_size=SEQUENCES, num_workers=0):
                yield rows[:, :-1].long(), rows[:, 1:].long()

    endless = batches()
    return lambda step: next(endless)


def main() -> None:
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        write(folder)
        print(f"written in {time.perf_counter() - began:.0f} s")
        readers = {"kenotron": ours(folder), "litdata": theirs(folder)}
        speeds: dict[str, list[float]] = {name: [] for name in readers}
        for number, (name, read) in itertools.product(range(ROUNDS), readers.items()):
            speeds[name].append(tokens_per_second(read, number * 1000) / 1e6)
        for name, found in speeds.items():
            print(f"{name}: {statistics.median(found):.1f} M tokens/s (best {max(found):.1f})")
        ratios = sorted(a / b for a, b in zip(*speeds.values()))
        print(f"ratio: {statistics.median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f}; bar 3)")


if __name__ == "__main__":
    main()
