"""Text to tokens on disk: `kenotron data tokenize` beside `datasets.map` with `tokenizers`, and datatrove if installed.

    python benchmarks/tokenizing.py [--megabytes 40] [--workers 2]

The corpus is Python sources as jsonl: the library's own, then those of installed packages. Nothing is repeated, since
words met before are what Kénotron is fast at. The tokenizer is a byte-level BPE of 32,000 entries, trained once on the
library. Each way starts from the jsonl files and ends with tokens on disk, on the same number of processes; start-up is
counted. The bars: at least 1.5 times `datasets.map`, at least 1.2 times datatrove.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from kenotron.text.byte_level_bpe import train_byte_level_bpe
from kenotron.text.file_documents import python_stdlib

WAYS = ("kenotron", "datasets", "datatrove")

DATASETS = """
import sys, datasets, tokenizers
datasets.disable_progress_bars()
corpus, tokenizer, output, workers = sys.argv[1:]
backend = tokenizers.Tokenizer.from_file(tokenizer + "/tokenizer.json")
end = backend.token_to_id("<|endoftext|>")
def encode(batch):
    return {"input_ids": [e.ids + [end] for e in backend.encode_batch(batch["text"])]}
rows = datasets.load_dataset("json", data_files=corpus, split="train", cache_dir=output + "/cache")
rows.map(encode, batched=True, num_proc=int(workers), remove_columns=["text"]).save_to_disk(output + "/tokens")
"""

DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
corpus, tokenizer, output, workers = sys.argv[1:]
LocalPipelineExecutor(
    pipeline=[
        JsonlReader(corpus),
        DocumentTokenizer(output + "/tokens", tokenizer_name_or_path=tokenizer + "/tokenizer.json",
                          eos_token="<|endoftext|>", shuffle_documents=False),
    ],
    tasks=int(workers), workers=int(workers), logging_dir=output + "/logs",
).run()
"""


def make_corpus(folder: Path, size: int, files: int) -> int:
    """About `size` bytes of Python sources over `files` jsonl files; the bytes of their text."""
    packages = sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))
    sources = [*python_stdlib().files, *packages]
    written, seen = 0, set()
    folder.mkdir()
    with ExitStack() as stack:
        streams = [stack.enter_context(open(folder / f"{number}.jsonl", "w")) for number in range(files)]
        for number, source in enumerate(sources):
            content = source.read_bytes()
            if written >= size:
                break
            if content in seen or not content:
                continue
            seen.add(content)
            written += len(content)
            streams[number % files].write(json.dumps({"text": content.decode(errors="replace")}) + "\n")
    return written


def command(way: str, corpus: Path, tokenizer: Path, output: Path, workers: int) -> list[str]:
    if way == "kenotron":
        main = "from kenotron.cli import main; main()"
        options = ["--tokenizer", str(tokenizer), "--output", str(output), "--workers", str(workers)]
        return [sys.executable, "-c", main, "data", "tokenize", str(corpus), *options]
    script, source = (DATASETS, f"{corpus}/*.jsonl") if way == "datasets" else (DATATROVE, str(corpus))
    return [sys.executable, "-c", script, source, str(tokenizer), str(output), str(workers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    ways = [way for way in WAYS if find_spec(way) and (way != "datatrove" or find_spec("orjson"))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = make_corpus(folder / "corpus", given.megabytes * 1_000_000, given.workers)
        texts = (piece.text for piece in python_stdlib().documents())
        train_byte_level_bpe(texts, 32_000).save(folder / "tokenizer")
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        seconds = {}
        for way in ways:
            arguments = command(way, folder / "corpus", folder / "tokenizer", folder / way, given.workers)
            began = time.perf_counter()
            done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
            seconds[way] = time.perf_counter() - began
            if done.returncode:
                raise SystemExit(f"{way} failed:\n{done.stderr[-2000:]}")
        for way in ways:
            ratio = seconds[way] / seconds["kenotron"]
            print(f"{way:10} {seconds[way]:7.1f} s {size / seconds[way] / 1e6:7.2f} MB/s   kenotron is {ratio:.2f}x")


if __name__ == "__main__":
    main()
