"""`kenotron plan` as people and programs read it."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch

from kenotron.cli import main
from kenotron.launch import memory
from kenotron.planner import hardware, measuring, serving
from kenotron.planner.explaining import TEXTS, explained
from kenotron.planner.hardware import GPUS, Gpu
from kenotron.planner.planning import RunPlan
from kenotron.planner.serving import PageServer
from kenotron.planner.timeline import KINDS
from kenotron.planner.trace import LABELS
from kenotron.planner.verdict import COLUMNS
from support.browser import drawn, drawn_at
from support.tiny_run import REPOSITORY, tiny_yaml


def plan(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *map(str, arguments)])
    return int(ended.value.code or 0)


def test_a_run_that_fits_is_a_table_with_what_is_largest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tiny_yaml(tmp_path), "--gpu", "H100") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 rank on H100 80 GB. GiB at the peak of a step:"
    assert lines[1].split()[:5] == ["rank", "stage", "sum", "weights", "gradients"]
    sizes = [float(each) for each in lines[2].split()[2:]]
    assert sizes[0] == pytest.approx(sum(sizes[1:]), rel=0.01)
    fits = r"It fits: the largest rank needs \S+ GiB of 79.1, of which 67 can be planned for."
    verdict = next(number for number, line in enumerate(lines) if re.fullmatch(fits, line))
    assert re.fullmatch(r"A checkpoint has \S+ GiB: weights and the optimizer's state\.", lines[verdict + 1])
    assert lines[verdict + 2] == "Milliseconds of a step:"
    assert lines[verdict + 3].split()[:4] == ["rank", "stage", "step", "products"]
    step, *spent = (float(each.replace(",", "")) for each in lines[verdict + 4].split()[2:])
    assert step == pytest.approx(sum(spent), rel=0.02)
    speed = r"[\d,]+ tokens/s, [\d,]+ a GPU, MFU \d\.\d%; 3 steps, 192 tokens: \S+ seconds, \S+ GPU-hours, \S+ kWh"
    assert re.fullmatch(speed, lines[-1])


def test_a_gpu_is_measured_and_planned_for(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has a GPU as fast as its CPU."""
    file, measured = tiny_yaml(tmp_path), tmp_path / "mine.yaml"
    assert plan(file, "--measure", measured) == 2
    assert "--measure: expected a machine with a GPU, a .yaml file" in capsys.readouterr().err
    rates = partial(measuring.measure, device=torch.device("cpu"), scale=64)
    monkeypatch.setattr(measuring, "SECONDS", 0.05)
    monkeypatch.setattr(measuring, "measure", lambda known, device, report, ranks: rates(known, report=report))
    monkeypatch.setattr(hardware, "gpu_here", lambda: Gpu("Mine", "", 8.0, "nvidia", (8, 6)))
    assert plan(file, "--measure", measured) == 0
    first = capsys.readouterr().out
    assert first.splitlines()[0] == "1 rank on Mine. GiB at the peak of a step:"
    assert re.search(r"MFU \d+\.\d%; 3 steps, 192 tokens: \S+ \w+, \S+ GPU-hours$", first.splitlines()[-1])
    assert plan(file, "--gpu", measured) == 0
    assert capsys.readouterr().out == first


def test_a_plan_is_explained_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert TEXTS["memory"].keys() == set(COLUMNS)
    axes = {*LABELS.values(), "dp", "host"}
    assert TEXTS["time"].keys() == {*KINDS.values(), *(f"waits for {axis}" for axis in axes)}
    assert plan(tiny_yaml(tmp_path), "--gpu", "h100", "--explain") == 0
    _, of_memory, of_time = re.split(r"Rank 0 holds \S+ GiB.*\n|A step takes \S+ ms.*\n", capsys.readouterr().out)
    for told in (of_memory.splitlines(), of_time.splitlines()):
        assert 95 <= sum(int(re.match(r" +(\d+)% ", line)[1]) for line in told) <= 102  # type: ignore[index]
        assert all(". Less with " in line for line in told)
    assert "optimizer: moments and other state. Less with a higher optimizer.zero_stage" in of_memory


