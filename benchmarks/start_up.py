"""How long a user waits before anything happens, against the bars of docs/benchmarks.md.

    python benchmarks/start_up.py                                 the interpreter's own environment
    python benchmarks/start_up.py --only "import kenotron" --repeat 9

Each command runs several times in a process of its own; the best counts, since the bars are about our work and not
about what else the machine does. The first run of each warms the file cache and is not counted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.hub_cache import make_hub_cache, offline_environment  # noqa: E402

CONFIG = ROOT / "examples" / "config_tiny_llama-david.yaml"
KENOTRON = str(Path(sys.executable).with_name("kenotron"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", help="only the measurements whose name contains this")
    arguments = parser.parse_args()
    # The walkthrough's dataset and tokenizer as they lie on disk after a first download; made here, no socket opened.
    home = make_hub_cache(Path(tempfile.mkdtemp(prefix="hf-home-")))
    measurements: list[tuple[str, float, Callable[[], float]]] = [
        ("import kenotron", 0.3, lambda: seconds(sys.executable, "-c", "import kenotron")),
        ("kenotron --help", 0.7, lambda: seconds(KENOTRON, "--help")),
        ("kenotron config check", 0.7, lambda: seconds(KENOTRON, "config", "check", str(CONFIG))),
        ("kenotron train to the end of step 1", 4.0, lambda: seconds_to_first_step(home)),
    ]
    failed = False
    for name, bar, measure in measurements:
        if arguments.only and arguments.only not in name:
            continue
        measure()
        times = sorted(measure() for _ in range(arguments.repeat))
        failed |= times[0] > bar
        verdict = "FAIL" if times[0] > bar else "pass"
        print(f"{verdict}  {name:38} best {times[0]:5.2f} s   median {times[len(times) // 2]:5.2f} s   bar {bar} s")
    shutil.rmtree(home)
    sys.exit(1 if failed else 0)


def seconds(*command: str) -> float:
    """Wall time of a command that must succeed, interpreter start included."""
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    elapsed = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return elapsed


def seconds_to_first_step(home: Path) -> float:
    """From the start of `kenotron train` to the console line of step 1; checkpoints and logs go to a scratch folder."""
    with tempfile.TemporaryDirectory(prefix="start-up-") as scratch:
        command = [
            KENOTRON,
            "train",
            str(CONFIG),
            f"checkpoints.checkpoints_path={scratch}/checkpoints",
            f"logging.log_dir={scratch}/logs",
        ]
        begin = time.perf_counter()
        environment = {**os.environ, **offline_environment(home), "KENOTRON_CACHE": str(home / "kenotron")}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=scratch, env=environment
        )
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("step 1/"):
                elapsed = time.perf_counter() - begin
                process.kill()
                process.communicate()
                return elapsed
        process.wait()
    sys.exit(f"kenotron train ended with {process.returncode} before its first step:\n{''.join(said[-20:])}")


if __name__ == "__main__":
    main()
