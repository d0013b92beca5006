"""Whether the mixture that DoReMi learns is better than an equal one: `python experiments/doremi/run.py`.

Copies text of four kinds that comes with Python and torch, then for each seed trains a reference, a proxy beside it,
and a model three times as wide and twice as deep on the equal and on the learned shares. Prints bits per byte of each
domain.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHAPES = "model.model_config"
LARGE = (f"{SHAPES}.hidden_size=192", f"{SHAPES}.intermediate_size=576", f"{SHAPES}.num_hidden_layers=4") + tuple(
    f"{SHAPES}.{heads}=12" for heads in ("num_attention_heads", "num_key_value_heads")
)
LIBRARY, PACKAGES = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
DOMAINS = {  # name → where its files are, and their pattern
    "python": (LIBRARY, "*.py"),
    "headers": (PACKAGES / "torch" / "include", "**/*.h"),
    "stubs": (PACKAGES, "*/**/*.pyi"),
    "metadata": (PACKAGES, "*.dist-info/METADATA"),
}
BYTES = 8_000_000  # of a domain, at most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="chains of runs (default: 3)")
    parser.add_argument("--jobs", type=int, default=2, help="chains at a time, each on one core (default: 2)")
    parser.add_argument("overrides", nargs="*", help="keys of doremi.yaml, such as tokens.train_steps=20")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        for name, (root, pattern) in DOMAINS.items():
            print(f"{name}: {collect(root, pattern, Path(folder, 'texts', name)):,} bytes", flush=True)
        chains = pool.map(lambda seed: chain(seed, given.overrides, Path(folder)), range(1, given.seeds + 1))
        found = list(chains)
    print("\n".join(["", *table(found)]))


def collect(root: Path, pattern: str, folder: Path) -> int:
    """Copy files until there are BYTES of them; returns how many bytes that is."""
    folder.mkdir(parents=True)
    size = 0
    for number, file in enumerate(sorted(root.glob(pattern))):
        if size < BYTES and file.is_file() and file.stat().st_size:
            shutil.copyfile(file, folder / f"{number}.txt")
            size += file.stat().st_size
    return size


Chain = tuple[dict[str, float], ...]  # learned shares; bits per byte with equal shares; with the learned ones


def chain(seed: int, overrides: list[str], folder: Path) -> Chain:
    """Reference, proxy, and the large model twice."""
    place = folder / str(seed)
    place.mkdir()
    (place / "texts").symlink_to(folder / "texts")
    seeds = [f"general.seed={seed}", f"data_stages.0.data.seed={seed}", *overrides]
    train("reference", place, *seeds)
    train("proxy", place, *seeds, "doremi.ref_model_resume_checkpoint_path=checkpoints/reference")
    equal = train("equal", place, *seeds, *LARGE)
    learned = train("learned", place, *seeds, *LARGE, "doremi.domain_weights=logs/proxy/doremi.json")
    weights = json.loads((place / "logs" / "proxy" / "doremi.json").read_text())
    return dict(zip(weights["domain_names"], weights["domain_weights"])), equal, learned


def train(name: str, place: Path, *changes: str) -> dict[str, float]:
    """Bits per byte of each domain after the last step of the run `name`."""
    paths = (f"general.run={name}", f"checkpoints.checkpoints_path=checkpoints/{name}")
    command = [sys.executable, "-m", "kenotron", "train", str(HERE / "doremi.yaml"), *paths, *changes]
    done = subprocess.run(command, cwd=place, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    print(f"{place.name}: {name} done", flush=True)
    lines = map(json.loads, (place / "logs" / name / "metrics.jsonl").read_text().splitlines())
    last = [line for line in lines if "val_loss" in line][-1]
    return {domain: last[f"val_bits_per_byte/{domain}"] for domain in DOMAINS}


def table(found: list[Chain]) -> list[str]:
    """Learned shares, and bits per byte of the large model: means over the seeds."""
    lines = [f"| {len(found)} seeds | learned share | equal shares | learned | of each seed |", "|---|---|---|---|---|"]
    for domain in DOMAINS:
        share, equal, learned = (statistics.mean(each[part][domain] for each in found) for part in range(3))
        changes = ", ".join(f"{each[2][domain] / each[1][domain] - 1:+.1%}" for each in found)
        lines.append(f"| {domain} | {share:.3f} | {equal:.4f} | {learned:.4f} | {changes} |")
    for name, of in (("mean", statistics.mean), ("worst", max)):
        equal, learned = (statistics.mean(of(each[part].values()) for each in found) for part in (1, 2))
        changes = ", ".join(f"{of(each[2].values()) / of(each[1].values()) - 1:+.1%}" for each in found)
        lines.append(f"| {name} | | {equal:.4f} | {learned:.4f} | {changes} |")
    return lines


if __name__ == "__main__":
    main()
