"""Containers, Kubernetes and SkyPilot: the files say what torchrun needs, and runs start as they say."""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import kenotron as kn
from kenotron.config import dump
from support.tiny_run import REPOSITORY, Shell, environment, metrics, tiny_config, tiny_yaml

EXAMPLES = REPOSITORY / "examples"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def test_pods_call_torchrun_with_the_script_of_the_image_and_have_time_to_save() -> None:
    runtime, job = documents("kubernetes/trainjob.yaml")
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert (job["spec"]["runtimeRef"]["name"], pod["containers"][0]["command"]) == (
        runtime["metadata"]["name"],
        ["torchrun"],
    )
    (kueue,) = documents("kubernetes/kueue.yaml")
    alone = kueue["spec"]["template"]["spec"]
    for spec, arguments in ((pod, job["spec"]["trainer"]["args"]), (alone, alone["containers"][0]["args"])):
        assert spec["terminationGracePeriodSeconds"] > 30
        script, option, config = arguments[-3:]
        assert (script, option) == ("/opt/kenotron/run_train.py", "--config-file")
        mounts = {each["name"]: each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
        assert config.startswith(mounts["config"])
        assert {each["name"] for each in spec["volumes"]} == mounts.keys()
    assert kueue["spec"]["suspend"] is True


def test_what_images_copy_is_there() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    allowed = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert names == allowed
    assert all((REPOSITORY / name).exists() for name in names)
    recipe = (REPOSITORY / "apptainer.def").read_text()
    assert all(name in recipe for name in names)


RUN = str(EXAMPLES / "quickstart.yaml"), "parallelism.dp=16", "tokens.micro_batch_size=1"
RUN += ("tokens.batch_accumulation_per_replica=1", "--gpus-per-node", "8", "--dry-run")


def submitted(shell: Shell, *arguments: str, run: tuple[str, ...] = RUN) -> tuple[list[dict[str, Any]], str]:
    code, printed, said = shell("submit", *run, *arguments)
    assert code == 0, said
    return list(yaml.safe_load_all(printed)), said


def test_a_trainjob_is_printed_for_the_layout_of_a_run(shell: Shell) -> None:
    """As the example has it, with the config inside."""
    (texts, *job), said = submitted(shell, "--to", "trainjob", "--container", "mine:1")
    assert "checkpoints_path: expected a volume that all pods see, found checkpoints/quickstart" in said
    assert dump(kn.load(yaml.safe_load(texts["data"]["config.yaml"]))) == dump(kn.load(RUN[0], RUN[1:4]))
    expected = (EXAMPLES / "kubernetes" / "trainjob.yaml").read_text().replace("/config/my.yaml", "/config/config.yaml")
    expected = expected.replace("my-run", "quickstart").replace("name: kenotron", "name: quickstart")
    assert job == list(yaml.safe_load_all(expected.replace("registry.example.com/kenotron:latest", "mine:1")))


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("%date_local", r"run-\d{8}-\d{6}-local"),
        ("My run (v2) -- x", "my-run-v2-x"),
        ("a" * 44 + "_b", "a" * 44),
        ("__", "run"),
    ],
)
@pytest.mark.parametrize("to", ["trainjob", "skypilot"])
def test_a_job_has_a_name_that_its_launcher_allows(run: str, expected: str, to: str, shell: Shell) -> None:
    """Kubeflow's and SkyPilot's rules. JobSet refuses names of pods of more than 63 characters."""
    job = submitted(shell, "--to", to, f"general.run={run}")[0][-1]
    name = job["metadata"]["name"] if to == "trainjob" else job["name"]
    assert re.fullmatch(expected, name)
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert re.fullmatch("[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*", name)
    assert len(f"{name}-node-0-1023-abcde") <= 63


def test_without_their_number_nodes_have_at_most_eight_gpus(shell: Shell) -> None:
    run = tuple(each for each in RUN if each not in ("--gpus-per-node", "8"))
    *_, job = submitted(shell, "--to", "trainjob", run=run)[0]
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]) == (2, 8)