def test_the_time_of_the_stage_that_waits_least_is_explained() -> None:
    peaks = [SimpleNamespace(rank=4 * stage, peak=SimpleNamespace(bytes=1, of={"weights": 1})) for stage in range(3)]
    waits = ({"products": 1.0, "waits for pp": 2.0}, {"products": 2.9, "waits for pp": 0.1}, {"waits for pp": 3.0})
    speed = SimpleNamespace(seconds=3.0, ranks=[SimpleNamespace(of=each) for each in waits])
    lines = list(explained(cast(RunPlan, SimpleNamespace(ranks=peaks, speed=speed))))
    assert lines[2] == "A step takes 3,000.0 ms, of rank 4:"
    assert "97%" in lines[3]


@pytest.mark.budget(20, reason="plans a layout twice")
def test_a_slow_network_between_machines_is_in_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waits = []
    for options in ((), ("--gpus-per-machine", 2, "--network", 0.01)):
        file = tiny_yaml(tmp_path)
        assert plan(file, "--gpu", "h100", "parallelism.dp=4", "optimizer.zero_stage=0", "--json", *options) == 0
        step = json.loads(capsys.readouterr().out)["step"]
        waits.append(step["ranks"][0]["of"]["waits for dp"])
    assert waits[1] > 10 * waits[0]


