"""What a step of Llama 1B asks of a GPU, counted without one: a lost fusion or a new wait of the host shows here."""

import json
import subprocess
import sys

import pytest

from support.tiny_run import REPOSITORY

CASE, TOKENS, LENGTH = "llama-3.2-1b 4096", 8192, 4096
HIDDEN, LAYERS, KEYS, INNER, VOCABULARY = 2048, 16, 512, 8192, 128256


@pytest.mark.slow
def test_launches_bytes_flops_and_waits_of_a_step_of_1b() -> None:
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "gpu" / "roofline.py"), CASE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    head, row = (line.replace(",", "") for line in done.stdout.splitlines()[-2:])
    launches, moved, flops, waits, *speeds = map(float, row.removeprefix(CASE).split())
    speed = dict(zip(head.removesuffix("tokens/s").split()[-len(speeds) :], speeds))
    assert launches <= 1624
    assert moved <= 270
    assert waits == 1
    matrices = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * INNER) + VOCABULARY * HIDDEN
    attention = LAYERS * 2 * TOKENS * LENGTH * HIDDEN * 3.5  # causal; its backward has five products for two
    assert flops == pytest.approx((6 * matrices * TOKENS + attention) / 1e12, abs=0.06)
    measured = json.loads((REPOSITORY / "benchmarks" / "results" / "gpu.json").read_text())
    (turn,) = (
        each["turns"][0]
        for each in measured["rows"]
        if (each["case"], each["contender"]) == (CASE, "kenotron without triton")
    )
    assert speed["H200"] == pytest.approx(TOKENS / turn["seconds"], rel=0.15)  # what it leaves out is little
