"""How long a user waits before anything happens, against the bars of docs/benchmarks.md.

    python benchmarks/start_up.py                                 the interpreter's own environment
    python benchmarks/start_up.py --only "import kenotron" --repeat 9

Each command runs several times in a process of its own; the best counts, since the bars are about our work and not
about what else the machine does. The first run of each warms the file cache and is not counted. The first step takes
turns with that of `transformers` on the same model and data (peers/first_step.py), and must come first.
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
PEER = ROOT / "benchmarks" / "peers" / "first_step.py"
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
    ]
    failed = False
    for name, bar, measure in measurements:
        if not arguments.only or arguments.only in name:
            measure()
            failed |= report(name, sorted(measure() for _ in range(arguments.repeat)), bar)
    name = "kenotron train to the end of step 1"
    if not arguments.only or arguments.only in name:
        contenders = ((KENOTRON, "train", str(CONFIG)), (sys.executable, str(PEER), str(CONFIG)))
        turns = [[seconds_to_first_step(home, *each) for each in contenders] for _ in range(arguments.repeat + 1)]
        ours, theirs = (sorted(times) for times in zip(*turns[1:]))
        failed |= report(name, ours, min(3.0, theirs[0]))
        report("the same by transformers", theirs, None)
    shutil.rmtree(home)
    sys.exit(1 if failed else 0)


def report(name: str, times: list[float], bar: float | None) -> bool:
    """Print a line about `times`, sorted; whether the best is over the bar."""
    failed = bar is not None and times[0] > bar
    verdict = "    " if bar is None else "FAIL" if failed else "pass"
    limit = "" if bar is None else f"   bar {bar:.2f} s"
    print(f"{verdict}  {name:38} best {times[0]:5.2f} s   median {times[len(times) // 2]:5.2f} s{limit}")
    return failed


def seconds(*command: str) -> float:
    """Wall time of a command that must succeed, interpreter start included."""
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    elapsed = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return elapsed


def seconds_to_first_step(home: Path, *command: str) -> float:
    """From the start of `command` to its line about step 1; what it writes goes to a scratch folder."""
    with tempfile.TemporaryDirectory(prefix="start-up-") as scratch:
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
    sys.exit(f"{' '.join(command)} ended with {process.returncode} before its first step:\n{''.join(said[-20:])}")


if __name__ == "__main__":
    main()
