"""How often `kenotron compare` is right, as a table.

    python -m compare_power.run [--pairs 200] [--faults 25] [--first 0]

    clean pairs        200    false alarms       0
    seeded faults       25    found             25    right parameter   25

What goes wrong is printed as it happens: false alarms with the number of their pair, and every fault with the name that
was given. Exit code 1 if there is a false alarm, a fault that is not found, or more than one wrong name in 25.
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compare_power.faults import FAULTS, Fault
from compare_power.pairs import STEPS, pair
from kenotron.training.compare import Comparison, Distances
from support.comparing import compare_on_ranks, rounding_of


@dataclass(frozen=True)
class Answer:
    """What was said about a fault."""

    found: bool
    right: bool
    words: str


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="make compare-power", description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200, help="clean pairs (default: 200)")
    parser.add_argument("--first", type=int, default=0, help="number of the first pair (default: 0)")
    parser.add_argument("--faults", type=int, default=len(FAULTS), help="seeded faults (default: all)")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    alarms = false_alarms(range(options.first, options.first + options.pairs))
    answers = faults_found(FAULTS[: options.faults])
    found, right = (sum(getattr(answer, what) for answer in answers) for what in ("found", "right"))
    print(f"\nclean pairs     {options.pairs:5}    false alarms {alarms:5}")
    print(f"seeded faults   {len(answers):5}    found        {found:5}    right parameter {right:5}")
    print(f"{time.monotonic() - started:.0f} s")
    return int(alarms > 0 or found < len(answers) or len(answers) - right > len(answers) / 25)


def false_alarms(numbers: Sequence[int]) -> int:
    """How many of these clean pairs `compare` calls different."""
    alarms = 0
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder:
            drawn = pair(number, Path(folder))
            comparison = compare_on_ranks(drawn.plain, drawn.other, Path(folder), steps=STEPS)
        alarms += not comparison.agrees
        mark = "agrees" if comparison.agrees else f"FALSE ALARM: {said(comparison)}"
        print(f"pair {number:3}  {margins(comparison)}  {drawn.words}: {mark}", flush=True)
    return alarms


def faults_found(faults: Sequence[Fault]) -> list[Answer]:
    """What `compare` says about each of `faults`; runs without a fault are made once for all that share them."""
    answers = []
    measured: dict[str, tuple[Path, list[Distances]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for number, fault in enumerate(faults):
            folder = Path(temporary)
            plain, other = (fault.problem.config(layout, folder) for layout in ("", fault.layout))
            at, rounding = measured.get(repr(fault.problem), (folder / f"plain-{number}", None))
            if rounding is None:
                rounding = rounding_of(plain, at, fault.problem.steps)
                measured[repr(fault.problem)] = at, rounding
            comparison = compare_on_ranks(
                plain, other, at, steps=fault.problem.steps, measured=rounding, fault=fault.mutant
            )
            answer = judge_answer(fault, comparison)
            answers.append(answer)
            mark = "right" if answer.right else "WRONG NAME" if answer.found else "NOT FOUND"
            print(f"{mark:10}  {fault.mutant.name}, {fault.layout}: {answer.words}", flush=True)
    return answers


def judge_answer(fault: Fault, comparison: Comparison) -> Answer:
    """Whether the fault was found, and the right parameter named (none, where only loss or norm are wrong)."""
    origin = comparison.origin()
    named = "" if origin is None else origin[1].name
    right = bool(re.search(fault.names, named)) if fault.names else origin is None
    return Answer(not comparison.agrees, right and not comparison.agrees, said(comparison))


def said(comparison: Comparison) -> str:
    """The verdict in short."""
    parts = []
    if (origin := comparison.origin()) is not None:
        parts.append(f"{origin[1].name} ({origin[0]}, {origin[1].difference:.1e} of {origin[1].allowed:.1e})")
    if (number := comparison.first_number()) is not None:
        parts.append(f"{number.name} at step {number.step} ({abs(number.a - number.b):.1e} of {number.allowed:.1e})")
    return ", ".join(parts) or "agrees"


def margins(comparison: Comparison) -> str:
    """The largest differences over what is allowed."""
    tensors = {"gradient": comparison.gradients, "update": comparison.update, "weights": comparison.movement}
    found = {
        name: max((each.difference / each.allowed for each in some), default=0.0) for name, some in tensors.items()
    }
    for name in ("lm_loss", "grad_norm"):
        numbers = [each for each in comparison.numbers if each.name == name]
        found[name] = max(abs(each.a - each.b) / each.allowed for each in numbers)
    return " ".join(f"{name} {share:.2f}" for name, share in found.items())


if __name__ == "__main__":
    sys.exit(main())