def test_days_and_cost_are_those_of_the_tokens_of_all_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The batch grows from 1 to 4 sequences within 10 samples: steps of 1 (4 times), 2 (twice), 3, 4, …"""
    ramp = "batch_size_ramp: {start: 1, increment: 1, samples: 10}"
    batch = "tokens.train_steps=10", "tokens.micro_batch_size=1", "tokens.batch_accumulation_per_replica=4"
    stages = f"data_stages=[{{name: all, start_training_step: 1, data: {{dataset: null, seed: 1}}, {ramp}}}]"
    assert plan(tiny_yaml(tmp_path), "--gpu", "h100", "--price", 2.5, "--json", *batch, stages) == 0
    step = json.loads(capsys.readouterr().out)["step"]
    assert step["tokens"] == 16 * sum((1, 1, 1, 1, 2, 2, 3, 4, 4, 4))
    assert step["gpu_hours"] == pytest.approx(step["tokens"] / step["tokens_per_second"] / 3600)
    assert step["cost"] == pytest.approx(2.5 * step["gpu_hours"])


@pytest.mark.budget(25, reason="plans several layouts")
def test_the_nearest_change_that_fits_is_named_for_people_and_programs(tmp_path: Path, capsys: Any) -> None:
    """With less than the peak to plan for, the changes are tried in their order, and the last one fits."""
    arguments = tiny_yaml(tmp_path), "tokens.sequence_length=32"
    assert plan(*arguments, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["fits"], found["nearest"]) == (True, None)
    (rank,) = found["ranks"]
    assert found["peak"] == rank["peak"]["bytes"] == sum(rank["peak"]["of"].values())
    with patch.object(memory, "free_memory", lambda *_: 3.9 * found["peak"]):  # of so little, a quarter is planned for
        assert plan(*arguments, "--json") == 1
    said = capsys.readouterr()
    assert re.fullmatch(r"(trying .*\n)+", said.err)
    tried = [line.removeprefix("trying ").split() for line in said.err.splitlines()]
    nearest = json.loads(said.out)["nearest"]
    assert nearest == tried[-1]
    assert plan(*arguments, *nearest, "--json") == 0
    assert json.loads(capsys.readouterr().out)["peak"] < 0.975 * found["peak"]


PIPELINE = ("parallelism.dp=1", "parallelism.pp=2", "parallelism.pp_engine=1f1b")


@pytest.mark.budget(20, reason="plans two stages")
def test_a_page_has_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    batch = ("tokens.micro_batch_size=1", "tokens.batch_accumulation_per_replica=4")
    assert plan(tiny_yaml(tmp_path), "--gpu", "h100", *PIPELINE, *batch, "--html", page, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    (found,) = re.findall(r"const data = (.*);\n", page.read_text())
    data = json.loads(found)
    for rank, plan_of_rank, spent in zip(data["ranks"], said["ranks"], said["step"]["ranks"], strict=True):
        assert sum(rank["peak"].values()) == plan_of_rank["peak"]["bytes"]
        sums = [sum(values) for values in zip(*rank["over_time"].values(), strict=True)]
        assert 0.9 * plan_of_rank["peak"]["bytes"] < max(sums) <= plan_of_rank["peak"]["bytes"]
        assert rank["of"] == spent["of"]
        assert {which for *_, which, _ in rank["bars"]} == {"forward", "backward", "update"}
        assert {number for *_, number in rank["bars"]} >= {1, 2, 3, 4, 5}  # the last one is the update
        ends = [0.0, *(end for bar in rank["bars"] for end in bar[:2])]
        assert ends == sorted(ends)


@pytest.mark.slow
def test_a_browser_draws_the_page_and_names_what_is_clicked(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert plan(tiny_yaml(tmp_path), "--gpu", "h100", *PIPELINE, "--html", page) == 0
    click = "document.querySelectorAll('button')[0].click();"
    dom = drawn(page.read_text(), tmp_path, click)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", dom)
    assert captions[0].startswith("Rank 0, stage 0: memory in a step")
    assert captions[-1] == "Rank 1, stage 1: time of a step"
    assert re.search(r'aria-label="Memory of rank 0: at its peak weights \S+ GiB, gradients', dom)
    assert dom.count('aria-pressed="true"') == 1
    assert "asked for by" in dom
    assert "<code>models:" in dom or "<code>models." in dom
    assert set(re.findall(r'<rect [^>]*y="(\d+)"[^>]* height="20"', dom)) == {"4", "30"}  # a row for each stage


def served(monkeypatch: pytest.MonkeyPatch, look: Callable[[PageServer], None], *arguments: object) -> int:
    """The exit code of `plan --serve`, which serves while `look` does and then ends as at Ctrl-C."""

    def serve(server: PageServer) -> None:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            look(server)
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    monkeypatch.setattr(serving, "serve", serve)
    return plan(*arguments, "--serve", "--port", 0)


@pytest.mark.budget(20, reason="plans three layouts")
def test_a_served_page_gets_the_plans_of_what_is_typed(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    file = Path(tiny_yaml(tmp_path))
    text = file.read_text()

    def ask(server: PageServer, text: str, *overrides: str, gpu: str = "h100", path: str = "", **headers: str) -> Any:
        """A plan's data; of layouts a list: one for each that was done, and all of them."""
        body = json.dumps({"yaml": text, "gpu": gpu, "overrides": overrides}).encode()
        headers = {"Content-Type": "application/json"} | headers
        request = Request(f"http://127.0.0.1:{server.server_port}/{path}", body, headers)
        with urlopen(request) as answer:
            found = [json.loads(line) for line in answer]
        return found if path else found[0]

    def look(server: PageServer) -> None:
        page = urlopen(f"http://127.0.0.1:{server.server_port}/").read().decode()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)  # nothing comes from elsewhere
        drawn = ask(server, text, "parallelism.tp=2")
        assert plan(file, "--gpu", "h100", "parallelism.tp=2", "--json") == 0
        typed = json.loads(capsys.readouterr().out)
        assert sum(drawn["ranks"][0]["peak"].values()) == typed["peak"]
        assert drawn["seconds"] == typed["step"]["seconds"]
        assert drawn["keys"]["parallelism.tp"] == 2
        begun = time.monotonic()
        assert ask(server, text, "parallelism.tp=2") == drawn
        assert time.monotonic() - begun < 0.3
        assert ask(server, text.replace("hidden_size: 16", "hidden_size: 32"))["ranks"] != drawn["ranks"]
        *_, layouts = ask(server, text, path="layouts")
        assert layouts["header"][:3] == ["dp", "tp", "pp"]
        assert [row[:3] for row in layouts["rows"]] == [["1", "1", "1"]]
        assert "parallelism.tp=1" in layouts["overrides"][0]
        for case, expected in (
            (ask(server, text, "parallelism.pp=9"), "parallelism.pp: expected at most"),
            (ask(server, text, gpu="", path="layouts")[-1], "it needs a kind of GPU whose speed is known"),
            (ask(server, text, gpu="h1000"), "did you mean 'h100'?"),
            (ask(server, "a: ["), "tiny.yaml:1: not valid YAML"),
        ):
            assert expected in case["error"]
            assert not re.search(rf"\n|{re.escape(tempfile.gettempdir())}", case["error"])
        assert ask(server, text, "parallelism.tp=2", Host="localhost:1234") == drawn  # through a tunnel
        for headers in ({"Host": "example.com"}, {"Content-Type": "text/plain"}):  # of another site's page
            with pytest.raises(HTTPError, match="403"):
                ask(server, text, **headers)
        with pytest.raises(HTTPError, match="404"):
            urlopen(Request(f"http://127.0.0.1:{server.server_port}/", headers={"Host": "example.com"}))
        assert plan(file, "--serve", "--port", server.server_port) == 2
        assert "Address already in use; expected one that is free" in capsys.readouterr().err

    assert served(monkeypatch, look, file, "--gpu", "h100") == 0
    assert plan(file, "--serve", "--json") == 2
    assert "--serve: expected without --rank, --html and --json" in capsys.readouterr().err


