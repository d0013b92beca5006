"""Peak memory of everything that reads or writes data, when a single document, line or cell is the whole input.

    python benchmarks/memory_of_inputs.py [--only inspect] [--gigabytes 2] [--folder BIG]    an hour, 12 GB of disk

Each command runs in processes of its own, two workers if it has workers. The peak is the largest sum, sampled every
20 ms, of the proportional set sizes of all of them (Linux's PSS, which counts shared pages once and includes pages of
mapped files). The bar is 1 GiB, whatever the input; a command that refuses its input says so in one line, within the
same bar.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import yaml

import kenotron as kn
from kenotron.data.formats.datatrove import TokenWriter
from kenotron.text.byte_level_bpe import train_byte_level_bpe
from kenotron.text.file_documents import python_stdlib
from kenotron.text.json_lines import LONGEST_LINE
from process_memory import tree_mib

BAR = 1024  # MiB

SHOWN = ["--sequence-length", "2048", "--sample", "7", "--json"]
CLI = [sys.executable, "-c", "from kenotron.cli import main; main()"]
READ = """
import sys
from kenotron.config import InputError, load
from kenotron.data import open_run
try:
    with open_run(load(sys.argv[1]), 1, lambda line: None) as data:
        for step in range(1, 41):
            data.batch(step)
            if data.streams and step % 20 == 0:
                [write() for write in data.streams.states(step).values()]
except InputError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