def test_skypilot_gets_files_of_the_folder_that_it_copies(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = tmp_path / "more.yaml"
    more.write_text("general: {run: other}\n")
    code, _, said = shell("submit", *RUN, "--to", "skypilot", more)
    assert code == 2
    assert f"expected a file in {Path.cwd()}, the folder that is copied; found {more}" in said
    monkeypatch.chdir(REPOSITORY)
    (task,) = submitted(shell, "--to", "skypilot")[0]
    assert task["envs"] == {"CONFIG": "examples/quickstart.yaml"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--container", "mine:1"), "--container: has no effect with --to skypilot"),
        (("--nodes", "3"), "needs 16 ranks, but 3 nodes of 8 have 24; parallelism.dp=24 would fit"),
    ],
)
def test_what_only_slurm_has_is_refused_elsewhere(arguments: tuple[str, ...], line: str, shell: Shell) -> None:
    code, _, said = shell("submit", *RUN, "--to", "skypilot", *arguments)
    assert code == 2
    assert line in said


@pytest.mark.parametrize("printed", [False, True])
def test_skypilots_variables_become_torchruns_options(
    printed: bool, tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its script on each of two nodes, with a torchrun that prints its arguments."""
    monkeypatch.chdir(REPOSITORY)
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(torchrun.stat().st_mode | stat.S_IXUSR)
    (task,) = submitted(shell, "--to", "skypilot")[0] if printed else documents("skypilot/train.yaml")
    assert task["num_nodes"] == 2
    for rank in range(2):
        variables = {
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NUM_GPUS_PER_NODE": "8",
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            **task["envs"],
        }
        done = subprocess.run(["bash", "-ec", task["run"]], env=variables, capture_output=True, text=True, check=True)
        arguments = done.stdout.split()
        if printed:
            assert arguments[-3:] == [*RUN[1:4]]
            arguments = arguments[:-3]
        options = dict(zip(arguments[:-3:2], arguments[1:-3:2], strict=True))
        assert options == {
            "--nnodes": "2",
            "--node-rank": str(rank),
            "--nproc-per-node": "8",
            "--master-addr": "10.0.0.1",
            "--master-port": "29500",
        }
        assert arguments[-3:] == ["run_train.py", "--config-file", task["envs"]["CONFIG"]]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def agents(folder: Path, file: Path) -> list[subprocess.Popen[str]]:
    """torchrun of two nodes, with the variables that Kubeflow Trainer sets and no option."""
    port = free_port()
    started = []
    for rank in range(2):
        variables = {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
        }
        command = [*TORCHRUN, str(REPOSITORY / "run_train.py"), "--config-file", str(file)]
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(
                command, cwd=folder, env=environment(folder, **variables), stdout=pipe, stderr=pipe, text=True
            )
        )
    return started


@pytest.mark.slow
def test_torchrun_with_kubeflows_variables_trains_saves_at_sigterm_and_resumes(tmp_path: Path) -> None:
    file = tiny_yaml(tmp_path, parallelism={"dp": 2, "pp": 1, "tp": 1})
    content = yaml.safe_load(file.read_text())
    content["tokens"]["train_steps"] = 100_000
    content["checkpoints"]["checkpoint_interval"] = 100_000
    file.write_text(yaml.safe_dump(content))
    running = agents(tmp_path, file)
    log = tmp_path / "logs"
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size for path in log.rglob("metrics.jsonl")) and time.monotonic() < deadline:
        assert all(each.poll() is None for each in running), running[0].communicate()
        time.sleep(0.2)
    asked = time.monotonic()
    for each in running:
        each.send_signal(signal.SIGTERM)
    said = [each.communicate(timeout=60) for each in running]
    assert time.monotonic() - asked < 30, said
    assert [each.returncode for each in running] == [1, 1]  # torchrun's own, as docs/kubernetes.md says
    (saved,) = (int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit())
    content["tokens"]["train_steps"] = saved + 2
    file.write_text(yaml.safe_dump(content))
    again = agents(tmp_path, file)
    said = [each.communicate(timeout=120) for each in again]
    assert [each.returncode for each in again] == [0, 0], said
    config = tiny_config(tmp_path)
    assert [line["iteration"] for line in metrics(config)][-2:] == [saved + 1, saved + 2]


GROUP = """
import sys
import torch.distributed as dist
import kenotron as kn

dist.init_process_group("gloo")
run = kn.train(kn.load(sys.argv[1]))
assert dist.is_initialized(), "the group is the caller's"
print("steps", run.step, "of", dist.get_world_size(), "ranks")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_run_takes_the_process_group_that_exists(tmp_path: Path) -> None:
    """As in a worker of Ray Train, or a notebook under torchrun."""
    file = tiny_yaml(tmp_path, parallelism={"dp": 2, "pp": 1, "tp": 1})
    (tmp_path / "worker.py").write_text(GROUP)
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "worker.py", str(file)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of 2 ranks") == 2
