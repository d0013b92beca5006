"""`kenotron doctor`: describe this machine, find its problems, and test whether training works on it.

examine(folder) ─▶ Report        environment.py, torch_facts.py, settings.py    the facts (facts.py)
                                 rules.py                                       facts → findings
                                 self_test.py                                   train, resume, compare
page.py                          the page, and JSON

Code that needs torch, a device or a disk runs in other processes with a time limit (limited.py), so that a torch that
cannot be imported, a driver that hangs or a file server that is down is a line on the page. This process does not
import torch, and training does not import this package.
"""

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from kenotron.doctor import environment, rules, self_test
from kenotron.doctor.facts import VERSION, Accelerator, Facts, Finding, Report, SelfTest, Torch
from kenotron.doctor.limited import Failed, call_limited
from kenotron.doctor.settings import settings
from kenotron.doctor.torch_facts import describe_torch

__all__ = ["Facts", "Finding", "Report", "examine"]

TORCH_LIMIT_S = 120.0  # the first import from a file server is slow
ON_CPU = {"KENOTRON_DEVICE": "cpu"}


def examine(folder: Path, *, quick: bool = False, say: Callable[[str], None] = lambda line: None) -> Report:
    """Collect the facts about this machine and the disk of `folder`, and, unless `quick`, train on it.

    `say` gets a line before each part. Files are written to a temporary folder in `folder`, which is removed.
    """
    started = time.perf_counter()
    say("facts")
    facts = _facts(folder)
    tests: list[SelfTest] = []
    if not quick and facts.torch.problem is None and facts.disk.problem is None:
        tests = _run_tests(facts, folder, say)
    findings = rules.findings(facts)
    return Report(
        version=VERSION,
        time=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        seconds=round(time.perf_counter() - started, 1),
        passed=all(test.passed for test in tests) and all(finding.severity != "error" for finding in findings),
        facts=facts,
        findings=findings,
        self_tests=tests,
    )


def _facts(folder: Path) -> Facts:
    try:
        fields = call_limited(describe_torch, seconds=TORCH_LIMIT_S)
        torch = Torch(**{**fields, "accelerators": [Accelerator(**device) for device in fields["accelerators"]]})
    except Failed as error:
        torch = Torch(problem=str(error))
    return Facts(
        software=environment.software(),
        torch=torch,
        processor=environment.processor(),
        memory=environment.memory(),
        nvidia=environment.nvidia(),
        network=environment.network(),
        disk=environment.disk(folder),
        limits=environment.limits(),
        settings=settings(os.environ),
    )


def _run_tests(facts: Facts, folder: Path, say: Callable[[str], None]) -> list[SelfTest]:
    """Run the self-tests on the CPU, then on all GPUs at the same time, then on several ranks."""
    gpus = _gpus(facts)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".kenotron-doctor-", ignore_cleanup_errors=True) as temporary:
        scratch = Path(temporary)
        say("self-test: cpu")
        tests = [self_test.check_device(scratch / "cpu", "cpu", ON_CPU)]
        if gpus:
            say(f"self-test: {', '.join(gpus)}")
            with ThreadPoolExecutor(len(gpus)) as pool:  # each thread waits for a process
                folders = [scratch / where.replace(":", "-") for where in gpus]
                tests += pool.map(self_test.check_device, folders, gpus, gpus.values())
        for where, count, variables in _ranks(facts):
            say(f"self-test: {where}")
            whole = scratch / ("cpu" if variables else "cuda-0") / "whole"
            tests.append(self_test.check_ranks(whole, scratch / where, where, count, variables))
    return tests


def _gpus(facts: Facts) -> dict[str, dict[str, str]]:
    """Return ``cuda:0`` and so on → the environment of a process that sees only this GPU."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = range(len(facts.torch.accelerators))
    return {f"cuda:{n}": {"CUDA_VISIBLE_DEVICES": listed[n] if listed != [""] else str(n)} for n in numbers}


def _ranks(facts: Facts) -> list[tuple[str, int, dict[str, str]]]:
    """Return (name, number of ranks, environment) of each test of several ranks, on two cores and on several GPUs."""
    tests: list[tuple[str, int, dict[str, str]]] = []
    if facts.processor.usable > 1 and "gloo" in facts.torch.backends:
        tests.append(("2 ranks (gloo)", 2, ON_CPU))
    count = max((n for n in self_test.RANKS if n <= len(facts.torch.accelerators)), default=0)
    if count and "nccl" in facts.torch.backends:
        tests.append((f"{count} GPUs (nccl)", count, {}))
    return tests
