"""Ranks that were started in different ways, on different code or with different files, are refused by name."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kenotron.config.errors import InputError, RunFailed
from kenotron.launch import agreement, start_process_group
from kenotron.launch.agreement import check_started_alike
from kenotron.observers.consistency import SameData
from support.ranks import run_ranks
from support.tiny_run import Shell, environment, tiny_config, tiny_yaml

pytestmark = pytest.mark.budget(10, reason="two ranks")


STEPS = "tokens.train_steps=7"


def refusals(rank: int, folder: Path, cases: list[dict[str, Any]]) -> list[str]:
    """What a rank says of each case, where rank 1 has what the case names and rank 0 has not."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement.socket, "gethostname", lambda: f"machine{rank}")
        for case in cases:
            own = case if rank else {}
            code = own.get("code", "one")
            patch.setattr(agreement, "_code", lambda code=code: code)
            try:
                check_started_alike(tiny_config(folder, *own.get("keys", [])), {"fresh": own.get("fresh", False)})
                found.append("")
            except InputError as error:
                found.append(str(error))
    return found


def test_a_rank_that_was_started_in_another_way_is_named_on_all(tmp_path: Path) -> None:
    cases = {
        "parallelism.tp is 2 and not 1": {"keys": ["parallelism.tp=2"]},
        "tokens.train_steps is 7 and not 3 (and 1 more)": {"keys": ["optimizer.weight_decay=0.5", STEPS]},
        "--fresh is True and not False": {"fresh": True},
        "the hash of kenotron's code is other and not one": {"code": "other"},
    }
    places = {"keys": ["general.run=other", f"logging.log_dir={tmp_path}/other"]}  # rank 0's are those of all
    found = run_ranks(2, refusals, tmp_path, [places, *cases.values()])
    expected = [f"rank 1 on machine1 was started differently from rank 0: {what}" for what in cases]
    assert found == [["", *expected]] * 2


def data_refusal(rank: int, samples: list[int], held_out: list[int]) -> str:
    plan = SimpleNamespace(label="w")
    stage = SimpleNamespace(sources=[range(samples[rank])], stage=SimpleNamespace(sources=[plan]))
    evaluated = {"val": [(plan, SimpleNamespace(held_out=range(held_out[rank])))]}
    run: Any = SimpleNamespace(step=0, data=SimpleNamespace(stage_of=lambda step: stage, evaluated=evaluated))
    try:
        SameData().on_train_start(run)
    except InputError as error:
        return str(error)
    return ""


def test_a_machine_with_other_files_is_named_on_all() -> None:
    assert run_ranks(2, data_refusal, [9, 9], [4, 4]) == ["", ""]
    rank_1 = f"rank 1 on {socket.gethostname()} has"
    cut = f"data_stages: {rank_1} 9 samples of w, and rank 0 50,000"
    assert run_ranks(2, data_refusal, [50000, 9], [4, 4]) == [cut] * 2
    other = f"validation: {rank_1} 5 samples of w, and rank 0 4"
    assert run_ranks(2, data_refusal, [9, 9], [4, 5]) == [other] * 2


def test_what_only_another_rank_finds_wrong_is_said_by_it(monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    """Its file is another one, on its own machine."""
    monkeypatch.setattr("kenotron.cli.rank0.RANK0_REPORTS_WITHIN_S", 0.0)
    monkeypatch.setenv("RANK", "1")
    code, _, said = shell("train", "missing.yaml")
    expected = f"error: rank 1 on {socket.gethostname()}: missing.yaml: no such file"
    assert (code, said.startswith(expected)) == (2, True)


def test_processes_of_mpirun_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    """Each would train the whole run."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    code, _, said = shell("train", tiny_yaml(tmp_path))
    assert (code, "mpirun started these processes" in said) == (2, True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Of a rank that is alone on its machine."""
    given = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    return {name: str(value) for name, value in given.items()} | {"MASTER_ADDR": "localhost"}


def test_a_network_interface_that_does_not_exist_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo raises a RuntimeError, of which torch makes no error of its own."""
    for name, value in (variables(0, 1, free_port()) | {"GLOO_SOCKET_IFNAME": "nosuch0"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(RunFailed, match=r"^rank 0 on .* a wrong address or network interface, .*nosuch0$"):
        start_process_group(torch.device("cpu"), 60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_rank_1", "port", "code", "said"),
    [
        (["--fresh"], 0, 2, "was started differently from rank 0: --fresh is True and not False"),
        ([], 1, 1, "did not find all 2 ranks at localhost:"),
    ],
)
def test_two_machines_that_do_not_fit_end_in_a_line(
    of_rank_1: list[str], port: int, code: int, said: str, tmp_path: Path
) -> None:
    yaml = tiny_yaml(tmp_path)
    layout = ["parallelism.dp=2", "tokens.micro_batch_size=2", "parallelism.timeout_seconds=5"]
    free, ranks = free_port(), []
    for rank in range(2):
        command = [sys.executable, "-m", "kenotron", "train", str(yaml), *layout, *(of_rank_1 if rank else [])]
        env = environment(tmp_path) | os.environ | variables(rank, 2, free + rank * port)
        ranks.append(subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True))
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert code in [rank.returncode for rank in ranks]
    assert said in "".join(errors)
    assert "Traceback" not in "".join(errors)
