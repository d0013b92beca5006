"""Is the native writer faster than its twin in Python? Pairs of files in turn, and the median of the pairs' ratios.

    python benchmarks/checkpoint_writers.py                       # 30 pairs of 200 MiB in the working folder
    python benchmarks/checkpoint_writers.py --folder /scratch --mebibytes 2000 --pairs 10

The bar for a default is 1.3; with the file read back, as a run does unless `general.ignore_sanity_checks`, too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from kenotron.checkpoint.durable import hash_file
from kenotron.checkpoint.engine import find_writer

CHUNK = 4 << 20  # as the writer's process takes it from memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path())
    arguments = parser.parse_args()
    data = memoryview(os.urandom(CHUNK)[1:] * (arguments.mebibytes * 2**20 // CHUNK))  # not aligned, as tensors
    seconds: dict[str, list[tuple[float, float]]] = {"python": [], "native": []}
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="checkpoint-writers-") as folder:
        for pair in range(-1, arguments.pairs):  # the first one is not counted
            for name in sorted(seconds, reverse=pair % 2 == 0):
                measured = measure(name, Path(folder) / "file", data)
                seconds[name] += [measured] * (pair >= 0)
    for index, what in enumerate(("write and sync", "write, sync, and read back")):
        python, native = ([pair[index] for pair in seconds[name]] for name in ("python", "native"))
        ratio = statistics.median(map(lambda a, b: a / b, python, native))
        print(
            f"{what}: python {min(python):.3f} s at best, {statistics.median(python):.3f} s in the median; native "
            f"{min(native):.3f} s, {statistics.median(native):.3f} s; median of the ratios {ratio:.2f}"
        )


def measure(name: str, path: Path, data: memoryview) -> tuple[float, float]:
    """The seconds until a new file is on the disk, and until it has been read back."""
    path.unlink(missing_ok=True)
    started = time.perf_counter()
    with find_writer(name)(path, len(data)) as file:
        for start in range(0, len(data), CHUNK):
            file.write(data[start : start + CHUNK])
    written = time.perf_counter()
    if hash_file(path) != file.record:
        raise SystemExit(f"{path}: the {name} writer wrote other bytes")
    return written - started, time.perf_counter() - started


if __name__ == "__main__":
    main()
