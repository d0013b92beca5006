"""Reading tokenized files: a Nanoset of two folders, shuffled, beside nanotron's algorithm on the same files.

    python benchmarks/token_files.py                     a minute; needs datatrove, whose reader nanotron uses

What is timed is what a step asks of data, in one process: where the next samples lie, and their ids as int64, inputs
and labels. Nanotron's algorithm: an index of one epoch, built by giving each next sample to the folder that lags its
weight most, then shuffled; each sample one read by datatrove's `DatatroveFolderDataset`; torch's `DataLoader` with a
collator that stacks them and makes a mask of the inputs and one of the labels. Its index counts: it is read for one
epoch, built once (in Python here; nanotron compiles that loop, so the ratio without it is printed too):

    ours >= 50 M tokens/s, and >= 3 x nanotron's algorithm over an epoch
    opening 10^11 tokens (a sparse file) and reading a batch <= 1 s and <= 200 MB, at the first step and near the last
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from kenotron.config import Config, load
from kenotron.data import open_run
from kenotron.kernels.host_memory import keep_freed_memory

LENGTH, SEQUENCES, TOKENS = 4096, 32, 1 << 26
WEIGHTS = (3.0, 1.0)
ROUNDS, SECONDS = 5, 2.0
OPEN = """
import sys, time
began = time.perf_counter()
import numpy
sys.path[:0] = [sys.argv[1]]
from token_files import configure
from kenotron.data import open_run
with open_run(configure([sys.argv[2]], None), 1, lambda line: None) as data:
    data.batch(int(sys.argv[3]))
assert "torch" not in sys.modules
seconds = time.perf_counter() - began
status = open("/proc/self/status").read()  # ru_maxrss would be the parent's
print(seconds, int(status.split("VmHWM:")[1].split()[0]) / 1024)
"""


def configure(folders: list[str], weights: list[float] | None) -> Config:
    dataset = {"dataset_folder": folders, "dataset_weights": weights}
    return load(
        {
            "general": {"project": "benchmark", "run": "token-files", "seed": 0},
            "model": {"init_method": {"std": 0.02}, "model_config": {"is_llama_config": True, "vocab_size": 32768}},
            "tokens": {
                "sequence_length": LENGTH,
                "micro_batch_size": SEQUENCES,
                "batch_accumulation_per_replica": 1,
                "train_steps": 10**9,
                "val_check_interval": -1,
            },
            "optimizer": {
                "optimizer_factory": {"name": "adamW"},
                "learning_rate_scheduler": {"learning_rate": 1e-3},
                "weight_decay": 0.0,
                "clip_grad": 1.0,
                "accumulate_grad_in_fp32": True,
            },
            "checkpoints": {"checkpoint_interval": 10**9, "checkpoints_path": "unused"},
            "data_stages": [
                {"name": "all", "start_training_step": 1, "data": {"dataset": dataset, "num_loading_workers": 0}}
            ],
        }
    )


def write(folder: Path) -> list[str]:
    """Two folders of two `.ds` files with random ids, in the page cache."""
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        for number in range(2):
            file = folder / name / f"{number}.ds"
            file.parent.mkdir(exist_ok=True)
            random.integers(0, 32768, TOKENS // 4, dtype=np.uint16).tofile(file)
            np.arange(700, TOKENS // 4 + 700, 700, dtype=np.uint64).clip(max=TOKENS // 4).tofile(f"{file}.index")
    return [str(folder / "a"), str(folder / "b")]


def ours(folders: list[str]) -> Callable[[int], object]:
    data = open_run(configure(folders, list(WEIGHTS)), 1, lambda line: None)
    return lambda step: data.batch(step + 1)


def nanosets(folders: list[str]) -> tuple[Callable[[int], object], float]:
    """What reads the next batch, and the seconds a sample that the index took."""
    import torch
    from datatrove.utils.dataset import DatatroveFolderDataset
    from torch.utils.data import DataLoader, DistributedSampler

    parts = [DatatroveFolderDataset(folder, LENGTH, token_size=2) for folder in folders]
    lengths, shares = [len(part) for part in parts], [weight / sum(WEIGHTS) for weight in WEIGHTS]
    began, taken, order = time.perf_counter(), [0] * len(parts), []
    for position in range(sum(lengths)):
        lag = [share * max(position, 1) - count for share, count in zip(shares, taken)]
        part = lag.index(max(lag))
        order.append((part, taken[part] % lengths[part]))
        taken[part] += 1
    np.random.RandomState(0).shuffle(order)
    seconds = time.perf_counter() - began

    def collate(samples: list[dict]) -> dict[str, object]:
        rows = np.vstack([sample["input_ids"] for sample in samples])
        inputs, labels, mask = rows[:, :-1], rows[:, 1:], np.ones((len(rows), LENGTH), dtype=np.bool_)
        batch = {"input_ids": inputs, "input_mask": mask, "label_ids": labels, "label_mask": mask.copy()}
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    class Nanoset(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(order)

        def __getitem__(self, position: int) -> dict:
            part, index = order[position]
            return parts[part][index]

    def batches() -> Iterator[object]:
        while True:
            sampler = DistributedSampler(Nanoset(), num_replicas=1, rank=0, shuffle=False, drop_last=True)
            yield from DataLoader(Nanoset(), batch_size=SEQUENCES, sampler=sampler, collate_fn=collate, drop_last=True)

    endless = batches()
    return (lambda step: next(endless)), seconds / len(order)


def tokens_per_second(read: Callable[[int], object], first: int) -> float:
    began, step = time.perf_counter(), first
    while time.perf_counter() - began < SECONDS:
        read(step)
        step += 1
    return (step - first) * SEQUENCES * LENGTH / (time.perf_counter() - began)


def open_huge(folder: Path) -> None:
    file = folder / "huge" / "0.ds"
    file.parent.mkdir()
    with open(file, "wb") as stream:
        stream.truncate(2 * 10**11)
    last = (10**11 * 9 // 10) // (LENGTH + 1) // SEQUENCES
    for step in (1, last):
        command = [sys.executable, "-c", OPEN, str(Path(__file__).parent), str(file.parent), str(step)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds, megabytes = map(float, done.stdout.split())
        print(f"10^11 tokens, imports to batch {step:,}: {seconds:.2f} s, {megabytes:.0f} MB (bar 1 s, 200 MB)")


def main() -> None:
    keep_freed_memory()  # as a training run does; both readers gain
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folders = write(folder)
        theirs, index_seconds = nanosets(folders)
        readers = {"kenotron": ours(folders), "nanotron": theirs}
        speeds: dict[str, list[float]] = {reader: [] for reader in readers}
        for number in range(ROUNDS):
            for reader, read in readers.items():
                speeds[reader].append(tokens_per_second(read, number * 1000) / 1e6)
        for reader, found in speeds.items():
            print(f"{reader}: {statistics.median(found):.0f} M tokens/s (best {max(found):.0f})")
        indexed = [1 / (1 / speed + index_seconds * 1e6 / LENGTH) for speed in speeds["nanotron"]]
        with_index = statistics.median(indexed)
        print(f"nanotron with its index ({index_seconds * 1e6:.1f} µs a sample): {with_index:.0f} M tokens/s")
        for words, others in (("with", indexed), ("without", speeds["nanotron"])):
            ratios = sorted(a / b for a, b in zip(speeds["kenotron"], others))
            print(
                f"ratio {words} its index: {statistics.median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f}; bar 3)"
            )
        open_huge(folder)
    print(f"peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
