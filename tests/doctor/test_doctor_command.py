"""`kenotron doctor`: the page, the JSON object and the exit code."""

import json
import resource
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from doctor.test_rules import SERVER
from kenotron import doctor
from kenotron.doctor.facts import Facts, Report, SelfTest
from kenotron.doctor.page import as_json, page
from kenotron.doctor.rules import findings
from support.tiny_run import Shell, command


def report_of(facts: Facts, *tests: SelfTest) -> Report:
    return Report(2, "2026-11-23 12:00 UTC", 31.0, all(test.passed for test in tests), facts, findings(facts), [*tests])


def shown(report: Report, width: int = 100) -> str:
    return "\n".join(text for _, text in page(report, width))


@pytest.fixture
def torch_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "call_limited", lambda function, *arguments, **options: function(*arguments))


@pytest.mark.usefixtures("torch_in_this_process")
def test_the_json_object_has_every_field_of_a_report_and_no_other(tmp_path: Path, shell: Shell) -> None:
    code, text, error = shell("doctor", "--quick", "--json", "--folder", tmp_path)
    report = TypeAdapter(Report).validate_json(text, strict=True)
    assert json.loads(as_json(report)) == json.loads(text)  # a key that is no field would be lost on the way
    assert (report.version, report.self_tests, error) == (2, [], "")
    assert code == (0 if report.passed else 1)
    assert report.facts.torch.version
    assert report.facts.disk.total == shutil.disk_usage(tmp_path).total
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("torch_in_this_process")
def test_a_torch_that_cannot_be_imported_is_the_page_s_error(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(function: Any, **options: Any) -> dict[str, Any]:
        raise doctor.Failed("was killed by SIGILL")

    monkeypatch.setattr(doctor, "call_limited", broken)
    code, text, _ = shell("doctor", "--quick", "--folder", tmp_path)
    assert code == 1
    assert "importing torch fails: was killed by SIGILL" in text
    assert text.endswith("FAILED: torch-does-not-import.\n")


def test_a_folder_that_is_not_there_is_wrong_input(shell: Shell) -> None:
    code, _, error = shell("doctor", "--folder", "no/such/folder")
    assert (code, error.count("\n")) == (2, 1)
    assert "--folder" in error


def test_the_page_says_what_failed_and_where() -> None:
    tests = SelfTest("cpu", True, 9.0, "equal"), SelfTest("cuda:1", False, 3.0, "step 6: lm_loss differs")
    text = shown(report_of(SERVER, *tests))
    assert text.endswith("FAILED: the self-test on cuda:1.")
    assert "FAILED: step 6: lm_loss differs" in text
    assert shown(report_of(SERVER, tests[0])).endswith("Training works here, on cpu.")


@pytest.mark.parametrize(("visible", "seen"), [("", ("0", "1")), ("4,5", ("4", "5"))])
def test_every_gpu_is_tested_alone_and_then_all_together(
    visible: str, seen: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs made up: what would be called where. Of a job that was given two of eight, it is these two."""
    calls = []

    def call(function: Any, *arguments: Any, seconds: float, environment: dict[str, str] | None = None) -> Any:
        if function.__name__ == "describe_torch":
            return asdict(SERVER.torch)
        folder, ranks = arguments
        calls.append((ranks, environment))
        return write_run(Path(folder))

    for module in (doctor, doctor.self_test):
        monkeypatch.setattr(module, "call_limited", call)
    monkeypatch.setattr("kenotron.doctor.environment.processor", lambda: SERVER.processor)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    report = doctor.examine(tmp_path)
    assert [(test.where, test.passed) for test in report.self_tests] == [
        ("cpu", True),
        ("cuda:0", True),
        ("cuda:1", True),
        ("2 ranks (gloo)", True),
        ("2 GPUs (nccl)", True),
    ]
    on_cpu, first, second = {"KENOTRON_DEVICE": "cpu"}, *({"CUDA_VISIBLE_DEVICES": number} for number in seen)
    expected = [(1, environment) for environment in (on_cpu, first, second) for _ in range(2)]
    expected += [(2, on_cpu), (2, {})]
    assert sorted(map(str, calls)) == sorted(map(str, expected))


def write_run(folder: Path) -> None:
    """What a run leaves in `folder`, with the losses that are right."""
    losses = {1: doctor.self_test.FIRST_LOSS, doctor.self_test.STEPS: doctor.self_test.LAST_LOSS}
    steps = range(1, doctor.self_test.STEPS + 1)
    lines = [{"iteration": step, "lm_loss": losses.get(step, 5.6), "grad_norm": 1.0} for step in steps]
    (folder / "checkpoints" / str(doctor.self_test.SAVED)).mkdir(parents=True, exist_ok=True)
    (folder / "logs" / "doctor").mkdir(parents=True)
    (folder / "logs" / "doctor" / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.slow
def test_the_whole_of_it_passes_here_in_a_minute_on_two_cores(tmp_path: Path) -> None:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = command("doctor", "--json", "--folder", str(tmp_path), folder=tmp_path, timeout=900)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = TypeAdapter(Report).validate_json(done.stdout, strict=True)
    assert (done.returncode, report.passed) == (0, True), done.stdout
    assert report.self_tests[0].where == "cpu"
    # A minute of processor time is at most a minute of an idle machine, whatever else this one does.
    assert now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime <= 60
    assert list(tmp_path.iterdir()) == []
