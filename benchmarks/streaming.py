"""How long a training step waits for text that is tokenized while the run reads it.

    python benchmarks/streaming.py                 # the 5-layer model of `kenotron init`'s text-folder, 40 steps

The text is Python's standard library as jsonl, a document a file, with the tokenizer trained on it; a lane, a buffer of
1000 documents, one loader thread. The bar: at most 5% of the steps' time.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from importlib import resources
from pathlib import Path

import yaml

import kenotron as kn
from kenotron.config import dump
from kenotron.data.texts import python_stdlib

BAR = 0.05


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with open(folder / "library.jsonl", "w") as file:
            for piece in python_stdlib().documents():
                file.write(json.dumps({"text": piece.text}) + "\n")
        starter = str(resources.files("kenotron.config") / "starters" / "text-folder.yaml")
        content = yaml.safe_load(dump(kn.load(starter)))  # its numbers as numbers: plain YAML takes 3e-4 for text
        dataset = {"text_files": str(folder / "library.jsonl"), "streaming": {"shuffle_buffer": 1000}}
        content["data_stages"] = [{"name": "text", "start_training_step": 1, "data": {"dataset": dataset}}]
        content["tokens"] |= {"train_steps": steps, "val_check_interval": -1}
        content["checkpoints"] |= {"checkpoints_path": str(folder / "checkpoints"), "checkpoint_interval": 10**6}
        content["logging"] = {"log_dir": str(folder / "logs")}
        with contextlib.redirect_stdout(io.StringIO()):
            run = kn.train(kn.load(content))
    assert run is not None
    share = run.data_wait_seconds / run.seconds
    speed = run.consumed_tokens / run.seconds
    print(f"{steps} steps, {speed:,.0f} tokens/s: waited for data {share:.2%} of the time (bar: {BAR:.0%})")


if __name__ == "__main__":
    main()
