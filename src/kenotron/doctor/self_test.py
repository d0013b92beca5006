"""A training run of seconds, ended and resumed, on every device of the machine.

    cpu, each GPU alone    8 steps with checkpoints at 4 and 8; from the one at 4, a new process computes 5 to 8 again:
                           losses and gradient norms are equal, on a CPU bit by bit
    2 ranks                ranks that share the batch (gloo; one per GPU with NCCL) go on from the same checkpoint:
                           steps 5 to 8 are equal up to rounding, so sums between ranks are right

The losses of the uninterrupted run are the same on every machine, up to rounding: `FIRST_LOSS` and `LAST_LOSS`. Files
are in the folder that is tested, so that its file system is, too.
"""

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kenotron.config.packaged import packaged_yaml
from kenotron.doctor.facts import SelfTest
from kenotron.doctor.limited import Failed, call_limited
from kenotron.runs.files import METRICS, logged_steps

Line = dict[str, Any]  # of metrics.jsonl

STEPS, SAVED = 8, 4
BATCH = 8
FIRST_LOSS, LAST_LOSS = 5.63954, 5.61189
RANKS = (2, 4, 8)  # numbers that divide the batch
OF_ANOTHER_MACHINE = 1e-4  # relative
OF_ANOTHER_ORDER = 1e-5  # of sums, in float32
COMPARED = ("lm_loss", "grad_norm")
LIMIT_S = 90.0


def tiny(folder: Path, ranks: int) -> dict[str, Any]:
    """The config of tiny.yaml on `ranks` ranks, all its files in `folder`."""
    config: dict[str, Any] = packaged_yaml("kenotron.doctor", "tiny.yaml")
    config["checkpoints"] = {"checkpoints_path": str(folder / "checkpoints"), "checkpoint_interval": SAVED}
    config["logging"]["log_dir"] = str(folder / "logs")
    config["tokens"] |= {"train_steps": STEPS, "micro_batch_size": BATCH // ranks}
    config["parallelism"]["dp"] = ranks
    return config


# ---- called by the doctor ------------------------------------------------------------------------------------


def check_device(folder: Path, where: str, environment: dict[str, str]) -> SelfTest:
    """Train in ``folder/whole``, resume in ``folder/resumed``, each in a process that sees one device, and compare."""
    exact = where == "cpu"

    def problem() -> str | None:
        whole = run_in(folder / "whole", 1, environment)
        hand_on(folder / "whole", folder / "resumed")
        resumed = run_in(folder / "resumed", 1, environment)
        return unlike_other_machines(whole) or difference(whole, resumed, 0.0 if exact else OF_ANOTHER_ORDER)

    equal = "equal bit by bit" if exact else "equal up to rounding"
    return _verdict(where, problem, f"{STEPS} steps, resumed at {SAVED}, losses and gradient norms {equal}")


def check_ranks(whole: Path, folder: Path, where: str, ranks: int, environment: dict[str, str]) -> SelfTest:
    """Resume the run of the folder `whole` on `ranks` ranks in `folder`, and compare."""

    def problem() -> str | None:
        hand_on(whole, folder)
        resumed = run_in(folder, ranks, environment)
        return difference(logged(whole), resumed, OF_ANOTHER_ORDER)

    return _verdict(where, problem, f"the same run resumed at {SAVED}, equal up to rounding")


def _verdict(where: str, find_problem: Callable[[], str | None], passed: str) -> SelfTest:
    """The result of a test that `find_problem` makes; `passed` is said of it where there is none."""
    started = time.perf_counter()
    try:
        problem = find_problem()
    except (Failed, OSError) as error:
        problem = str(error)
    return SelfTest(where, problem is None, round(time.perf_counter() - started, 1), problem or passed)


def run_in(folder: Path, ranks: int, environment: dict[str, str]) -> dict[int, Line]:
    """The metrics of a run in `folder`, trained in a process with `environment` and a time limit."""
    call_limited(train, str(folder), ranks, seconds=LIMIT_S, environment=environment)
    return logged(folder)


def hand_on(whole: Path, folder: Path) -> None:
    """Copy the checkpoint in the middle of a run to where another run will go on from it."""
    checkpoint = Path("checkpoints") / str(SAVED)
    if not (whole / checkpoint).is_dir():
        raise Failed(f"no checkpoint of step {SAVED}: the run that should save it failed")
    shutil.copytree(whole / checkpoint, folder / checkpoint)


# ---- what agrees, and what does not --------------------------------------------------------------------------


def unlike_other_machines(lines: dict[int, Line]) -> str | None:
    """What is wrong with the losses of a whole run, compared with those of other machines."""
    for step, expected in ((1, FIRST_LOSS), (STEPS, LAST_LOSS)):
        loss = lines.get(step, {}).get("lm_loss")
        if loss is None:
            return f"no loss of step {step} in metrics.jsonl"
        if not math.isfinite(loss) or abs(loss - expected) > OF_ANOTHER_MACHINE * expected:
            return (
                f"the loss of step {step} is {loss:.6g}, on other machines {expected:.6g}: this device computes wrongly"
            )
    return None


def difference(whole: dict[int, Line], resumed: dict[int, Line], allowed: float) -> str | None:
    """The first number after the checkpoint in which two runs differ by more than `allowed`, relative."""
    for step in range(SAVED + 1, STEPS + 1):
        for name in COMPARED:
            one, other = whole.get(step, {}).get(name), resumed.get(step, {}).get(name)
            if one is None or other is None:
                return f"no {name} of step {step} in metrics.jsonl"
            if not abs(one - other) <= allowed * abs(one):  # also where one is NaN
                return f"step {step}: {name} {one!r} in the uninterrupted run, {other!r} in the resumed one"
    return None


def logged(folder: Path) -> dict[int, Line]:
    """The lines of a run's metrics by their steps."""
    return logged_steps(folder / "logs" / "doctor" / METRICS)


# ---- called in other processes -------------------------------------------------------------------------------


def train(folder: str, ranks: int) -> None:
    """Train the tiny config in `folder`, from its newest checkpoint if there is one."""
    import kenotron

    kenotron.train(tiny(Path(folder), ranks))
