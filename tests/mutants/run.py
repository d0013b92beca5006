"""Applies every mutant in a copy of the repository and runs the tests that it names.

    python -m mutants.run [--only NAME ...] [--workers 2]

Every worker, in a copy of its own, writes one mutant's file, runs its tests until the first failure, and puts the file
back:

    [12/48] killed    clip-forgets-a-group   6.1 s   tests/optim/test_clip_gradients.py::test_x   ETA 3 min 10 s

At the end the tests that killed run once more, without any mutant: a test that fails anyway kills nothing.

Exit code 0: all killed. 1: survivors, or mutants about which the tests say nothing (they did not end, could not start,
or fail without a mutant). 2: a mutant no longer applies.
"""

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from mutants.mutant import ROOT, SOURCE, DoesNotApply, Mutant
from mutants.tables import MUTANTS, NOT_COUNTED

TIMEOUT_S = 300
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", "--sample", "--tb=line")
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)  # a line of pytest's summary
KILLED, SURVIVED, UNDECIDED = "killed", "SURVIVED", "UNDECIDED"


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant; `detail` is the test that killed it, or what went wrong."""

    mutant: Mutant
    verdict: str
    seconds: float
    detail: str


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _options(arguments)
    chosen = [mutant for mutant in MUTANTS if not options.only or mutant.name in options.only]
    if unknown := set(options.only) - {mutant.name for mutant in chosen}:
        print(f"no such mutant: {', '.join(sorted(unknown))}; they are {', '.join(m.name for m in MUTANTS)}")
        return 2
    try:
        for mutant in chosen:
            mutant.patched()
    except DoesNotApply as error:
        print(error)
        return 2
    with tempfile.TemporaryDirectory(prefix="kenotron-mutants-") as folder:
        copies = [_copy(Path(folder) / f"copy-{number}") for number in range(min(options.workers, len(chosen)))]
        outcomes = _without_false_kills(copies[0], _run_all(copies, chosen), len(copies))
    return _report(outcomes)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description="See which bugs the tests notice.")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these mutants instead of all")
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time, each on one core (default: 2)")
    return parser.parse_args(arguments)


def _copy(folder: Path) -> Path:
    """A copy of the working tree: the files that git tracks, and new ones that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def _without_false_kills(copy: Path, outcomes: list[Outcome], workers: int) -> list[Outcome]:
    """The outcomes, those undecided whose killing test fails without the mutant, too."""
    tests = sorted({outcome.detail for outcome in outcomes if outcome.verdict == KILLED})
    if not tests:
        return outcomes
    print(f"\nthe {len(tests)} tests that killed, without a mutant ...", flush=True)
    code, output = _pytest(copy, [*(["-n", str(workers)] if workers > 1 else []), *tests], 4 * TIMEOUT_S)
    failing = set(FAILED.findall(output))
    if code not in (0, 1):
        failing = set(tests)
        print(output)
    return [
        replace(outcome, verdict=UNDECIDED, detail=f"{outcome.detail} fails without it, too")
        if outcome.verdict == KILLED and outcome.detail in failing
        else outcome
        for outcome in outcomes
    ]


def _run_all(copies: Sequence[Path], mutants: Sequence[Mutant]) -> list[Outcome]:
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def run(mutant: Mutant) -> Outcome:
        copy = free.get()
        try:
            return _run_one(copy, mutant)
        finally:
            free.put(copy)

    outcomes = []
    started = time.monotonic()
    with ThreadPoolExecutor(len(copies)) as pool:
        for done in as_completed([pool.submit(run, mutant) for mutant in mutants]):
            outcomes.append(outcome := done.result())
            left = (time.monotonic() - started) / len(outcomes) * (len(mutants) - len(outcomes))
            print(
                f"[{len(outcomes)}/{len(mutants)}] {outcome.verdict:9} {outcome.mutant.name:40} "
                f"{outcome.seconds:5.1f} s   {outcome.detail}   ETA {left // 60:.0f} min {left % 60:.0f} s",
                flush=True,
            )
    return outcomes


def _run_one(copy: Path, mutant: Mutant) -> Outcome:
    path = copy / SOURCE / mutant.file
    original = path.read_text()
    started = time.monotonic()
    try:
        _write(path, mutant.patched(copy))
        code, output = _pytest(copy, ["-x", *mutant.targets], TIMEOUT_S)
    finally:
        _write(path, original)
    seconds = time.monotonic() - started
    if code is None:
        return Outcome(mutant, UNDECIDED, seconds, f"the tests did not end in {TIMEOUT_S} s")
    if code == 0:
        return Outcome(mutant, SURVIVED, seconds, "all of its tests pass")
    if code == 1:
        return Outcome(mutant, KILLED, seconds, FAILED.findall(output)[0])
    return Outcome(mutant, UNDECIDED, seconds, f"pytest's exit code {code}: {output.strip().splitlines()[-1:]}")


def _write(path: Path, text: str) -> None:
    """Python takes a compiled file of the same second and size for that of the new text: it is removed."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
    path.write_text(text)


def _pytest(copy: Path, arguments: Sequence[str], timeout: float) -> tuple[int | None, str]:
    """Its exit code (None: it did not end) and output, in `copy`; whatever it started ends with it."""
    environment = os.environ | {"PYTHONPATH": str(copy / "src"), "KENOTRON_CACHE": str(copy / ".cache")}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*PYTEST, *arguments],
            cwd=copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_group(process.pid)
            process.wait()
        output.seek(0)
        return code, output.read()


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # nothing of it is left
        os.killpg(leader, signal.SIGKILL)


def _report(outcomes: Sequence[Outcome]) -> int:
    """The summary; the exit code."""
    print(f"\nnot counted, as no test on a CPU reaches them: {len(NOT_COUNTED)}")
    for entry in NOT_COUNTED:
        print(f"  {entry.name} ({entry.file}): {entry.why}")
    rest = [outcome for outcome in outcomes if outcome.verdict != KILLED]
    for outcome in rest:
        print(f"\n{outcome.verdict} {outcome.mutant.name}: {outcome.mutant.why}")
        print(f"  {SOURCE}/{outcome.mutant.file}; {outcome.detail}: {' '.join(outcome.mutant.targets)}")
    survivors = sum(outcome.verdict == SURVIVED for outcome in rest)
    print(
        f"\n{len(outcomes)} mutants: {len(outcomes) - len(rest)} killed, {survivors} survived, "
        f"{len(rest) - survivors} undecided"
    )
    return 1 if rest else 0


if __name__ == "__main__":
    sys.exit(main())
