"""Runs as jobs of a real Slurm with two nodes: walltime, requeue, scancel, the loss of a node. `make test-slurm`."""

import json
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kenotron.checkpoint.folders import list_checkpoints
from support.slurm_cluster import Cluster, available, cluster
from support.tiny_run import REPOSITORY, command, losses, tiny_config, tiny_dict, train_quietly, wait_until

missing = available()
pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.skipif(missing is not None, reason=str(missing))]

FOUR = ("parallelism.dp=4", "tokens.micro_batch_size=1")  # the global batch of one process
FOUND_BY = ("--env", "MASTER_ADDR=127.0.0.1", "--env", "KENOTRON_DEVICE=cpu")  # both nodes are this machine
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def kenotron(folder: Path, *arguments: str) -> str:
    path = f"{REPOSITORY / 'src'}:{REPOSITORY / 'tests'}"
    done = command(*arguments, folder=folder, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def submitted(folder: Path, *overrides: str, options: tuple[str, ...] = (), seconds_a_step: float = 0.0) -> str:
    """The number of a job of two nodes with two ranks each."""
    content = tiny_dict(Path("."))
    if seconds_a_step:
        hook = {"path": "support.user_parts.SlowStep", "kwargs": {"seconds": seconds_a_step}}
        content["general"]["hooks"] = [hook]
    (folder / "tiny.yaml").write_text(yaml.safe_dump(content))
    printed = kenotron(folder, "submit", "tiny.yaml", *FOUR, *overrides, "--gpus-per-node", "2", *FOUND_BY, *options)
    return printed.split("job ")[1].split(":")[0]


def output(folder: Path) -> str:
    return "\n".join(path.read_text() for path in folder.glob("logs/slurm/*/*.log"))


def steps(folder: Path) -> int:
    path = folder / "logs" / "tiny" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def completes(slurm: Cluster, job: str, folder: Path, seconds: float = 600) -> None:
    wait_until(lambda: slurm.job_state(job) in ENDED, seconds, lambda: f"{slurm.job_state(job)}\n{output(folder)}")
    assert slurm.job_state(job) == "COMPLETED", output(folder)


def written(folder: Path) -> list[float]:
    return [json.loads(line)["lm_loss"] for line in (folder / "logs/tiny/metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of 30 steps of one process."""
    config = tiny_config(tmp_path_factory.mktemp("one"), "tokens.train_steps=30")
    train_quietly(config)
    return losses(config)


def test_two_nodes_train_what_one_process_trains(slurm: Cluster, tmp_path: Path, expected: list[float]) -> None:
    job = submitted(tmp_path, "tokens.train_steps=30")
    completes(slurm, job, tmp_path)
    assert written(tmp_path) == pytest.approx(expected, rel=1e-5)
    assert "step 30" in kenotron(tmp_path, "status")
    assert "kenotron generate checkpoints/30" in kenotron(tmp_path, "logs")


def test_before_the_time_limit_the_run_is_saved_and_requeued_and_goes_on(
    slurm: Cluster, tmp_path: Path, expected: list[float]
) -> None:
    options = ("--time", "2", "--save-seconds", "20")
    job = submitted(tmp_path, "tokens.train_steps=24", options=options, seconds_a_step=5.0)
    completes(slurm, job, tmp_path, seconds=900)  # Slurm holds a requeued job for two minutes
    said = output(tmp_path)
    assert "SIGUSR1: saving" in said
    assert written(tmp_path) == pytest.approx(expected[:24], rel=1e-5)  # each step once
    saved = [entry.step for entry in list_checkpoints(tmp_path / "checkpoints")]
    assert len(saved) >= 2, said
    assert saved[-1] == 24, said


def test_scancel_leaves_a_checkpoint_and_no_job(slurm: Cluster, tmp_path: Path) -> None:
    job = submitted(tmp_path, "tokens.train_steps=1000", seconds_a_step=0.3)
    wait_until(lambda: steps(tmp_path) >= 3, 120, lambda: output(tmp_path))
    kenotron(tmp_path, "cancel", job)
    wait_until(lambda: slurm.job_state(job) == "CANCELLED", 60, lambda: slurm.job_state(job))
    wait_until(lambda: bool(list_checkpoints(tmp_path / "checkpoints")), 30, lambda: output(tmp_path))
    (entry,) = list_checkpoints(tmp_path / "checkpoints")
    assert entry.problem is None
    assert entry.step >= 3
    time.sleep(2)
    assert slurm.job_state(job) == "CANCELLED"


def test_after_the_loss_of_a_node_the_job_goes_on_from_its_last_checkpoint(
    slurm: Cluster, tmp_path: Path, expected: list[float]
) -> None:
    overrides = ("tokens.train_steps=30", "checkpoints.checkpoint_interval=5")
    job = submitted(tmp_path, *overrides, seconds_a_step=0.5)
    wait_until(lambda: (tmp_path / "checkpoints" / "10").exists(), 120, lambda: output(tmp_path))
    slurm.kill_node("n2")
    wait_until(lambda: slurm.job_state(job) != "RUNNING", 120, lambda: slurm.job_state(job))
    slurm.start_node("n2")
    completes(slurm, job, tmp_path)
    assert written(tmp_path) == pytest.approx(expected, rel=1e-5)
    assert "Loaded weights" in output(tmp_path)


def test_a_chain_of_jobs_is_one_run(slurm: Cluster, tmp_path: Path, expected: list[float]) -> None:
    job = submitted(tmp_path, "tokens.train_steps=30", options=("--chain", "2"))
    completes(slurm, job, tmp_path)
    completes(slurm, str(int(job) + 1), tmp_path)
    assert written(tmp_path) == pytest.approx(expected, rel=1e-5)


def test_an_array_is_a_run_for_each_value(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_dict(Path("."))))
    key = "optimizer.learning_rate_scheduler.learning_rate"
    kenotron(tmp_path, "submit", "tiny.yaml", "--gpus-per-node", "1", "--array", f"{key}=0.01,0.02", *FOUND_BY)
    runs = [tmp_path / "logs" / f"tiny-{number}" / "metrics.jsonl" for number in (0, 1)]
    wait_until(lambda: all(run.exists() and len(run.read_text().splitlines()) == 3 for run in runs), 120)
    rates = [json.loads(run.read_text().splitlines()[-1])["lr"] for run in runs]
    assert rates == pytest.approx([0.01, 0.02])


def test_the_example_runs_by_the_commands_of_its_readme(slurm: Cluster, tmp_path: Path) -> None:
    example = REPOSITORY / "examples" / "slurm"
    shutil.copytree(example, tmp_path / "examples" / "slurm")
    block = (example / "README.md").read_text().split("```bash\n")[1].split("```")[0]
    first, *others = [shlex.split(line)[1:] for line in block.splitlines()]
    job = kenotron(tmp_path, *first, *FOUND_BY).split("job ")[1].split(":")[0]
    completes(slurm, job, tmp_path)
    for line in others:
        kenotron(tmp_path, *line)
    said = output(tmp_path)
    shown = [line for line in (example / "README.md").read_text().splitlines() if line.startswith("step ")]
    for line in shown:
        assert line.split(" | ")[0] + " | " in said
    assert "Saved checkpoint at checkpoints/slurm/60" in said
