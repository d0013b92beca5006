"""`kenotron runs` and `kenotron report`: what their pages say is what the runs have logged."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import kenotron as kn
from kenotron.runs.logged import read_run
from kenotron.runs.report import POINTS, report_page
from kenotron.runs.summary import summary_of
from support.browser import drawn
from support.tiny_run import Shell, text_overrides, tiny_config, train_quietly


def written(folder: Path, lines: list[dict[str, Any]], history: list[dict[str, Any]] = ()) -> Path:  # type: ignore[assignment]
    folder.mkdir(parents=True)
    for name, some in (("metrics.jsonl", lines), ("history.jsonl", history)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in some))
    return folder


def steps(count: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"iteration": step, "consumed_tokens": 10 * step, "lm_loss": 1 / step, "elapsed_time_per_iteration_ms": 500.0}
        | more
        for step in range(1, count + 1)
    ]


def data_of(page: str) -> list[dict[str, Any]]:
    found = re.search(r"const runs = (\[.*\]);\n", page)
    assert found is not None
    return json.loads(found[1])  # type: ignore[no-any-return]


def test_the_folder_of_a_run_tells_how_it_started_and_ended(tmp_path: Path) -> None:
    """Stopped after step 2, continued and failed in step 3, continued and finished."""
    overrides = ("tokens.train_steps=4", "checkpoints.checkpoint_interval=1")
    stops = "general.hooks=[{path: support.user_parts.StopAt, kwargs: {step: 2}}]"
    fails = "general.hooks=[{path: support.user_parts.OnRank, kwargs: {what: raise, rank: 0, step: 3}}]"
    train_quietly(tiny_config(tmp_path, *overrides, stops))
    folder = tmp_path / "logs" / "tiny"
    assert summary_of(read_run(folder)).state == "stopped"
    with pytest.raises(RuntimeError, match=(reason := "this hook is broken on one rank")):
        train_quietly(tiny_config(tmp_path, *overrides, fails))
    failed = summary_of(read_run(folder))
    assert (failed.state, failed.reason, failed.step, failed.end) == ("failed", reason, 3, 4)
    train_quietly(tiny_config(tmp_path, *overrides))
    events = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    expected = ["start 0", "stopped 2", "start 2", "failed 3", "start 2", "finished 4"]
    assert [f"{each['event']} {each['iteration']}" for each in events] == expected
    assert events[1]["reason"] == "enough"
    assert events[2]["from"] == str(tmp_path / "checkpoints" / "2")
    weights = 64 * 16 + 2 * (2 * 16 * 16 + 2 * 8 * 16 + 3 * 16 * 24 + 2 * 16) + 16
    assert events[0]["parameters"] in (weights, weights + 64 * 16)  # with a head of its own
    assert events[0]["processes"] == 1
    train_quietly(tiny_config(tmp_path, *overrides), fresh=True)
    events = [json.loads(line)["event"] for line in (folder / "history.jsonl").read_text().splitlines()]
    assert events == ["start", "finished"]  # those of the run before were set aside with its metrics


def test_a_run_needs_no_installed_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources on PYTHONPATH are enough, as on a machine where nothing may be installed."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    train_quietly(tiny_config(tmp_path))
    (start, *_) = [json.loads(line) for line in (tmp_path / "logs" / "tiny" / "history.jsonl").read_text().splitlines()]
    assert start["kenotron"] == kn.__version__


def test_a_run_that_is_silent_for_long_was_killed(tmp_path: Path) -> None:
    started = [{"iteration": 0, "event": "start", "last_step": 9}]
    folder = written(tmp_path / "a", steps(3), started)
    assert summary_of(read_run(folder)).state == "running"
    long_ago = time.time() - 121
    os.utime(folder / "metrics.jsonl", (long_ago, long_ago))
    assert summary_of(read_run(folder)).state == "killed"
    slow = written(tmp_path / "slow", steps(3, elapsed_time_per_iteration_ms=60_000.0), started)
    os.utime(slow / "metrics.jsonl", (long_ago, long_ago))
    assert summary_of(read_run(slow)).state == "running"  # two steps of a minute each


def test_runs_are_listed_with_their_numbers(tmp_path: Path, shell: Shell) -> None:
    lines = steps(40, tokens_per_sec=20.0)
    lines[19]["val_loss"], lines[39]["val_loss"] = 3.0, 2.0
    lines[38]["lm_loss"] = None  # not finite
    written(tmp_path / "logs" / "a", lines, [{"iteration": 40, "event": "finished"}])
    written(tmp_path / "logs" / "groups" / "b", steps(2), [{"iteration": 2, "event": "failed", "reason": "no disk"}])
    code, out, _ = shell("runs", tmp_path / "logs", "--json")
    found = {each["name"]: each for each in json.loads(out)}
    assert code == 0
    assert (found["a"]["state"], found["a"]["step"], found["a"]["tokens"]) == ("finished", 40, 400)
    assert found["a"]["loss"] == pytest.approx((1 / 38 + 1 / 40) / 2)  # the last twentieth of 39 losses: two
    assert (found["a"]["val_loss"], found["a"]["seconds"]) == (2.0, 20.0)
    assert found["groups/b"]["reason"] == "no disk"
    code, out, _ = shell("runs", tmp_path / "logs")
    assert re.search(r"^groups/b +failed +2 +20 +0.5 .*no disk$", out, re.MULTILINE)
    assert [each["name"] for each in json.loads(shell("runs", tmp_path / "logs" / "a", "--json")[1])] == ["a"]
    assert "with metrics.jsonl; it has the runs a, groups/b" in shell("plot", tmp_path / "logs")[2]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path, shell: Shell) -> None:
    runs = [written(tmp_path / "logs" / name, steps(2)) for name in ("wide/a", "deep/a", "b")]
    _, out, _ = shell("runs", tmp_path / "logs")
    assert sorted(line.split()[0] for line in out.splitlines()[1:]) == ["b", "deep/a", "wide/a"]
    _, out, _ = shell("plot", *runs)
    assert "o deep/a: 0.5" in out
    shell("report", *runs, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert [run["name"] for run in data_of(page)] == ["wide/a", "deep/a", "b"]
    assert "<title>wide/a, deep/a, b</title>" in page


def test_the_run_of_the_working_folder_has_its_name(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(written(tmp_path / "mine", steps(2)))
    _, out, _ = shell("plot", ".")
    assert out.splitlines()[-1] == "* mine: 0.5"


def test_the_page_has_every_step_of_a_short_run_and_what_differs_between_runs(tmp_path: Path, shell: Shell) -> None:
    rate = "optimizer.learning_rate_scheduler.learning_rate="
    for name in ("0.01", "0.02"):
        train_quietly(tiny_config(tmp_path / name, rate + name))
    folders = [tmp_path / name / "logs" / "tiny" for name in ("0.01", "0.02")]
    code, out, _ = shell("report", *folders, "-o", tmp_path / "x.html")
    assert (code, out) == (0, f"Page: {tmp_path / 'x.html'}\n")
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|src=|@import|url\(", page)  # fetches nothing
    first, second = data_of(page)
    logged = [json.loads(line) for line in (folders[0] / "metrics.jsonl").read_text().splitlines()]
    assert first["x"]["steps"] == [1, 2, 3]
    assert first["x"]["tokens"] == [line["consumed_tokens"] for line in logged]
    for name in ("lm_loss", "grad_norm", "lr"):
        assert first["metrics"][name]["y"] == pytest.approx([line[name] for line in logged], rel=1e-5)
    assert first["changes"] is None
    assert ["optimizer.learning_rate_scheduler.learning_rate", "0.01", "0.02"] in second["changes"]["keys"]
    assert "learning_rate: 0.02" in second["config"]
    facts = dict(first["facts"])
    assert facts["Layout"] == "one process; ZeRO 0"
    assert "kenotron" in facts["Versions"]


def test_a_run_that_began_from_another_shows_what_changed(tmp_path: Path) -> None:
    train_quietly(tiny_config(tmp_path / "a", "tokens.train_steps=2", "checkpoints.save_final_state=true"))
    parent = tmp_path / "a" / "checkpoints" / "2"
    resume = (f"checkpoints.resume_checkpoint_path={parent}", "checkpoints.load_mode=model_only")
    config = tiny_config(tmp_path / "b", "tokens.train_steps=3", *resume)
    train_quietly(config)
    (run,) = data_of(report_page([read_run(tmp_path / "b" / "logs" / "tiny")]))
    assert run["changes"]["against"] == f"{parent}, its parent"
    assert ["tokens.train_steps", "2", "3"] in run["changes"]["keys"]


def test_a_long_run_is_drawn_by_the_means_of_its_steps_and_their_extremes(tmp_path: Path) -> None:
    count = 2 * POINTS + 1  # buckets of three
    lines = steps(count)
    for line in lines:
        line["lm_loss"] = float(line["iteration"] % 3)  # 1 2 0, 1 2 0, …
    lines[4]["lm_loss"] = None
    lines[600]["val_loss"] = 5.0
    (run,) = data_of(report_page([read_run(written(tmp_path / "a", lines))]))
    curve, x = run["metrics"]["lm_loss"], run["x"]
    assert x["steps"][:3] == [2, 5, 8]
    assert x["hours"][1] == pytest.approx(5 * 0.5 / 3600, abs=1e-6)
    assert curve["y"][:3] == [1.0, 0.5, 1.0]  # the lost one is no zero
    assert (curve["low"][0], curve["high"][0]) == (0.0, 2.0)
    assert len(curve["y"]) == len(x["steps"]) == -(-count // 3)
    val = run["metrics"]["val_loss"]["y"]
    assert [value for value in val if value is not None] == [5.0]
    assert val[200] == 5.0
    assert median(x["tokens"]) == 10 * median(x["steps"])


def test_text_of_a_run_cannot_end_the_script_of_the_page(tmp_path: Path) -> None:
    folder = written(tmp_path / "</script><b>", steps(2))
    sample = {"iteration": 2, "prompt": "</script><img src=x>", "completion": "<!--"}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    page = report_page([read_run(folder)])
    assert page.count("</script>") == 1
    assert "<!--" not in page
    assert "<img" not in page
    assert data_of(page)[0]["samples"] == [sample]


def test_completions_are_kept_beside_the_metrics(tmp_path: Path) -> None:
    overrides = (*text_overrides(tmp_path), "logging.sample_prompts=[the]", "checkpoints.checkpoint_interval=2")
    train_quietly(tiny_config(tmp_path, *overrides, "tokens.train_steps=2"))
    train_quietly(tiny_config(tmp_path, *overrides, "tokens.train_steps=3"))
    file = tmp_path / "logs" / "tiny" / "samples.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 2, 3]  # those of step 2 once
    assert all(line["prompt"] == "the" and line["completion"] for line in lines)


@pytest.mark.slow
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    lines = steps(30, lr=0.1)
    lines[9]["val_loss"] = 0.5
    for line in lines:
        line |= {"grad_norm/layers.0": 1.0 / line["iteration"], "grad_norm/layers.1": 2.0}
    runs = [written(tmp_path / name, lines, [{"iteration": 30, "event": "finished"}]) for name in ("one", "two")]
    dom = drawn(report_page([read_run(run) for run in runs]), tmp_path)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", dom)
    assert captions == ["lm_loss", "lr", "grad_norm, one", "grad_norm, two", "elapsed_time_per_iteration_ms"]
    assert 'aria-label="lm_loss: one ends at 0.03333, one, validation ends at 0.5, two ends at' in dom
    assert dom.count("<circle") == 2  # a validation of each
    assert dom.count('class="state finished"') == 2
