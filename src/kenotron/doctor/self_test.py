"""Run and resume a training of seconds on every device of the machine, and compare the numbers.

    cpu, each GPU alone    8 steps with checkpoints at 4 and 8; a new process resumes from step 4: losses and gradient
                           norms are equal, on a CPU bitwise
    2 ranks                ranks that share the batch (gloo; one per GPU with NCCL) resume from the same checkpoint:
                           steps 5 to 8 are equal up to rounding, so reductions between ranks are right

The losses of the uninterrupted run are equal on every machine up to rounding: `FIRST_LOSS` and `LAST_LOSS`. Files are
written to the folder of the test, so its file system is tested, too.
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

Line = dict[str, Any]  # a line of metrics.jsonl

STEPS, SAVED = 8, 4
BATCH = 8
FIRST_LOSS, LAST_LOSS = 5.63954, 5.61189
RANKS = (2, 4, 8)  # divisors of the batch
MACHINE_TOLERANCE = 1e-4  # relative, between machines
ORDER_TOLERANCE = 1e-5  # relative, between orders of float32 sums
COMPARED = ("lm_loss", "grad_norm")
LIMIT_S = 90.0


def tiny(folder: Path, ranks: int) -> dict[str, Any]:
    """Return the config of tiny.yaml for `ranks` ranks, with all files in `folder`."""
    config: dict[str, Any] = packaged_yaml("kenotron.doctor", "tiny.yaml")
    config["checkpoints"] = {"checkpoints_path": str(folder / "checkpoints"), "checkpoint_interval": SAVED}
    config["logging"]["log_dir"] = str(folder / "logs")
    config["tokens"] |= {"train_steps": STEPS, "micro_batch_size": BATCH // ranks}
    config["parallelism"]["dp"] = ranks
    return config


# ---- called by the doctor ------------------------------------------------------------------------------------


def check_device(folder: Path, where: str, environment: dict[str, str]) -> SelfTest:
    """Train in ``folder/whole``, resume in ``folder/resumed``, each in a process with one device, and compare."""
    exact = where == "cpu"

    def problem() -> str | None:
        whole = run_in(folder / "whole", 1, environment)
        copy_checkpoint(folder / "whole", folder / "resumed")
        resumed = run_in(folder / "resumed", 1, environment)
        return wrong_losses(whole) or difference(whole, resumed, 0.0 if exact else ORDER_TOLERANCE)

    equal = "equal bit by bit" if exact else "equal up to rounding"
    return _verdict(where, problem, f"{STEPS} steps, resumed at {SAVED}, losses and gradient norms {equal}")


def check_ranks(whole: Path, folder: Path, where: str, ranks: int, environment: dict[str, str]) -> SelfTest:
    """Resume the run of the folder `whole` on `ranks` ranks in `folder`, and compare."""

    def problem() -> str | None:
        copy_checkpoint(whole, folder)
        resumed = run_in(folder, ranks, environment)
        return difference(logged(whole), resumed, ORDER_TOLERANCE)

    return _verdict(where, problem, f"the same run resumed at {SAVED}, equal up to rounding")


def _verdict(where: str, find_problem: Callable[[], str | None], passed: str) -> SelfTest:
    """Return the result of the test `find_problem`, with the text `passed` if it finds no problem."""
    started = time.perf_counter()
    try:
        problem = find_problem()
    except (Failed, OSError) as error:
        problem = str(error)
    return SelfTest(where, problem is None, round(time.perf_counter() - started, 1), problem or passed)


def run_in(folder: Path, ranks: int, environment: dict[str, str]) -> dict[int, Line]:
    """Train in `folder`, in a process with `environment` and a time limit, and return step → line of the metrics."""
    call_limited(train, str(folder), ranks, seconds=LIMIT_S, environment=environment)
    return logged(folder)


def copy_checkpoint(whole: Path, folder: Path) -> None:
    """Copy the checkpoint in the middle of the run `whole` to `folder`, for another run to resume. Raises Failed."""
    checkpoint = Path("checkpoints") / str(SAVED)
    if not (whole / checkpoint).is_dir():
        raise Failed(f"no checkpoint of step {SAVED}: the run that should save it failed")
    shutil.copytree(whole / checkpoint, folder / checkpoint)


# ---- comparisons ---------------------------------------------------------------------------------------------


def wrong_losses(lines: dict[int, Line]) -> str | None:
    """Return the first problem of the losses of an uninterrupted run, compared with other machines, or None."""
    for step, expected in ((1, FIRST_LOSS), (STEPS, LAST_LOSS)):
        loss = lines.get(step, {}).get("lm_loss")
        if loss is None:
            return f"no loss of step {step} in metrics.jsonl"
        if not math.isfinite(loss) or abs(loss - expected) > MACHINE_TOLERANCE * expected:
            right = f"on other machines {expected:.6g}"
            return f"the loss of step {step} is {loss:.6g}, {right}: this device computes wrongly"
    return None


def difference(whole: dict[int, Line], resumed: dict[int, Line], allowed: float) -> str | None:
    """Return the first relative difference of two runs of more than `allowed` after the checkpoint, or None."""
    for step in range(SAVED + 1, STEPS + 1):
        for name in COMPARED:
            one, other = whole.get(step, {}).get(name), resumed.get(step, {}).get(name)
            if one is None or other is None:
                return f"no {name} of step {step} in metrics.jsonl"
            if not abs(one - other) <= allowed * abs(one):  # also where one is NaN
                return f"step {step}: {name} {one!r} in the uninterrupted run, {other!r} in the resumed one"
    return None


def logged(folder: Path) -> dict[int, Line]:
    """Return step → line of a run's metrics."""
    return logged_steps(folder / "logs" / "doctor" / METRICS)


# ---- called in other processes -------------------------------------------------------------------------------


def train(folder: str, ranks: int) -> None:
    """Train the tiny config in `folder`, from its newest checkpoint if there is one."""
    import kenotron

    kenotron.train(tiny(Path(folder), ranks))
