"""What `logging.state_hash` adds to a step: the model of examples/quickstart.yaml, or another config, on random tokens.

    python benchmarks/state_hash.py
    python benchmarks/state_hash.py --config my.yaml --steps 100

Bar: the median hash takes 0.5% of the median step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

import kenotron as kn
from kenotron.observers.consistency import SLICES, state_hash
from kenotron.parallel.mesh import Mesh
from kenotron.training.build import build_run
from kenotron.training.run import close
from kenotron.training.step import train_step

QUICKSTART = Path(__file__).resolve().parents[1] / "examples" / "quickstart.yaml"
BAR = 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(QUICKSTART))
    parser.add_argument("--steps", type=int, default=SLICES, help="each hashes another slice of the weights")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        random_tokens = "data_stages=[{name: random, start_training_step: 1, data: {dataset: null, seed: 1}}]"
        folders = [f"logging.log_dir={folder}/logs", f"checkpoints.checkpoints_path={folder}/checkpoints"]
        without = ["tokenizer=null", "logging.sample_prompts=[]"]
        config = kn.load(arguments.config, [random_tokens, *without, *folders])
        run = build_run(config, Mesh(), torch.device("cpu"))
        try:
            steps, hashes = [], []
            for _ in range(arguments.steps):
                batches = run.data.batch(run.step + 1)
                started = time.perf_counter()
                train_step(run, batches)
                run.step += 1
                stepped = time.perf_counter()
                int(state_hash(run))
                steps.append(stepped - started)
                hashes.append(time.perf_counter() - stepped)
        finally:
            close(run)
    step, one = statistics.median(steps), statistics.median(hashes)
    verdict = "met" if one <= BAR * step else "MISSED"
    print(f"step {1000 * step:.1f} ms, hash {1000 * one:.2f} ms: {one / step:.2%} (bar {BAR:.1%}: {verdict})")


if __name__ == "__main__":
    main()