def test_a_page_that_is_gone_is_skipped_and_every_other_one_is_answered(capfd: pytest.CaptureFixture[str]) -> None:
    """The first leaves while its plan is made, the second while it waits, the third sees why its plan failed."""
    begun, may_end, planned = Event(), Event(), []

    def plan(text: str, *_: object) -> Any:
        planned.append(text)
        begun.set()
        assert may_end.wait(20)
        raise ZeroDivisionError("odd\nnumbers")

    with PageServer(0, "my", "", None, plan, lambda *_: None) as server:  # type: ignore[arg-type]
        Thread(target=server.serve_forever, daemon=True).start()

        def posted(body: str) -> socket.socket:
            page = socket.create_connection(("127.0.0.1", server.server_port), timeout=20)
            page.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
            headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            page.sendall(f"POST / HTTP/1.1\r\n{headers}\r\n\r\n{body}".encode())
            return page

        runs = [json.dumps({"yaml": text, "gpu": "", "overrides": []}) for text in ("first", "second", "third")]
        first = posted(runs[0])
        assert begun.wait(20)
        second, third, odd = (posted(body) for body in (*runs[1:], "{"))
        first.close()
        second.close()
        time.sleep(0.2)
        may_end.set()
        answers = [page.makefile().read().splitlines()[-1] for page in (third, odd)]
        server.shutdown()
    assert json.loads(answers[0]) == {"error": "ZeroDivisionError: odd"}
    assert "JSONDecodeError: " in json.loads(answers[1])["error"]
    assert planned == ["first", "third"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("gpu", "chosen"), [("H100", "h100"), ("my-gpu.yaml", "my-gpu.yaml"), (None, None)])
def test_a_served_page_begins_with_the_gpu_of_the_command(gpu: str | None, chosen: str | None) -> None:
    with PageServer(0, "my", "", gpu, lambda *_: None, lambda *_: None) as server:  # type: ignore[arg-type,return-value]
        assert server.first["gpu"] == chosen
        assert chosen in (*server.first["gpus"], None)


