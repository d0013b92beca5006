"""A run on two machines, each with two ranks, by the command of docs/multi-node-training.md; and their network cut.

The machines are network namespaces of this one. `make test-network` installs what they need.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.tiny_run import REPOSITORY, losses, metrics, numbers, tiny_config, tiny_yaml, train_quietly, wait_until
from support.two_machines import Machines, available, two_machines

missing = available()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing is not None, reason=str(missing))]

STEPS = 40
TIMEOUT_S = 12  # no rank of a busy machine is as late
GRACE_S = 150.0  # for all ranks to end: 20 s on an idle machine; hanging, a quarter of an hour
LAYOUT = ("parallelism.dp=2", "parallelism.tp=2", "tokens.micro_batch_size=2")  # the global batch of one process
SAVED = (f"tokens.train_steps={STEPS}", "checkpoints.checkpoint_interval=5")
OVERRIDES = (*LAYOUT, *SAVED, f"parallelism.timeout_seconds={TIMEOUT_S}")
SLOWLY = "general.hooks=[{path: support.user_parts.SlowStep, kwargs: {seconds: 0.2}}]"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with two_machines(tmp_path_factory.mktemp("machines")) as made:
        yield made


def start(machines: Machines, folder: Path, *overrides: str) -> list[subprocess.Popen[str]]:
    """The command of the page on both machines."""
    tiny_yaml(folder)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2"]
    meet = ["--rdzv_backend=c10d", "--rdzv_endpoint=machine1:29500", "--rdzv_id=42"]
    script = [str(REPOSITORY / "run_train.py"), "--config-file", "tiny.yaml", *OVERRIDES, *overrides]
    return [machines.start(number, [*torchrun, *meet, *script], folder) for number in (1, 2)]


def said(folder: Path, number: int) -> str:
    return (folder / f"machine{number}.txt").read_text()


def errors(folder: Path, number: int) -> list[str]:
    return [line for line in said(folder, number).splitlines() if line.startswith("error: ")]


def complete(started: list[subprocess.Popen[str]], folder: Path) -> None:
    codes = [process.wait(timeout=300) for process in started]
    assert codes == [0, 0], said(folder, 1) + said(folder, 2)


def wait(condition: Callable[[], bool], seconds: float, folder: Path) -> None:
    wait_until(condition, seconds, lambda: said(folder, 1) + said(folder, 2))


@pytest.fixture(scope="module")
def uncut(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on both machines whose network was never cut."""
    folder = tmp_path_factory.mktemp("uncut")
    complete(start(machines, folder), folder)
    return folder


def test_two_machines_train_what_one_process_trains(uncut: Path, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, f"tokens.train_steps={STEPS}")
    train_quietly(config)
    assert losses(tiny_config(uncut)) == pytest.approx(losses(config), rel=1e-5)
    first, alone = metrics(tiny_config(uncut))[0], metrics(config)[0]
    assert first["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)


def test_a_network_that_is_cut_ends_all_ranks_and_the_same_command_goes_on(
    machines: Machines, uncut: Path, tmp_path: Path
) -> None:
    started = start(machines, tmp_path, SLOWLY)
    agents = {process.pid for process in started}
    wait(lambda: (tmp_path / "checkpoints" / "10" / "manifest.json").exists(), 200, tmp_path)
    machines.cut()
    cut_at = time.monotonic()
    try:
        wait(lambda: set(machines.processes(1) + machines.processes(2)) <= agents, GRACE_S, tmp_path)
        assert time.monotonic() - cut_at > TIMEOUT_S
    finally:
        machines.mend()  # torchrun on machine2 has waited for it
    assert [process.wait(timeout=120) for process in started] == [1, 1]
    (one,) = errors(tmp_path, 1)
    assert re.fullmatch(
        rf"error: rank [01] has waited more than {TIMEOUT_S} s \(parallelism\.timeout_seconds\) in \w+ "
        r"\(number \d+\) of .*: (ranks? .*[23].* did not join it|all others wait for ranks 2, 3)",
        one,  # the second if rank 0 waits for rank 1, which waits for rank 3
    )
    assert "  ranks 2, 3: did not reply" in said(tmp_path, 1)
    for line, rank in zip(sorted(errors(tmp_path, 2)), (2, 3), strict=True):
        late = f"error: rank {rank} has waited more than {TIMEOUT_S} s (parallelism.timeout_seconds) for machine1,"
        assert line.startswith(late)
    complete(start(machines, tmp_path, SLOWLY), tmp_path)
    first = re.search(r"start_iteration_step: (\d+)", said(tmp_path, 1))
    assert first is not None
    assert int(first[1]) >= 10
    assert numbers(tmp_path) == numbers(uncut)


@pytest.mark.cases(slow=0)
def test_machines_go_on_from_the_parts_on_their_disks_and_without_one_of_them_from_the_durable_checkpoint(
    machines: Machines, uncut: Path, tmp_path: Path
) -> None:
    """The folder has the same name on both machines."""
    local = f"checkpoints.local={{path: {machines.disk}, interval: 2}}"
    seldom = "checkpoints.checkpoint_interval=25"

    def saved() -> int:
        """The newest step of which both machines have their parts."""
        found = [machines.disk_of(number).glob("run-*/*of2/*/manifest.json") for number in (1, 2)]
        one, other = ({path.parent.name for path in paths} for paths in found)
        return max((int(name) for name in one & other if name.isdigit()), default=0)  # others are removed, or written

    def kill_all_after(step: int) -> None:
        started = start(machines, tmp_path, SLOWLY, local, seldom)
        wait(lambda: saved() >= step, 200, tmp_path)
        for pid in machines.processes(2):
            os.kill(pid, signal.SIGKILL)
        assert [process.wait(timeout=GRACE_S) for process in started] == [1, -signal.SIGKILL]

    def first_step() -> int:
        found = re.search(r"start_iteration_step: (\d+)", said(tmp_path, 1))
        assert found is not None
        return int(found[1])

    kill_all_after(8)
    assert list((tmp_path / "checkpoints").glob("[0-9]*")) == []
    kill_all_after(28)
    assert 8 <= first_step() < 25  # from the parts
    for left in machines.disk_of(2).iterdir():
        shutil.rmtree(left)
    complete(start(machines, tmp_path, SLOWLY, local, seldom), tmp_path)
    assert first_step() == 25  # machine 2 has come back with an empty disk
    assert numbers(tmp_path) == numbers(uncut)
    assert [*machines.disk_of(1).iterdir(), *machines.disk_of(2).iterdir()] == []
