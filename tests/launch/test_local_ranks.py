"""`kenotron train` with a layout of two: it starts the ranks itself, and means what torchrun and one process mean."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kenotron.config import InputError
from kenotron.launch import environment as share
from kenotron.launch import launch, local
from kenotron.launch.functions import function_path
from support.nursery import Finished, Nursery
from support.tiny_run import KENOTRON, environment, losses, tiny_config, tiny_dict, tiny_yaml, train_quietly, wait_until

# Two samples a rank where one process has four: the same global batch.
pytestmark = pytest.mark.budget(20, reason="ranks are real processes here, and each imports torch for 3 s")

TWO = ("parallelism.dp=2", "tokens.micro_batch_size=2")
LINE = re.compile(r"^\d\d/\d\d/\d{4} \d\d:\d\d:\d\d \[(INFO|WARNING)\|DP=(\d)\|PP=0\|TP=0\]: ")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    config = tiny_config(tmp_path_factory.mktemp("one"))
    train_quietly(config)
    return losses(config)


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> list[tuple[Path, Finished]]:
    """Three runs of two ranks each, at the same time on this machine: by `kenotron train`, again, and by torchrun.

    The second has interpreters of its own; the others are forks.
    """
    folders = [tmp_path_factory.mktemp("launch") for _ in range(3)]
    first, second, third = map(tiny_yaml, folders)
    given = ("run_train.py", "--config-file", third, *TWO, "general.run=named_%date")
    with Nursery() as other:
        command, env, pipe = [*KENOTRON, "train", str(second), *TWO], environment(folders[1]), subprocess.PIPE
        again = subprocess.Popen(command, cwd=folders[1], env=env, stdout=pipe, stderr=pipe, text=True)
        child = nursery.start("train", first, *TWO, folder=folders[0])
        torchrun = other.torchrun(*given, ranks=2, folder=folders[2])
        stdout, stderr = again.communicate(timeout=200)
        finished = [child.wait(), Finished(again.returncode, stdout, stderr), torchrun]
    return list(zip(folders, finished, strict=True))


@pytest.mark.slow
def test_launches_at_once_all_train_as_one_process_does(launches: Any, one_process: list[float]) -> None:
    for folder, finished in launches:
        assert (finished.code, finished.stderr) == (0, "")
        (file,) = folder.glob("logs/*/metrics.jsonl")
        written = [json.loads(line)["lm_loss"] for line in file.read_text().splitlines()]
        assert written == pytest.approx(one_process, rel=1e-5)
        assert (folder / "checkpoints" / "3" / "manifest.json").exists()


@pytest.mark.slow
def test_under_torchrun_rank_0_alone_speaks(launches: list[tuple[Path, Finished]]) -> None:
    other = launches[2][1]
    assert {LINE.match(line).group(2) for line in other.stdout.splitlines()} == {"0"}
    assert other.stdout.count("Saved checkpoint") == 1


@pytest.mark.slow
def test_rank_0_has_the_console_and_the_other_a_log_file(launches: list[tuple[Path, Finished]]) -> None:
    first, one = launches[1]
    console = one.stdout.splitlines()
    assert console[0] == "project: tests"
    assert sum(line.startswith("step ") for line in console) == 3
    log = (first / "logs" / "tiny" / "ranks" / "1.log").read_text().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d rank 1: ", line) for line in log)
    assert any("Total number of parameters" in line for line in log)


@pytest.mark.slow
def test_a_name_with_a_date_is_one_name_on_all_ranks(launches: list[tuple[Path, Finished]]) -> None:
    (folder,) = (launches[2][0] / "logs").iterdir()
    assert re.fullmatch(r"named_\d{8}_\d{6}", folder.name)
    files = sorted(path.name for path in folder.iterdir())
    assert files == [".lock", "config.yaml", "history.jsonl", "metrics.jsonl"]


def test_sigterm_to_the_launcher_saves_on_all_ranks_and_is_a_success(tmp_path: Path, nursery: Nursery) -> None:
    hook = "general.hooks=[support.user_parts.Leisurely]"
    child = nursery.start("train", tiny_yaml(tmp_path), *TWO, hook, "tokens.train_steps=1000", folder=tmp_path)
    metrics = tmp_path / "logs" / "tiny" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, seconds=120)
    os.kill(child.pid, signal.SIGTERM)
    finished = child.wait()
    assert (finished.code, finished.stderr) == (0, "")
    step = int((tmp_path / "checkpoints" / "latest.txt").read_text())
    assert 2 <= step < 1000
    assert (tmp_path / "checkpoints" / str(step) / "manifest.json").exists()
    assert f"Run stopped (SIGTERM) at step {step} of 1000" in finished.stdout


@pytest.mark.slow
def test_ranks_wait_for_one_that_opens_its_data_however_long_it_takes(tmp_path: Path, nursery: Nursery) -> None:
    content = tiny_dict(tmp_path)
    source = {"source": "support.user_parts.late", "kwargs": {"rank": 1, "seconds": 8}}
    content["data_stages"][0]["data"]["dataset"] = source
    (tmp_path / "late.yaml").write_text(yaml.safe_dump(content))
    finished = nursery.run("train", "late.yaml", *TWO, "parallelism.timeout_seconds=5", folder=tmp_path)
    assert (finished.code, finished.stderr) == (0, "")


# ---- without starting anything -----------------------------------------------------------------------------


def test_no_rank_starts_for_a_run_that_has_finished(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    train_quietly(tiny_config(tmp_path))
    started: list[object] = []
    monkeypatch.setattr(local, "start_ranks", lambda *arguments: started.append(arguments))
    launch(tiny_config(tmp_path, *TWO))
    assert not started
    assert "This run is finished: " in capsys.readouterr().out
    with pytest.raises(InputError, match=r"belongs to another run: optimizer\.weight_decay"):
        launch(tiny_config(tmp_path, *TWO, "optimizer.weight_decay=0.3"))
    for more in ("tokens.train_steps=4", "checkpoints.export_hf=true"):
        launch(tiny_config(tmp_path, *TWO, more))
        assert started
        started.clear()
    weights = next(tmp_path.glob("checkpoints/3/model/*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")  # then it is not finished
    with pytest.raises(InputError, match=r"no checkpoint in .* is intact"):
        launch(tiny_config(tmp_path, *TWO))


def test_a_function_that_another_process_cannot_import_is_refused() -> None:
    def local() -> None: ...

    with pytest.raises(ValueError, match="move it to the top of a module"):
        function_path(local)


def test_cores_are_shared_out_and_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(share, "cores", lambda: 16)
    assert [share.threads_per_rank(ranks) for ranks in (1, 2, 3, 16, 40)] == [16, 8, 5, 1, 1]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert local.rank_variables(4, tmp_path)["OMP_NUM_THREADS"] == "4"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in local.rank_variables(4, tmp_path)


def test_fewer_accelerators_than_ranks_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KENOTRON_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    share.check_devices(2)
    with pytest.raises(InputError, match="4 ranks on this machine need an accelerator each, but it has 2"):
        share.check_devices(4)
    third = share.Ranks(6, 8, 2, 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("SLURM_PROCID", "6")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    assert share.device_number(third) == 0  # srun shows each task its own
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(InputError, match="4 ranks on this machine need an accelerator each, but it has 1"):
        share.device_number(third)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert share.device_number(third) == 2
    monkeypatch.setenv("KENOTRON_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    share.check_devices(4)


def test_a_run_adds_variables_that_the_user_has_not_set() -> None:
    grows, recorder = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, {"TORCH_FR_BUFFER_SIZE": "2000"}
    assert share.default_variables({}, cuda="13.0") == grows | recorder
    assert share.default_variables({}, cuda=None) == recorder  # for ROCm and for the CPU
    assert share.default_variables({"TORCH_FR_BUFFER_SIZE": "0"}, cuda="13.0") == grows
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert share.default_variables({name: "backend:cudaMallocAsync"}, cuda="13.0") == recorder


@pytest.mark.skipif(sys.platform != "linux", reason="macOS refuses an unlimited number of open files")
def test_a_run_may_open_as_many_files_as_the_system_allows() -> None:
    """Tokens in a thousand files are a thousand open files; a shell often allows 1,024."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
    try:
        share.open_more_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_gloo_connects_many_ranks_only_where_they_communicate() -> None:
    """Otherwise each of N ranks reads the addresses of all from one store, 8 N bytes each, when a group is made."""
    lazy = {"TORCH_GLOO_LAZY_INIT": "1"}
    assert share.default_variables({"WORLD_SIZE": "1024"}, cuda=None).items() >= lazy.items()
    assert "TORCH_GLOO_LAZY_INIT" not in share.default_variables({"WORLD_SIZE": "8"}, cuda=None)
    assert "TORCH_GLOO_LAZY_INIT" not in share.default_variables({"WORLD_SIZE": "1024"} | lazy, cuda=None)


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch 2.11 does not show them")
def test_the_allocator_reads_its_variable_when_it_is_first_used_not_on_import(tmp_path: Path, nursery: Nursery) -> None:
    """What is added after torch is imported counts. torch's allocator settings are the same object in every build."""
    (tmp_path / "script.py").write_text(
        "import torch, os\n"
        "from kenotron.launch.environment import ALLOCATOR, default_variables\n"
        "assert not os.environ.keys() & {*ALLOCATOR}\n"
        "os.environ.update(default_variables({}, cuda='13.0'))\n"
        "print(torch._C._accelerator_getAllocatorSettings())"
    )
    done = nursery.torchrun(str(tmp_path / "script.py"), ranks=1, folder=tmp_path)
    assert (done.code, done.stdout) == (0, "expandable_segments:True\n"), done.stderr


