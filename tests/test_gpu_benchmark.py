"""`make bench-gpu` on a CPU, in miniature: cases, turns, what is kept, the whole command; and what is beside it."""

import json
import math
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.tiny_run import REPOSITORY

FOLDER = REPOSITORY / "benchmarks" / "gpu"


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program as a module."""
    before = set(sys.modules)
    for folder in (FOLDER, FOLDER.parent, FOLDER.parent / "peers"):
        monkeypatch.syspath_prepend(str(folder))
    yield __import__("speed")
    for name in ("speed", "table", "tables", "cases", "contender", "environment", "trace_kernels"):
        if name not in before:
            sys.modules.pop(name, None)


def test_every_case_has_a_config_of_its_tokens_and_its_recomputation(speed: Any, tmp_path: Path) -> None:
    for case in speed.cases(False):
        config = case.config(tmp_path)
        sizes = (config.tokens.micro_batch_size, config.tokens.batch_accumulation_per_replica)
        assert math.prod((*sizes, config.tokens.sequence_length)) == case.tokens
        expected = {"": False, "recompute": True}.get(case.recompute, case.recompute)
        assert config.parallelism.recompute_layer == expected


GRADIENT_NORMS = {  # contender → the function that returns it or a result that has it
    "kenotron": ("kenotron.training.step:train_step", lambda result: result.grad_norm),
    "transformers": ("torch.nn.utils:clip_grad_norm_", float),
}


@pytest.mark.budget(10, reason="imports transformers' models")
@pytest.mark.parametrize("name", GRADIENT_NORMS)
def test_a_step_of_two_equal_micro_batches_is_that_of_one(
    speed: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradient are means over the tokens of a step, and each micro-batch has a backward pass."""
    passes, norms = [], []
    path, norm_of = GRADIENT_NORMS[name]
    backward, function = torch.Tensor.backward, resolve_name(path)

    def count(tensor: torch.Tensor, *given: Any, **options: Any) -> None:
        passes.append(tensor.shape)
        backward(tensor, *given, **options)

    def watch(*given: Any, **options: Any) -> Any:
        result = function(*given, **options)
        norms.append(norm_of(result))
        return result

    monkeypatch.setattr(torch.Tensor, "backward", count)
    monkeypatch.setattr(path.replace(":", "."), watch)
    contender, case = sys.modules["contender"], sys.modules["cases"].Case
    found = {}
    for accumulation in (1, 2):
        torch.manual_seed(0)
        miniature = case("llama-3.2-1b", 64, accumulation=accumulation, miniature=True)
        step, _ = contender.CONTENDERS[name](miniature, torch.device("cpu"), tmp_path)
        passes.clear()
        norms.clear()
        losses = [step() for _ in range(3)]
        assert len(passes) == 3 * accumulation
        found[accumulation] = [*losses, *norms]
    assert found[2] == pytest.approx(found[1], rel=1e-5)
    assert len(found[1]) == 6


def test_a_loop_over_transformers_has_no_selective_recomputation(speed: Any, tmp_path: Path) -> None:
    contender, case = sys.modules["contender"], sys.modules["cases"].Case
    selective = case("llama-3.1-8b", 64, recompute="selective", miniature=True)
    with pytest.raises(contender.Unavailable, match="all of a layer or nothing"):
        contender.transformers(selective, torch.device("cpu"), tmp_path)


