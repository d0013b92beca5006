"""The leaderboard: which YAML reaches the fewest bits per byte on the embedded corpus in ten minutes on two cores.

    make leaderboard                                     train every entry of benchmarks/leaderboard/, write the table
    python benchmarks/leaderboard.py my.yaml             train one file and print its row

All entries are trained anew, one after another, on one machine with one Python (the corpus is its standard library):
rows of different runs of this script are not comparable.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from kenotron.doctor.environment import processor
from tables import replace_results

ROOT = Path(__file__).resolve().parent.parent
ENTRIES = ROOT / "benchmarks" / "leaderboard"
PAGE = ROOT / "docs" / "leaderboard.md"
LIMIT_SECONDS = 600
# What every entry has in common. The rest, tokenizer included, is free: bits per byte do not depend on it.
SHARED = {
    "data_stages": "one stage with {corpus: python-stdlib}",
    "val_fraction": 0.05,
    "limit_val_batches": -1,
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("files", nargs="*", type=Path, help="YAML files; none: all entries, and the page is written")
    files = options.parse_args().files
    entries = files or [ROOT / "examples" / "quickstart.yaml", *sorted(ENTRIES.glob("*.yaml"))]
    for file in entries:
        check(file)
    rows = []
    for number, file in enumerate(entries, start=1):
        print(f"{number} of {len(entries)}: {file.name}", flush=True)
        rows.append(measured(file))
        print(row(rows[-1]), flush=True)
    if not files:
        replace_results(PAGE, "leaderboard", table(rows))


def check(file: Path) -> None:
    """End with one line unless the file trains and validates on the texts of the leaderboard."""
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    stages = [stage["data"]["dataset"] for stage in config["data_stages"]]
    if stages != [{"corpus": "python-stdlib"}]:
        sys.exit(f"{file}: data_stages: expected {SHARED['data_stages']}, found {stages}")
    for key in ("val_fraction", "limit_val_batches"):
        found = config["tokens"].get(key)
        if found != SHARED[key]:
            sys.exit(f"{file}: tokens.{key}: expected {SHARED[key]}, found {found}")


def measured(file: Path) -> dict[str, Any]:
    """Train the file in an empty folder on two threads; return what its row shows."""
    steps = yaml.safe_load(file.read_text(encoding="utf-8"))["tokens"]["train_steps"]
    with tempfile.TemporaryDirectory() as folder:
        keys = [
            "general.run=entry",
            "checkpoints.checkpoints_path=checkpoints",
            "checkpoints.checkpoint_interval=1000000",
            "checkpoints.save_final_state=false",
            f"tokens.val_check_interval={steps}",
            "logging.tensorboard=false",
            "logging.sample_prompts=[]",
        ]
        command = [sys.executable, "-m", "kenotron", "train", str(file.resolve()), *keys]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{file} failed:\n{done.stderr[-2000:]}")
        lines = [json.loads(line) for line in Path(folder, "logs/entry/metrics.jsonl").read_text().splitlines()]
    return {
        "file": file,
        "steps": len(lines),
        "seconds": sum(line["elapsed_time_per_iteration_ms"] for line in lines) / 1e3,
        "bits_per_byte": lines[-1]["val_bits_per_byte"],
    }


def row(entry: dict[str, Any]) -> str:
    file = entry["file"].resolve()
    name = f"[{file.stem}](../{file.relative_to(ROOT)})" if file.is_relative_to(ROOT) else file.stem
    late = "" if entry["seconds"] <= LIMIT_SECONDS else " (over the limit)"
    return f"| {name} | {entry['bits_per_byte']:.4f} | {entry['steps']:,} | {entry['seconds']:.0f}{late} |"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, the fewest bits per byte first, those over the time limit last."""
    ranked = sorted(rows, key=lambda entry: (entry["seconds"] > LIMIT_SECONDS, entry["bits_per_byte"]))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    where = f"{processor().name}, {torch.get_num_threads()} threads; Python {platform.python_version()}"
    head = ["| entry | bits per byte | steps | seconds |", "|---|---:|---:|---:|"]
    lines = [*head, *map(row, ranked), "", f"At commit {commit.stdout.strip()} on {where}, torch {torch.__version__}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
