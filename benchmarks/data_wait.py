"""How long a training step waits for its data: with tokens cached, and with text tokenized while the run reads it.

    python benchmarks/data_wait.py                 # 40 steps of the 5-layer model of `kenotron init`'s text-folder

The text is Python's standard library as JSON lines, one document for each file, with the tokenizer trained on it; one
loader thread. The stream has one reader shard and a shuffle buffer of 1000 documents. The wait of the first step is
included. The bars are shares of the steps' time: 0.5% cached, 5% streamed.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

import kenotron as kn
from kenotron.config import dump
from kenotron.text.file_documents import python_stdlib

BARS = {"cached": 0.005, "streamed": 0.05}
STREAMED = {"streaming": {"shuffle_buffer": 1000}}


def train(folder: Path, mode: str, steps: int) -> Any:
    """A run over `folder`/library.jsonl."""
    starter = str(resources.files("kenotron.config") / "starters" / "text-folder.yaml")
    content = yaml.safe_load(dump(kn.load(starter)))  # its numbers as numbers: plain YAML takes 3e-4 for text
    dataset = {"text_files": str(folder / "library.jsonl")} | (STREAMED if mode == "streamed" else {})
    content["data_stages"] = [{"name": "text", "start_training_step": 1, "data": {"dataset": dataset}}]
    content["tokens"] |= {"train_steps": steps, "val_check_interval": -1}
    content["checkpoints"] |= {"checkpoints_path": str(folder / mode), "checkpoint_interval": 10**6}
    content["logging"] = {"log_dir": str(folder / "logs")}
    with contextlib.redirect_stdout(io.StringIO()):
        return kn.train(kn.load(content))


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with open(folder / "library.jsonl", "w") as file:
            for piece in python_stdlib().documents():
                file.write(json.dumps({"text": piece.text}) + "\n")
        for mode, bar in BARS.items():
            run = train(folder, mode, steps)
            share, speed = run.data_wait_seconds / run.seconds, run.consumed_tokens / run.seconds
            print(f"{mode}: {steps} steps, {speed:,.0f} tokens/s: {share:.2%} of the time waiting (bar {bar:.1%})")


if __name__ == "__main__":
    main()
