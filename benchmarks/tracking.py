"""What tracking adds to a step: metrics.jsonl and console, TensorBoard, `metrics_logging`, and trackers offline.

    OMP_NUM_THREADS=1 python benchmarks/tracking.py
    python benchmarks/tracking.py --config my.yaml --steps 410 --interval 100
    python benchmarks/tracking.py --trackers wandb trackio        # with the extra `trackers`

One run of the model of examples/quickstart.yaml, or of another config, on random tokens. A hook's share is the CPU time
of its calls over that of the steps without these hooks, so other programs on the machine do not count; the first 10
steps are left out. Use one thread (OMP_NUM_THREADS=1): threads that wait for others use CPU time, too.

Bars: metrics and TensorBoard together 0.5%, metrics_logging at an interval of 50 steps 2%.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import kenotron as kn
from kenotron.observers.layer_statistics import LayerStatistics
from kenotron.observers.tensorboard import TensorBoard
from kenotron.observers.trackers import TrackioHook, WandbHook
from kenotron.runs.logged import read_run
from kenotron.runs.report import report_page
from kenotron.training.metrics import Metrics

QUICKSTART = Path(__file__).resolve().parents[1] / "examples" / "quickstart.yaml"
FIRST = 10
DEFAULT, DETAILS = ("Metrics", "TensorBoard"), ("LayerStatistics",)


def timed(hook: type[kn.Hook], name: str, spent: dict[str, float], times: list[float]) -> Callable[..., None]:
    """Return the hook's method. After the first steps, `spent` gets the time of its calls, and `times` their ends."""
    method = getattr(hook, name)

    @wraps(method)
    def call(self: kn.Hook, run: Any, *arguments: Any) -> None:
        started = time.process_time()
        method(self, run, *arguments)
        if run.step > FIRST:
            times.append(time.process_time())
            spent[hook.__name__] += times[-1] - started if len(times) > 1 else 0.0

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(QUICKSTART))
    parser.add_argument("--steps", type=int, default=210)
    parser.add_argument("--interval", type=int, default=50)
    parser.add_argument("--trackers", nargs="*", default=[], choices=["wandb", "trackio"])
    arguments = parser.parse_args()
    spent: dict[str, float] = defaultdict(float)
    times: list[float] = []
    for hook in (Metrics, TensorBoard, LayerStatistics, WandbHook, TrackioHook):
        for name in ("before_step", "before_update", "after_step"):
            setattr(hook, name, timed(hook, name, spent, times))
    modes = {"wandb": "logging.wandb={mode: offline}", "trackio": "logging.trackio={}"}
    with tempfile.TemporaryDirectory() as folder:
        config = kn.load(
            arguments.config,
            [
                "data_stages=[{name: random, start_training_step: 1, data: {dataset: null, seed: 1}}]",
                *("tokenizer=null", "logging.sample_prompts=[]", "logging.tensorboard=true"),
                *(f"logging.log_dir={folder}/logs", f"checkpoints.checkpoints_path={folder}/checkpoints"),
                *(f"tokens.train_steps={arguments.steps}", "tokens.limit_val_batches=0"),
                f"metrics_logging={{log_level: 1, log_detail_interval: {arguments.interval}}}",
                *(modes[name] for name in arguments.trackers),
            ],
        )
        kn.train(config)
        run = read_run(Path(folder) / "logs" / config.general.run)
        started = time.perf_counter()
        size, seconds = len(report_page([run])), time.perf_counter() - started
    steps = times[-1] - times[0] - sum(spent.values())
    shares = {name: seconds / steps for name, seconds in spent.items()}
    print(f"{1000 * steps / (arguments.steps - FIRST - 1):.0f} ms of CPU time a step")
    print(", ".join(f"{name} {share:.2%}" for name, share in shares.items()))
    for names, bar in ((DEFAULT, 0.005), (DETAILS, 0.02)):
        share = sum(shares[name] for name in names)
        print(f"{' + '.join(names)}: {share:.2%} (bar {bar:.1%}: {'met' if share <= bar else 'MISSED'})")
    print(f"kenotron report of {arguments.steps} steps: {seconds:.2f} s, {size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
