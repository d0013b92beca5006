"""A training run of seconds, ended and resumed, on every device of the machine.

    cpu, each GPU alone    8 steps with checkpoints at 4 and 8; from the one at 4, a new process computes 5 to 8 again:
                           losses and gradient norms are equal, on a CPU bit by bit
    2 ranks                ranks that share the batch (gloo; one per GPU with NCCL) go on from the same checkpoint:
                           steps 5 to 8 are equal up to rounding, so sums between ranks are right

The losses of the uninterrupted run are the same on every machine, up to rounding: `FIRST_LOSS` and `LAST_LOSS`. Files
are in the folder that is tested, so that its file system is, too.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kenotron.doctor.facts import SelfTest, Speed
from kenotron.doctor.limited import Failed, call_limited

if TYPE_CHECKING:
    import torch

    from kenotron.config import Config
    from kenotron.parallel.mesh import Mesh

Line = dict[str, Any]  # of metrics.jsonl

STEPS, SAVED = 8, 4
BATCH = 8
FIRST_LOSS, LAST_LOSS = 5.63954, 5.61189
RANKS = (2, 4, 8)  # numbers that divide the batch
OF_ANOTHER_MACHINE = 1e-4  # relative
OF_ANOTHER_ORDER = 1e-5  # of sums, in float32
COMPARED = ("lm_loss", "grad_norm")
LIMIT_S = 90.0
REDUCED = 16 << 20  # bytes
REDUCTIONS = 5


def tiny(folder: Path, ranks: int = 1) -> dict[str, Any]:
    """The config: two layers of 64 in float32 on synthetic tokens, all files in `folder`."""
    return {
        "general": {"project": "doctor", "run": "doctor", "seed": 7},
        "model": {
            "model_config": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 256,
                "max_position_embeddings": 64,
            },
            "init_method": {"std": 0.05},
            "dtype": "float32",
        },
        "checkpoints": {"checkpoints_path": str(folder / "checkpoints"), "checkpoint_interval": SAVED},
        "logging": {"log_dir": str(folder / "logs"), "tensorboard": False},
        "tokens": {
            "sequence_length": 64,
            "train_steps": STEPS,
            "micro_batch_size": BATCH // ranks,
            "batch_accumulation_per_replica": 1,
        },
        "optimizer": {
            "optimizer_factory": {"name": "adamW", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8},
            "zero_stage": 0,
            "weight_decay": 0.1,
            "clip_grad": 1.0,
            "accumulate_grad_in_fp32": True,
            "learning_rate_scheduler": {"learning_rate": 0.01, "lr_warmup_steps": 2, "lr_decay_style": "constant"},
        },
        "data_stages": [{"name": "only", "start_training_step": 1, "data": {"dataset": None, "seed": 3}}],
        "parallelism": {"dp": ranks, "pp": 1, "tp": 1, "timeout_seconds": 60},
    }


# ---- called by the doctor ------------------------------------------------------------------------------------


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """A folder in `folder`, removed at the end with what the runs have written."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".kenotron-doctor-", ignore_cleanup_errors=True) as scratch:
        yield Path(scratch)


def check_device(folder: Path, where: str, environment: dict[str, str]) -> SelfTest:
    """Train in ``folder/whole``, resume in ``folder/resumed``, each in a process that sees one device, and compare."""
    started = time.perf_counter()
    try:
        whole = _lines(call_limited(train, str(folder / "whole"), seconds=LIMIT_S, environment=environment))
        hand_on(folder / "whole", folder / "resumed")
        resumed = _lines(call_limited(train, str(folder / "resumed"), seconds=LIMIT_S, environment=environment))
        exact = where == "cpu"
        problem = unlike_other_machines(whole) or difference(whole, resumed, 0.0 if exact else OF_ANOTHER_ORDER)
    except (Failed, OSError) as error:
        problem = str(error)
    equal = "equal bit by bit" if where == "cpu" else "equal up to rounding"
    passed = f"{STEPS} steps, resumed at {SAVED}, losses and gradient norms {equal}"
    return SelfTest(where, problem is None, round(time.perf_counter() - started, 1), problem or passed)


def check_ranks(
    whole: Path, folder: Path, where: str, ranks: int, environment: dict[str, str]
) -> tuple[SelfTest, Speed]:
    """Resume the run of the folder `whole` on `ranks` ranks in `folder`, and compare; sums between them are timed."""
    started, speed = time.perf_counter(), None
    try:
        hand_on(whole, folder)
        found = call_limited(train_on_ranks, str(folder), ranks, seconds=LIMIT_S, environment=environment)
        speed = found["all-reduce"]
        problem = difference(logged(whole), _lines(found["lines"]), OF_ANOTHER_ORDER)
    except (Failed, OSError) as error:
        problem = str(error)
    passed = f"the same run resumed at {SAVED}, equal up to rounding"
    test = SelfTest(where, problem is None, round(time.perf_counter() - started, 1), problem or passed)
    return test, Speed("all-reduce", where, speed, "B/s", problem if speed is None else None)


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


def _lines(listed: list[Line]) -> dict[int, Line]:
    return {line["iteration"]: line for line in listed}


def logged(folder: Path) -> dict[int, Line]:
    """The lines of a run's metrics by their steps."""
    text = (folder / "logs" / "doctor" / "metrics.jsonl").read_text()
    return _lines([json.loads(line) for line in text.splitlines()])


# ---- called in other processes -------------------------------------------------------------------------------


def train(folder: str) -> list[Line]:
    """Train the tiny config in `folder`, from its newest checkpoint if there is one; returns the lines of metrics."""
    import kenotron

    kenotron.train(tiny(Path(folder)))
    return list(logged(Path(folder)).values())


def train_on_ranks(folder: str, ranks: int) -> dict[str, Any]:
    """The same on `ranks` ranks, and ``all-reduce``, the speed of a sum between them in bytes/s."""
    import kenotron
    from kenotron.launch import work_on_ranks

    answer = Path(folder) / "all-reduce.json"
    work_on_ranks(kenotron.load(tiny(Path(folder), ranks)), reduce_and_train, answer=str(answer))
    return {"lines": list(logged(Path(folder)).values()), "all-reduce": json.loads(answer.read_text())}


def reduce_and_train(config: Config, mesh: Mesh, device: torch.device, *, answer: str) -> None:
    """The work of each rank."""
    from kenotron.launch.training import train as train_as_rank

    speed = all_reduce_speed(device)
    if mesh.is_first:
        Path(answer).write_text(json.dumps(speed))
    train_as_rank(config, mesh, device)


def all_reduce_speed(device: torch.device) -> float:
    """Bytes per second that a rank sends in a ring: 2 (n - 1) / n of a tensor's, the bus bandwidth of nccl-tests."""
    import torch
    import torch.distributed as dist

    from kenotron.parallel.device import synchronize

    tensor, best = torch.zeros(REDUCED // 4, device=device), float("inf")
    for _ in range(REDUCTIONS):
        dist.barrier()
        synchronize(device)
        started = time.perf_counter()
        dist.all_reduce(tensor)
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    ranks = dist.get_world_size()
    return 2 * (ranks - 1) / ranks * REDUCED / best
