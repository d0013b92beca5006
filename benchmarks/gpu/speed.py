"""Kénotron and its peers on one GPU: speed, MFU, memory, kernels, one command, no network.

    python benchmarks/gpu/speed.py                                    an hour; writes benchmarks/results/gpu.json
    python benchmarks/gpu/speed.py --minutes 20 --only "llama-3.2-1b 4096"
    python benchmarks/gpu/speed.py --device cpu --miniature           the same on a CPU, with tiny shapes

A turn is a process: one contender builds one case, warms up and is timed (contender.py). In a round each contender has
one turn in every case, and the order rotates by one each round. The numbers are written after each turn, so a run that
is interrupted keeps its results. A contender that runs out of memory or time gets no further turns; its row says so.

    round 1   llama-3.2-1b 4096: kenotron, kenotron compiled, …, transformers    mixtral …: kenotron, …
    round 2   llama-3.2-1b 4096: kenotron compiled, …, transformers, kenotron    …
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "peers")]

import environment  # noqa: E402
import table  # noqa: E402
from cases import cases  # noqa: E402
from contender import CEILING, contenders_of  # noqa: E402


def main() -> None:
    arguments = parse()
    deadline = time.monotonic() + 60 * arguments.minutes
    first = turn(CEILING, None, arguments, deadline)
    if "problem" in first:
        sys.exit(f"{arguments.device}: {first['problem']}")
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": environment.machine(),
        **first,
        "miniature": arguments.miniature,
        "rows": rows(arguments),
    }
    print(f"{record['device']}: {first['ceiling']['bfloat16'] / 1e12:.4g} TFLOP/s in bf16 products", flush=True)
    for number in range(arguments.rounds):
        if not play(record, number, arguments, deadline):
            print(f"\nThe {arguments.minutes:g} minutes are over in round {number + 1} of {arguments.rounds}.")
            break
    table.write(record, arguments.output)
    print(f"\n{table.markdown(record)}\nNumbers: {arguments.output}")
    if find_spec("matplotlib") is None:
        print("No picture: matplotlib is not installed (pip install 'kenotron[plots]')")
    else:
        table.draw(record, arguments.output.with_suffix(".png"))
        print(f"Picture: {arguments.output.with_suffix('.png')}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="REGEX", default=[""], help="rows whose name has one of these")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60, help="end after these, with what there is")
    parser.add_argument("--turn-seconds", type=float, default=10, help="timed steps of a turn; at least three steps")
    parser.add_argument("--limit", type=float, default=420, help="seconds a turn may take, compilation included")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--miniature", action="store_true", help="tiny shapes, to see that everything works")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/gpu.json")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.miniature:
        parser.error("--device cpu takes days with these shapes; expected --miniature")
    name = "gpu-miniature.json" if arguments.miniature else "gpu.json"
    arguments.output = arguments.output or HERE.parent / "results" / name
    if not rows(arguments):
        parser.error(
            f"--only {' '.join(arguments.only)}: matches no row; `python benchmarks/gpu/cases.py` lists the cases"
        )
    return arguments


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One for each case and contender, without numbers."""
    named = [
        {"case": case.name, "tokens": case.tokens, "contender": contender, "turns": []}
        for case in cases(arguments.miniature)
        for contender in contenders_of(case)
    ]
    return [
        row for row in named if any(re.search(each, f"{row['case']}, {row['contender']}") for each in arguments.only)
    ]


def play(record: dict[str, Any], number: int, arguments: argparse.Namespace, deadline: float) -> bool:
    """One round; False if the time is over before its end."""
    for case in dict.fromkeys(row["case"] for row in record["rows"]):
        here = [row for row in record["rows"] if row["case"] == case]
        for row in [*here[number % len(here) :], *here[: number % len(here)]]:
            if "problem" in row:
                continue
            if time.monotonic() >= deadline:
                return False
            answer = turn(row["contender"], case, arguments, deadline)
            if "problem" in answer:
                if time.monotonic() >= deadline:
                    return False  # the turn was cut: nobody's fault
                row["problem"] = answer["problem"]
            else:
                row["turns"].append(answer)
            print(f"round {number + 1}  {case}, {row['contender']}: {table.summary(row)}", flush=True)
            table.write(record, arguments.output)
    return True


def turn(contender: str, case: str | None, arguments: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """What the contender's process says, or its problem."""
    name = f"miniature: {case}" if arguments.miniature else str(case)
    given = [str(HERE / "contender.py"), contender, name, arguments.device, str(arguments.turn_seconds)]
    paths = [str(HERE.parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    if arguments.device == "cpu":
        settings["OMP_NUM_THREADS"] = "1"  # shapes are tiny
    limit = max(1.0, min(arguments.limit, deadline - time.monotonic()))
    try:
        done = subprocess.run(
            [sys.executable, *given],
            capture_output=True,
            text=True,
            timeout=limit,
            env=os.environ | settings,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"took more than {limit:.0f} s"}
    if done.returncode == 0 and done.stdout:
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer
    lines = done.stderr.strip().splitlines()
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed)\b", line)]
    return {"problem": f"exit code {done.returncode}: {(errors or lines or ['no message'])[-1][:300]}"}


if __name__ == "__main__":
    main()