@pytest.mark.slow
def test_a_browser_changes_the_layout_on_a_served_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the first plan is there, tp is typed and the keyboard's focus stays; then a layout that cannot be."""
    script = """<script>
      const status = () => document.querySelector("[role=status]").textContent, seen = [];
      const type = (name, value) => {
        const label = [...document.querySelectorAll("label")].find(each => each.firstChild.textContent === name);
        const input = label.querySelector("input");
        input.focus(); input.value = value; input.dispatchEvent(new Event("input", { bubbles: true }));
      };
      const watch = setInterval(() => {
        if (!/planned in|expected/.test(status())) return;
        seen.push(document.title);
        if (seen.length === 1) type("tp", "2");
        else if (seen.length === 2) {
          document.body.append(document.activeElement.parentElement.firstChild.textContent);
          type("pp", "9");
        }
        else { clearInterval(watch); document.body.append(seen.join(" | ")); }
      }, 2000);
    </script>"""
    page_of = serving.page_of
    monkeypatch.setattr(serving, "page_of", lambda data: page_of(data).replace("</body>", f"{script}</body>"))
    found: list[str] = []

    def look(server: PageServer) -> None:
        found.append(drawn_at(f"http://127.0.0.1:{server.server_port}/", tmp_path, seconds=60))

    assert served(monkeypatch, look, tiny_yaml(tmp_path), "--gpu", "h100") == 0
    (dom,) = found
    titles = [f"tiny: {ranks} on H100 80 GB" for ranks in ("1 rank", "2 ranks", "2 ranks")]
    assert "tp" + " | ".join(titles) in dom
    assert "parallelism.pp: expected at most num_hidden_layers 2 stages, found 9" in dom


@pytest.mark.budget(40, reason="plans every layout of two GPUs")
def test_layouts_are_ranked_by_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = tiny_yaml(tmp_path), "--gpu", "h100", "parallelism.dp=2", "--json"
    assert plan(*arguments, "--search") == 0
    layouts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    shapes = [dict(override.split("=") for override in each["overrides"]) for each in layouts]
    names = [f"parallelism.{name}" for name in ("dp", "tp", "pp", "context_parallel_size")]
    every = ["2 1 1 1 zero 1", "2 1 1 1 zero 3", "1 2 1 1 zero 0", "1 1 2 1 zero 0"]
    every += ["2 1 1 1 zero 2", *(f"1 1 1 2 zero {stage}" for stage in (1, 2, 3))]  # changes of the fastest
    of_shapes = [" ".join(shape.get(name, "1") for name in names) for shape in shapes]
    stages = [shape["optimizer.zero_stage"] for shape in shapes]
    assert sorted(f"{degrees} zero {stage}" for degrees, stage in zip(of_shapes, stages)) == sorted(every)
    seconds = [each["speed"]["seconds"] for each in layouts]
    assert seconds == sorted(seconds)
    assert [bool(each["why"]) for each in layouts] == [False] + 7 * [True]
    assert plan(*arguments, *layouts[0]["overrides"]) == 0
    assert json.loads(capsys.readouterr().out)["step"]["seconds"] == seconds[0]


@pytest.mark.slow
def test_layouts_that_do_not_fit_are_ranked_by_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = GPUS["h100"]._replace(memory_gib=1e-5)
    with patch.dict(GPUS, h100=small):
        assert plan(tiny_yaml(tmp_path), "--gpu", "h100", "parallelism.dp=2", "--search") == 1
    _, head, *rows, first = capsys.readouterr().out.splitlines()
    assert "GiB" in head
    assert [row.endswith("does not fit") for row in rows] == [True] * 5
    assert first.startswith("The first: parallelism.dp=")


