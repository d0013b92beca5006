"""`make bench-gpu` on a CPU, in miniature: who takes turns, what is kept, and the whole command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.tiny_run import REPOSITORY

FOLDER = REPOSITORY / "benchmarks" / "gpu"


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program as a module."""
    before = set(sys.modules)
    for folder in (FOLDER, FOLDER.parent, FOLDER.parent / "peers"):
        monkeypatch.syspath_prepend(str(folder))
    yield __import__("speed")
    for name in ("speed", "table", "tables", "cases", "contender", "environment"):
        if name not in before:
            sys.modules.pop(name, None)


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


def test_the_tests_of_a_gpu_need_pytest_and_nothing_more_than_a_run_does() -> None:
    """A machine with a GPU has often no network: tests/conftest.py asks neither for hypothesis nor for xdist."""
    blocked = "import sys; sys.modules['hypothesis'] = sys.modules['xdist'] = None; import pytest; pytest.main()"
    command = [sys.executable, "-c", blocked, "--collect-only", "tests/gpu/test_runs_on_a_gpu.py"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert "test_memory_and_utilization_are_measured" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.slow
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
    assert by_name["kenotron triton"]["problem"] == "kernels in Triton need a GPU"
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