class Inputs:
    """Files of about `size` bytes, each made when it is first asked for."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.words = " ".join(piece.text for piece in python_stdlib().documents())[: 64 << 20].replace("\n", " ")
        self.solid = "a" * (1 << 20)

    def __call__(self, name: str) -> str:
        path = self.folder / name
        if not path.exists():
            stem, _, suffix = name.partition(".")
            getattr(self, f"_{suffix.removesuffix('.gz').removesuffix('.zst')}")(path, stem)
        return str(path)

    def _text(self, stem: str, size: int | None = None) -> Iterator[str]:
        """One line: of `words`, of a single word (`solid`), or of words that take four bytes a character (`wide`)."""
        text = self.solid if stem == "solid" else self.words
        left = size or self.size
        while left > 0:
            yield text[:left]
            left -= len(text)

    def _txt(self, path: Path, stem: str) -> None:
        with _packed(path) as file:
            for text in self._text(stem):
                file.write(text.encode("ascii", "replace"))

    def _jsonl(self, path: Path, stem: str) -> None:
        """`longest`, `wide`: eight lines of the most bytes that are read; else one line of `size`."""
        size = LONGEST_LINE - 100 if stem in ("longest", "wide") else self.size
        with _packed(path) as file:
            for _ in range(8 if stem in ("longest", "wide") else 1):
                file.write(b'{"text": "')
                for text in self._text(stem, size):
                    file.write(text.encode("ascii", "replace").replace(b"\\", b"/").replace(b'"', b"'"))
                file.write(("🙂" if stem == "wide" else "").encode() + b'"}\n')

    def _parquet(self, path: Path, stem: str) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        with parquet.ParquetWriter(path, pa.schema([("text", pa.large_string())]), compression="zstd") as writer:
            writer.write_table(
                pa.table({"text": pa.array(self._cells(stem), pa.large_string())}), row_group_size=1 << 30
            )

    def _arrow(self, path: Path, stem: str) -> None:
        import pyarrow as pa

        table = pa.table({"text": pa.array(self._cells(stem), pa.large_string())})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)

    def _cells(self, stem: str) -> list[str]:
        """`cell`: one row; `books`: rows of half a megabyte; `rows`: of 4 kB."""
        text = "".join(self._text("words", self.size - 1000)).encode("ascii", "replace").decode()
        step = {"cell": len(text), "books": 500_000, "rows": 4000}[stem]
        return [text[start : start + step] for start in range(0, len(text), step)]

    def tokens(self) -> str:
        """One document of size / 2 ids of two bytes."""
        path = self.folder / "document.ds"
        if not path.exists():
            block = np.random.default_rng(0).integers(0, 32000, 1 << 22).astype(np.uint16)
            left = self.size // 2
            with TokenWriter(path, np.dtype("<u2")) as writer:
                while left:
                    ids = block[:left]
                    left -= len(ids)
                    writer.append(ids, np.array([] if left else [len(ids)], np.int64))
        return str(path)


def _packed(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "wb", compresslevel=1)  # type: ignore[return-value]
    if path.suffix == ".zst":
        import pyarrow

        return pyarrow.CompressedOutputStream(str(path), "zstd")
    return open(path, "wb")


def run_of(folder: Path, dataset: dict[str, Any], tokenizer: str) -> str:
    """A config of a run over `dataset`; what it reads at sequence length 1024, 8 samples a step."""
    path = folder / "run.yaml"
    starter = {
        "general": {"project": "benchmark", "run": "memory", "seed": 0},
        "model": {"init_method": {"std": 0.02}, "model_config": {"is_llama_config": True, "vocab_size": 32768}},
        "tokenizer": {"tokenizer_name_or_path": tokenizer},
        "tokens": {
            "sequence_length": 1024,
            "micro_batch_size": 8,
            "batch_accumulation_per_replica": 1,
            "train_steps": 10**6,
            "val_check_interval": -1,
        },
        "optimizer": {
            "optimizer_factory": {"name": "adamW"},
            "learning_rate_scheduler": {"learning_rate": 1e-3},
            "weight_decay": 0.0,
            "clip_grad": 1.0,
            "accumulate_grad_in_fp32": True,
        },
        "checkpoints": {"checkpoint_interval": 10**6, "checkpoints_path": "unused"},
        "data_stages": [{"name": "all", "start_training_step": 1, "data": {"dataset": dataset}}],
    }
    kn.load(starter)
    path.write_text(yaml.safe_dump(starter))
    return str(path)


Case = tuple[str, Callable[[], list[str]]]


def cases(folder: Path, inputs: Inputs, tokenizer: str) -> Iterator[Case]:
    """A name, and what makes the inputs and gives the command. `out` is an empty place."""
    out = str(folder / "out")
    texts = [
        *("line.txt", "line.txt.gz", "line.txt.zst", "solid.txt.zst", "longest.jsonl", "wide.jsonl"),
        *("line.jsonl", "line.jsonl.gz", "line.jsonl.zst"),
        *("cell.parquet", "books.parquet", "rows.parquet", "cell.arrow", "rows.arrow"),
    ]
    for text in texts:
        options = ["--tokenizer", tokenizer, "--output", out, "--workers", "2"]
        yield f"tokenize {text}", lambda text=text, o=options: [*CLI, "data", "tokenize", inputs(text), *o]
    yield (
        "tokenize --shuffle-documents line.txt",
        lambda: [*CLI, "data", "tokenize", inputs("line.txt"), *options, "--shuffle-documents"],
    )
    for mode, extra in (
        ("cached", {}),
        ("streamed", {"streaming": {"shuffle_buffer": 10000}}),
    ):
        for text in ("line.txt", "solid.txt.zst", "wide.jsonl", "line.jsonl", "cell.parquet", "rows.parquet"):
            yield (
                f"{mode} {text}",
                lambda text=text, extra=extra: [
                    *(sys.executable, "-c", READ),
                    run_of(folder, {"text_files": inputs(text), **extra}, tokenizer),
                ],
            )
    yield "inspect", lambda: [*CLI, "data", "inspect", inputs.tokens()]
    yield "show", lambda: [*CLI, "data", "show", inputs.tokens(), *SHOWN]
    for how in ((), ("--shuffle",)):
        yield (
            " ".join(("merge", *how)),
            lambda how=how: [*CLI, "data", "merge", inputs.tokens(), "--output", out, *how],
        )
    for packing in ("windows", "best_fit"):

        def which(packing: str = packing) -> list[str]:
            run = run_of(folder, {"tokens": inputs.tokens(), "packing": packing}, tokenizer)
            return [*CLI, "data", "which", run, "--step", "1000"]

        yield f"which {packing}", which


def measure(command: list[str], environment: dict[str, str]) -> tuple[float, float, int, str]:
    """Peak MiB of the process and its descendants, seconds, exit code, last line of its errors."""
    began, peak = time.monotonic(), 0.0
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
        while child.poll() is None:
            peak = max(peak, tree_mib(child.pid))
            time.sleep(0.02)
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    return peak, time.monotonic() - began, child.returncode, lines[-1] if lines else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--folder", type=Path, help="where inputs are kept for the next time")
    parser.add_argument("--json", type=Path, help="where results are added, an object a line")
    given = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = given.folder or Path(name)
        folder.mkdir(exist_ok=True)
        tokenizer = folder / "tokenizer"
        if not tokenizer.exists():
            train_byte_level_bpe((piece.text for piece in python_stdlib().documents()), 32_000).save(tokenizer)
        environment = os.environ | {"KENOTRON_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
        print("| | peak, MiB | s | |\n|---|---:|---:|---|")
        inputs = Inputs(folder, int(given.gigabytes * 1e9))
        for what, make in cases(folder, inputs, str(tokenizer)):
            if given.only not in what:
                continue
            command = make()
            peak, seconds, code, said = measure(command, environment)
            verdict = "pass" if peak <= BAR and code in (0, 2) else "FAIL"
            failed += verdict == "FAIL"
            said = said.replace(f"{folder}/", "") if code else ""
            print(f"| {what} | {peak:,.0f} | {seconds:.0f} | {verdict}{said and ': ' + said[:300]} |", flush=True)
            if given.json:
                with open(given.json, "a") as file:
                    file.write(json.dumps({"case": what, "mib": peak, "seconds": seconds, "said": said}) + "\n")
            subprocess.run(["rm", "-rf", *map(str, folder.glob("out*")), str(folder / "cache")], check=True)
    sys.exit(f"{failed} above {BAR} MiB or broken" if failed else 0)


if __name__ == "__main__":
    main()