def test_a_rank_ends_with_the_process_that_started_it() -> None:
    rank = "from kenotron.launch.environment import end_with_parent\nimport os, time\n"
    rank += "end_with_parent(); print(os.getpid(), flush=True); time.sleep(60)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    started = int(launcher.stdout.readline())
    launcher.kill()
    assert launcher.stdout.read() == ""  # its other end is closed: nobody holds it any more
    launcher.wait()
    assert not Path(f"/proc/{started}/exe").exists()


def test_an_earlier_launchs_log_is_kept_under_another_name(tmp_path: Path) -> None:
    path = local.fresh_log(tmp_path / "ranks", 1)
    path.write_text("earlier")
    assert local.fresh_log(tmp_path / "ranks", 1) == path
    (kept,) = (tmp_path / "ranks").iterdir()
    assert (kept.name[:10], kept.read_text()) == ("1-until-20", "earlier")


def test_a_rank_without_an_address_of_the_others_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match=r"RANK and WORLD_SIZE are set, but .*MASTER_ADDR"):
        train_quietly(tiny_config(tmp_path, *TWO))


@pytest.mark.parametrize(
    ("level", "own_file", "shown"),
    [
        ("info", False, ["an error"]),
        ("debug", False, ["a detail", "a line", "an error"]),
        ("critical", False, []),
        ("info", True, ["a line", "an error"]),
        ("error", True, ["an error"]),
    ],
)
def test_ranks_other_than_0_log_everything_only_to_their_own_file(
    level: str, own_file: bool, shown: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from kenotron.parallel.mesh import Mesh
    from kenotron.training import console

    class Second(Mesh):
        def rank(self, name: str) -> int:
            return int(name in ("world", "batch"))

    monkeypatch.setattr(console.logger, "handlers", [])
    monkeypatch.setattr(console.logger, "propagate", True)
    if own_file:
        monkeypatch.setenv("KENOTRON_LAUNCH", str(tmp_path))
    before = console.logger.level
    config = tiny_config(tmp_path, f"logging.log_level_replica={level}")
    console.start_logging(config, Second())
    console.logger.debug("a detail")
    console.logger.info("a line")
    console.logger.error("an error")
    console.logger.setLevel(before)
    said = capsys.readouterr().out
    assert re.findall(r"^\d\d:\d\d:\d\d rank 1: (?:\w+: )?(.*)$", said, re.MULTILINE) == shown
    assert said.count("\n") == len(shown)
