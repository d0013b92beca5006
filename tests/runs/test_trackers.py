"""`logging.wandb` and `logging.trackio`: with stand-ins that keep what they are given, and the packages offline."""

from __future__ import annotations

import importlib
import json
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kenotron as kn
from kenotron.config import InputError, load
from kenotron.config.logging import Wandb
from kenotron.observers.trackers import TrackioHook, WandbHook
from kenotron.training.metrics import EvaluationResult
from support.tiny_run import losses, metrics, tiny_config, tiny_dict, train_and_listen, train_quietly

STAND_IN = """
import types

calls = []
failing = {}


class UsageError(Exception): ...
class CommError(Exception): ...
class AuthenticationError(CommError): ...
errors = types.SimpleNamespace(UsageError=UsageError, CommError=CommError, AuthenticationError=AuthenticationError)


def Settings(**given):
    return given


class Run:
    step = 0

    def define_metric(self, name, step_metric):
        calls.append((name, step_metric))

    def log(self, line, step):
        if step == failing.get("step"):
            raise OSError("the network is down")
        calls.append((step, line))

    def finish(self):
        calls.append("finished")


def init(**given):
    if error := failing.get(given.get("mode")):
        raise error
    calls.append(given)
    return Run()
"""


@pytest.fixture(params=["wandb", "trackio"])
def tracker(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for the package."""
    (tmp_path / f"{request.param}.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, request.param, raising=False)
    yield importlib.import_module(request.param)
    sys.modules.pop(request.param, None)


def test_every_line_is_sent_under_the_names_of_the_config(tracker: Any, tmp_path: Path) -> None:
    name = tracker.__name__
    more = {"wandb": "entity: team, tags: [small], mode: offline", "trackio": "space_id: team/space"}[name]
    config = tiny_config(tmp_path, f"logging.{name}={{project: p, name: n, {more}}}")
    train_quietly(config)
    start, *lines, end = [call for call in tracker.calls if call != ("eval/*", "eval_step")]
    assert (start["project"], start["name"]) == ("p", "n")
    assert start["config"]["tokens"]["train_steps"] == 3
    if name == "wandb":
        assert (start["entity"], start["tags"], start["mode"]) == ("team", ["small"], "offline")
    else:
        assert start["space_id"] == "team/space"
    assert [(step, json.loads(json.dumps(line))) for step, line in lines] == [
        (line["iteration"], line) for line in metrics(config)
    ]
    assert end == "finished"


def test_a_run_that_continues_continues_there_and_a_new_one_is_another(tracker: Any, tmp_path: Path) -> None:
    name = tracker.__name__
    kept = (f"logging.{name}={{}}", "checkpoints.checkpoint_interval=1")
    for steps, options in ((2, {}), (3, {}), (3, {"fresh": True})):
        train_quietly(tiny_config(tmp_path, f"tokens.train_steps={steps}", *kept), **options)
    starts = [call for call in tracker.calls if isinstance(call, dict)]
    assert {(each["project"], each["name"]) for each in starts} == {("tests", "tiny")}
    if name == "wandb":
        ids = [each["id"] for each in starts]
        assert ids[0] == ids[1]
        assert ids[0].startswith("tiny-20")
        assert {each["resume"] for each in starts} == {"allow"}
    else:
        assert [each["resume"] for each in starts] == ["never", "allow", "never"]
    assert [call[0] for call in tracker.calls if isinstance(call, tuple) and call[0] != "eval/*"] == [1, 2, 3, 1, 2, 3]


def test_a_tracker_that_fails_does_not_end_the_run(tracker: Any, tmp_path: Path) -> None:
    tracker.failing["step"] = 2
    run, said = train_and_listen(tiny_config(tmp_path, f"logging.{tracker.__name__}={{}}"))
    assert run is not None
    assert run.step == 3
    assert said.count("the network is down; the run goes on without it") == 1
    assert [call[0] for call in tracker.calls if isinstance(call, tuple) and call[0] != "eval/*"] == [1]


def test_the_metrics_of_the_step_that_fails_are_sent(tracker: Any, tmp_path: Path) -> None:
    hook = "general.hooks=[{path: support.user_parts.OnRank, kwargs: {what: raise, rank: 0, step: 2}}]"
    with pytest.raises(RuntimeError, match="this hook is broken"):
        train_quietly(tiny_config(tmp_path, f"logging.{tracker.__name__}={{}}", hook))
    assert [call[0] for call in tracker.calls if isinstance(call, tuple) and call[0] != "eval/*"] == [1, 2]
    assert tracker.calls[-1] == "finished"


def test_results_of_an_earlier_checkpoint_stand_at_its_step(tracker: Any) -> None:
    hook = WandbHook(Wandb()) if tracker.__name__ == "wandb" else TrackioHook(kn.config.logging.Trackio())  # type: ignore[attr-defined]
    hook.run, hook.sent_step = tracker.Run(), 7
    hook.after_evaluation(None, EvaluationResult(5, {"eval/x/acc": 0.5}))  # type: ignore[arg-type]
    if tracker.__name__ == "wandb":  # whose own steps only rise
        assert tracker.calls == [(7, {"eval_step": 5, "eval/x/acc": 0.5})]
    else:
        assert tracker.calls == [(5, {"eval/x/acc": 0.5})]


@pytest.mark.parametrize("tracker", ["wandb"], indirect=True)
def test_wandb_without_a_network_logs_offline_and_without_an_account_is_refused(tracker: Any, tmp_path: Path) -> None:
    tracker.failing["online"] = tracker.CommError("timed out")
    _, said = train_and_listen(tiny_config(tmp_path, "logging.wandb={}"))
    assert "logging.wandb: timed out; it logs offline" in said
    assert [call["mode"] for call in tracker.calls if isinstance(call, dict)] == ["offline"]
    for error in (tracker.UsageError("no key"), tracker.AuthenticationError("no key")):
        tracker.failing["online"] = error
        with pytest.raises(InputError, match=r"no key.*offline needs no account"):
            train_quietly(tiny_config(tmp_path / type(error).__name__, "logging.wandb={}"))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_package_that_is_missing_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=rf"logging\.{name}: .*pip install 'kenotron\[trackers\]'"):
        train_quietly(tiny_config(tmp_path, f"logging.{name}={{}}"))


def test_wandb_at_the_top_of_a_config_is_that_of_logging(tmp_path: Path) -> None:
    said: list[str] = []
    config = load(tiny_dict(tmp_path) | {"wandb": {"project": "p"}}, report=said.append)
    assert config.logging.wandb is not None
    assert config.logging.wandb.project == "p"
    assert said == ["wandb is now logging.wandb"]
    without = {name: each for name, each in tiny_dict(tmp_path).items() if name != "logging"}
    assert load(without | {"wandb": {"project": "p"}}, report=said.append).logging.wandb is not None
    assert load(tiny_dict(tmp_path) | {"wandb": None}).logging.wandb is None
    twice = tiny_dict(tmp_path) | {"wandb": {"project": "p"}}
    twice["logging"]["wandb"] = {}
    with pytest.raises(InputError, match=r"wandb is also set in logging\.wandb"):
        load(twice)


def logged_records(file: bytes) -> Iterator[bytes]:
    """The records of a file of wandb: LevelDB's log format, after a header of 7 bytes."""
    at, record = 7, b""
    while at < len(file):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", file[at + 4 : at + 7])
        record += file[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # complete, or the last part
            yield record
            record = b""


@pytest.mark.slow
def test_wandb_itself_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two starts of one run: what the files of wandb have is what metrics.jsonl has."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_SILENT", "true")
    kept = ("logging.wandb={mode: offline}", "checkpoints.checkpoint_interval=1")
    for steps in (2, 3):
        config = tiny_config(tmp_path, f"tokens.train_steps={steps}", *kept)
        train_quietly(config)
    found: dict[int, float] = {}
    ids = set()
    for file in (tmp_path / "logs" / "tiny" / "wandb").glob("offline-run-*/*.wandb"):
        ids.add(file.stem.removeprefix("run-"))
        for data in logged_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            if "lm_loss" in items:
                found[json.loads(items["_step"])] = json.loads(items["lm_loss"])
    assert len(ids) == 1
    assert [found[step] for step in sorted(found)] == losses(config)


@pytest.mark.slow
def test_trackio_itself_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two starts of one run: what its database has is what metrics.jsonl has."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when the package is imported
    pytest.importorskip("trackio")
    kept = ("logging.trackio={}", "checkpoints.checkpoint_interval=1")
    for steps in (2, 3):
        config = tiny_config(tmp_path, f"tokens.train_steps={steps}", *kept)
        train_quietly(config)
    (database,) = (tmp_path / "trackio").rglob("*.db")
    rows = sqlite3.connect(database).execute("select step, metrics from metrics where run_name = 'tiny' order by step")
    lines = {step: json.loads(text) for step, text in rows}
    found = {step: line["lm_loss"] for step, line in lines.items() if "lm_loss" in line}
    assert [found[step] for step in sorted(found)] == losses(config)