@contextmanager
def planning(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], Callable[[], list[int]]]]:
    """A command that follows ranks, and the processes of its session, of which the fourth and later follow ranks."""
    command = [sys.executable, "-m", "kenotron", "plan", *map(str, arguments)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell's background jobs inherit that Ctrl-C is ignored.
    options |= {"start_new_session": True, "preexec_fn": partial(signal.signal, signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(command, **options) as running:

        def processes() -> list[int]:
            found = []
            for path in Path("/proc").glob("[0-9]*/stat"):
                with suppress(OSError):  # it has just ended
                    state, _, _, session, *_ = path.read_text().rpartition(")")[2].split()
                    if state != "Z" and session == str(running.pid):
                        found.append(int(path.parent.name))
            return found

        try:
            yield running, processes
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition holds within so many seconds."""
    begun = time.monotonic()
    while not (holds := condition()) and time.monotonic() < begun + seconds:
        time.sleep(0.5)
    return holds


ON_TWO = REPOSITORY / "examples/models/llama-3.2-1b.yaml", "--gpu", "h100", "parallelism.dp=2"


reads_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.slow
@reads_proc
def test_ctrl_c_ends_a_search_at_once() -> None:
    """The terminal sends it to all processes."""
    with planning(*ON_TWO, "--search") as (searching, processes):
        assert until(lambda: len(processes()) >= 5, 90)
        time.sleep(3)
        os.killpg(searching.pid, signal.SIGINT)
        _, said = searching.communicate(timeout=30)
    assert searching.returncode == 130
    assert "Traceback" not in said
    assert said.rstrip().endswith("interrupted")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_plan_that_is_killed(number: int) -> None:
    with planning(*ON_TWO, "--rank", "0", "--rank", "1") as (killed, processes):
        assert until(lambda: len(processes()) >= 5, 90)
        time.sleep(3)
        killed.send_signal(number)
        assert until(lambda: not processes(), 10)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_is_killed_is_an_error() -> None:
    """As by the kernel for lack of memory: the fourth process, the newest, follows a rank."""
    with planning(*ON_TWO, "--rank", "0") as (running, processes):
        assert until(lambda: len(processes()) >= 4, 90)
        time.sleep(2)
        os.kill(max(processes()), signal.SIGKILL)
        _, said = running.communicate(timeout=30)
    assert running.returncode == 1
    assert said.endswith("error: rank 0 could not be planned: exit code -9; out of memory?\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_served_page_leaves_no_file_behind(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with planning(*ON_TWO, "--serve", "--port", "0") as (serving, _):
        assert serving.stdout is not None
        assert serving.stdout.readline().startswith("Open http://127.0.0.1:")
        assert len(list(tmp_path.iterdir())) == 1
        serving.send_signal(number)
        _, said = serving.communicate(timeout=30)
    assert (serving.returncode, said) == (0, "")
    assert not list(tmp_path.iterdir())


OFFLOAD = ("parallelism.dp=2", "optimizer.zero_stage=3", "parallelism.cpu_offload=true")


def test_no_time_is_told_of_updates_on_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tiny_yaml(tmp_path), "--gpu", "h100", *OFFLOAD) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("No time is known with parallelism.cpu_offload: ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--explain", "--json"), "error: --explain: expected without --search, --serve and --json: .*"),
        (("--search", "--rank", "0"), "error: --search: expected without --serve, --rank and --html, .*"),
        (("--search",), r"error: --search: it needs a kind of GPU whose speed is known; give --gpu rtx4090 \| .*"),
        (("--gpu", "h100", "--search", *OFFLOAD), r"error: --search: no time is known of updates on the host .*"),
        (("--serve", "--port", "70000"), "error: Invalid value for '--port': .* less than or equal to 65535\n.*"),
        (("--port", "80"), "error: --port: expected --serve beside it"),
        (("--html", "no/such/page.html"), "error: --html: cannot write no/such/page.html: .*"),
        (("--price", "2"), "error: --gpus-per-machine, --network, --price: expected --gpu beside them: .*"),
        (("--gpu", "h10"), r"error: --gpu: expected rtx4090, .*, found 'h10'; did you mean 'h100'\?"),
        (("model.loss={name: distillation, teacher: x}",), r"error: model.loss: the memory and time of a teacher .*"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, capsys: Any, arguments: tuple[str, ...], line: str) -> None:
    assert plan(tiny_yaml(tmp_path), *arguments) == 2
    assert re.fullmatch(line, capsys.readouterr().err.strip())