def test_turns_rotate_a_failure_ends_a_row_and_the_budget_keeps_what_there_is(
    speed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[str] = []
    clock = SimpleNamespace(monotonic=lambda: len(played))

    def turn(contender: str, case: str, *_: Any) -> dict[str, Any]:
        played.append(contender)
        return {"problem": "out of memory"} if contender == "b" else {"seconds": 0.5 + len(played)}

    monkeypatch.setattr(speed, "turn", turn)
    monkeypatch.setattr(speed, "time", clock)
    rows = [{"case": "one", "tokens": 8, "contender": each, "turns": []} for each in "abc"]
    record, arguments = {"rows": rows}, SimpleNamespace(output=tmp_path / "gpu.json")
    assert [speed.play(record, number, arguments, deadline=6) for number in range(3)] == [True, True, False]
    assert played == ["a", "b", "c", "c", "a", "c"]
    kept = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [[turn["seconds"] for turn in row["turns"]] for row in kept] == [[1.5, 5.5], [], [3.5, 4.5, 6.5]]
    assert kept[1]["problem"] == "out of memory"
    assert speed.table.speeds(kept[2]) == (8 / 3.5, 8 / 4.5)


@pytest.mark.slow
@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(
    "checks",
    ["facts upload initial_bits products attention decoding loss grouped host_waits optimizer", "compiled engines"],
)
def test_the_checks_of_the_first_contact_pass_on_a_cpu(checks: str) -> None:
    command = [sys.executable, str(FOLDER / "first_contact.py"), "--cpu", *checks.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.rpartition("\n\n")[2].splitlines()
    assert list(dict.fromkeys(line.split()[0] for line in lines)) == checks.split()
    assert "FAIL" not in done.stdout


@pytest.mark.slow
@pytest.mark.cases(slow=0)
def test_the_whole_command_in_miniature(speed: Any, tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    rows = ["^tiny-llama 256, (kenotron|kenotron train)$", "^mixtral.* 64 packed recompute, (transformers|.*triton)$"]
    options = ["--device", "cpu", "--miniature", "--rounds", "1", "--turn-seconds", "0.1", "--output", str(output)]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "speed.py"), *options, "--only", *rows],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(output.read_text())
    assert set(record["ceiling"]) == {"bfloat16", "float32"}
    by_name = {row["contender"]: row for row in record["rows"]}
    assert by_name["kenotron without triton"]["problem"] == "on a CPU there are no kernels in Triton"
    for name in ("kenotron", "transformers"):
        (turn,) = by_name[name]["turns"]
        assert 0 < turn["seconds"] < turn["first_seconds"]
        assert turn["peak_allocated"] > 0
        assert turn["flops_causal"] < turn["flops"]
        assert 4.5 < turn["loss"] < 6.5  # of 256 tokens: ln 256 is 5.5
        assert turn["host_seconds"] > 0
    # Per layer 4 products of 16 x 16 and 3 of 16 x 64, attention over 256 tokens; the head over 256 entries.
    assert by_name["kenotron"]["turns"][0]["flops"] == 3 * (
        2 * (2 * (4 * 16 * 16 + 3 * 16 * 64) + 4 * 256 * 16) + 2 * 16 * 256
    )
    assert by_name["kenotron train"]["turns"][0]["note"] == "15 steps"
    lines = [line for line in speed.table.markdown(record).splitlines() if line.startswith("| ")]
    columns = speed.table.COLUMNS.count("|")
    assert len(lines) == 2 + len(by_name)
    assert {line.count("|") for line in lines} == {columns}


def test_kernels_are_summed_by_name_and_gaps_are_what_no_kernel_fills(
    speed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def kernel(name: str, start: int, end: int) -> Any:
        return SimpleNamespace(
            name=name, time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        )

    # Microseconds; the second overlaps the first, in another stream.
    given = [kernel("mm", 0, 4000), kernel("copy", 3000, 5000), kernel("mm", 8000, 10000), kernel("norm", 10500, 11000)]
    __import__("trace_kernels").describe(given[::-1])
    assert capsys.readouterr().out.splitlines() == [
        "4 kernels, 7.5 ms of 11.0 busy",
        "    6.00 ms     2 x mm",
        "    2.00 ms     1 x copy",
        "    0.50 ms     1 x norm",
        "waits of 3.5 ms, the longest 3.00 ms before mm",
    ]


# ---- roofline.py ----

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
    assert launches <= 1071
    assert moved <= 160
    assert waits == 1
    matrices = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * INNER) + VOCABULARY * HIDDEN
    attention = LAYERS * 2 * TOKENS * LENGTH * HIDDEN * 3.5  # causal; its backward has five products for two
    assert flops == pytest.approx((6 * matrices * TOKENS + attention) / 1e12, abs=0.06)
    measured = json.loads((REPOSITORY / "benchmarks" / "results" / "gpu.json").read_text())
    (turn,) = (each["turns"][0] for each in measured["rows"] if (each["case"], each["contender"]) == (CASE, "kenotron"))
    assert speed["H200"] == pytest.approx(TOKENS / turn["seconds"], rel=0.15)  # what it leaves out is little
