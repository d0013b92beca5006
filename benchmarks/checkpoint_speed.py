"""How fast is a checkpoint, written and read? Ours against `dd bs=4M` of the same bytes, taken in turn.

    python benchmarks/checkpoint_speed.py                  # 125 M parameters: 500 MB of weights, 1 GB of Adam state
    python benchmarks/checkpoint_speed.py --parameters 20  # millions of parameters
    python benchmarks/checkpoint_speed.py --dcp            # also DCP's own writer, which has no checksums

`dd` copies one file from memory (a tmpfs) to the same file system, once into one file, which is the least work there
is (conv=fsync). Ours writes two files of tensors, an index each, and a manifest, with checksums, all synced, and
renames. Restoring checks all checksums and fills the tensors; dd reads the files one after another to /dev/null. Both
begin with nothing of the files in memory. Prints every round of saving, the ratio of the medians of ours and dd's, and
for restoring that of the fastest rounds; the bar is 0.8. Memory: the peak above what was there before.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kenotron.checkpoint.loading import load
from kenotron.checkpoint.saving import save

BAR = 0.8


def make_state(parameters: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """fp32 weights and two Adam moments in the shapes of a Llama with hidden size 1024: about `parameters` in all."""
    shapes = {
        **{f"self_attn.{name}_proj.weight": (1024, 1024) for name in "qkvo"},
        **{f"mlp.{name}_proj.weight": (2816, 1024) for name in ("gate", "up")},
        "mlp.down_proj.weight": (1024, 2816),
        "input_layernorm.weight": (1024,),
    }
    model: dict[str, Any] = {}
    layer = 0
    while sum(tensor.numel() for tensor in model.values()) < parameters:
        for name, shape in shapes.items():
            model[f"model.layers.{layer}.{name}"] = torch.randn(shape)
        layer += 1
    optimizer: dict[str, Any] = {}
    for name, tensor in model.items():
        optimizer[f"state.{name}.exp_avg"] = torch.randn(tensor.shape)
        optimizer[f"state.{name}.exp_avg_sq"] = torch.rand(tensor.shape)
        optimizer[f"state.{name}.step"] = torch.tensor(100.0)
    return model, optimizer


def ours(root: Path, model: dict[str, Any], optimizer: dict[str, Any]) -> Callable[[], None]:
    def run() -> None:
        save(root, 1, model=model, optimizer=optimizer, state={}, config_yaml="", model_config={})

    return run


def dcp_writer(root: Path, model: dict[str, Any], optimizer: dict[str, Any]) -> Callable[[], None]:
    import torch.distributed.checkpoint as dcp

    tensors = {**model, **optimizer}

    def run() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(root), no_dist=True)

    return run


def dd(source: Path, target: Path) -> Callable[[], None]:
    def run() -> None:
        command = ["dd", f"if={source}", f"of={target}", "bs=4M", "conv=fsync", "status=none"]
        subprocess.run(command, check=True)

    return run


def seconds(run: Callable[[], None], written: Path) -> float:
    """Time one run onto a quiet disk, with nothing of an earlier one to be replaced."""
    subprocess.run(["sync"], check=True)
    started = time.perf_counter()
    run()
    elapsed = time.perf_counter() - started
    shutil.rmtree(written) if written.is_dir() else written.unlink()
    return elapsed


def seconds_to_read(run: Callable[[], object], files: list[Path]) -> float:
    """Time `run`, which reads the files, after the kernel has forgotten them."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


class PeakMemory:
    """The most resident memory above the start while the block runs, in MB, sampled every millisecond."""

    def __enter__(self) -> PeakMemory:
        self._start = self._peak = self._resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self._peak = max(self._peak, self._resident())

    def _resident(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.mb = (self._peak - self._start) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=125, help="in millions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: here")
    parser.add_argument("--dcp", action="store_true", help="also time torch's own FileSystemWriter")
    arguments = parser.parse_args()

    model, optimizer = make_state(arguments.parameters * 10**6)
    folder = Path(tempfile.mkdtemp(dir=arguments.folder or Path.cwd(), prefix="checkpoint-speed-"))
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else folder
    with tempfile.NamedTemporaryFile(dir=memory) as source:
        try:
            save(folder / "ours", 1, model=model, optimizer=optimizer, state={}, config_yaml="", model_config={})
            files = [path for path in (folder / "ours" / "1").rglob("*") if path.is_file()]
            for path in files:
                source.write(path.read_bytes())
            source.flush()
            size = sum(path.stat().st_size for path in files)
            measure(arguments, folder, Path(source.name), size, model, optimizer)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def measure(
    arguments: argparse.Namespace,
    folder: Path,
    source: Path,
    size: int,
    model: dict[str, Any],
    optimizer: dict[str, Any],
) -> None:
    """Time the contenders in turn and print."""
    contenders = {
        "dd": (dd(source, folder / "dd.bin"), folder / "dd.bin"),
        "ours": (ours(folder / "ours", model, optimizer), folder / "ours" / "1"),
    }
    if arguments.dcp:
        contenders["dcp"] = (dcp_writer(folder / "dcp", model, optimizer), folder / "dcp")
    with PeakMemory() as peak:
        contenders["ours"][0]()
    files = [path for path in (folder / "ours" / "1").rglob("*") if path.is_file()]

    def restore() -> None:
        load(folder / "ours" / "1", model=model, optimizer=optimizer)

    def read() -> None:
        for file in files:
            subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=4M", "status=none"], check=True)

    seconds_to_read(read, files)  # what lies below the kernel may keep them, too: for both alike
    reads = [(seconds_to_read(read, files), seconds_to_read(restore, files)) for _ in range(arguments.rounds)]
    times: dict[str, list[float]] = {name: [] for name in contenders}
    print(f"{size / 1e6:.0f} MB, {arguments.rounds} rounds in turn; MB/s, fsync included")
    for _ in range(arguments.rounds):
        for name in contenders:
            times[name].append(seconds(*contenders[name]))
        contenders = dict(reversed(contenders.items()))  # nobody always follows the same one
        print("  " + "   ".join(f"{name} {size / 1e6 / taken[-1]:6.0f}" for name, taken in times.items()), flush=True)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    print("median " + "   ".join(f"{name} {size / 1e6 / taken:6.0f}" for name, taken in medians.items()))
    ratio = medians["dd"] / medians["ours"]
    print(f"ours / dd: {ratio:.2f} (bar {BAR}: {_word(ratio)})")
    # A shared disk has rounds at a third of its rate, of either: the fastest says what each costs beside the disk.
    dd_read, restored = (size / 1e6 / min(taken) for taken in zip(*reads))
    ratio = restored / dd_read
    print(f"restored at {restored:.0f} MB/s, dd {dd_read:.0f}: {ratio:.2f} (bar {BAR}: {_word(ratio)})")
    print(f"peak memory of a save above the tensors: {peak.mb:.0f} MB")


def _word(ratio: float) -> str:
    return "met" if ratio >= BAR else "MISSED"


if __name__ == "__main__":
    main()
