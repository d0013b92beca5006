"""The same bits twice: `general.deterministic`, set while a run trains and not after, and runs after other runs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.backends import cudnn

from kenotron.config.errors import InputError, RunFailed
from kenotron.training import Hook
from support.nursery import Nursery
from support.tiny_run import (
    equal_bits,
    losses,
    numbers,
    tiny_config,
    tiny_dict,
    tiny_yaml,
    train_quietly,
    weights,
)

KEY = "general.deterministic=true"
VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
LINE = r"^general\.deterministic: put_ does not have a deterministic implementation on this device; set the key to f"


def settings() -> tuple[object, ...]:
    return torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark, os.environ.get(VARIABLE)


class Settings(Hook):
    """What a step finds set."""

    found: tuple[object, ...] = ()

    def before_update(self, run: Any) -> None:
        type(self).found = settings()


class Unordered(Hook):
    """Calls an operator that torch has in no deterministic form, on CPUs either."""

    def before_update(self, run: Any) -> None:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "of others")  # is put back after the test
    monkeypatch.delenv(VARIABLE)


def test_it_is_set_while_a_run_trains_and_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "benchmark", True)
    before = settings()
    configs = [tiny_config(tmp_path / name, KEY, f"general.hooks=[{__name__}.Settings]") for name in "ab"]
    first, second = (weights(train_quietly(config)) for config in configs)
    assert Settings.found == (2, True, False, ":4096:8")
    assert settings()[:3] == before[:3] == (0, False, True)
    assert equal_bits(first, second)
    assert losses(configs[0]) == losses(configs[1])


def test_an_operator_without_an_order_ends_the_run_in_one_line(tmp_path: Path) -> None:
    hooks = f"general.hooks=[{__name__}.Unordered]"
    with pytest.raises(RunFailed, match=LINE):
        train_quietly(tiny_config(tmp_path / "with", KEY, hooks))
    assert settings()[0] == 0
    train_quietly(tiny_config(tmp_path / "without", hooks))


def test_another_workspace_of_cublas_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, ":0:0")
    with pytest.raises(InputError, match=r"general\.deterministic: expected CUBLAS_WORKSPACE_CONFIG to be :4096:8 or"):
        train_quietly(tiny_config(tmp_path, KEY))


# ---- nothing is left of a run: those in one process have the bits of fresh processes, in either order ------

RUNS = {
    "llama": [
        *("general.deterministic=true", "model.kernels=torch", "model.document_masking=true"),
        *("parallelism.recompute_layer=selective", "optimizer.optimizer_factory={name: muon}"),
    ],
    "mixtral": [
        *(f"model.model_config.{key}" for key in ("family=mixtral", "num_local_experts=4", "num_experts_per_tok=2")),
        *("model.dtype=bfloat16", "tokens.batch_accumulation_per_replica=2"),
    ],
}
STEPS = "tokens.train_steps=4"


def alone(name: str, folder: Path, nursery: Nursery) -> list[list[float]]:
    """Of a run in a process that does no other."""
    folder.mkdir()
    assert nursery.run("train", tiny_yaml(folder), STEPS, *RUNS[name], folder=folder).code == 0
    return numbers(folder)


def one_after_another(folder: Path, *order: str) -> list[list[list[float]]]:
    """Of runs that a new process does in this order."""
    folders = [folder / str(place) for place in range(len(order))]
    runs = [(tiny_dict(path), [STEPS, *RUNS[name]]) for name, path in zip(order, folders)]
    code = "import json, sys; import kenotron as kn\nfor run in json.loads(sys.argv[1]): kn.train(kn.load(*run))"
    subprocess.run([sys.executable, "-c", code, json.dumps(runs)], check=True, stdout=subprocess.DEVNULL)
    return [numbers(path) for path in folders]


@pytest.mark.slow
def test_runs_one_after_another_in_one_process_are_those_of_fresh_processes(tmp_path: Path, nursery: Nursery) -> None:
    llama, mixtral = (alone(name, tmp_path / name, nursery) for name in RUNS)
    assert len(llama) == len(mixtral) == 4
    assert one_after_another(tmp_path / "both", "llama", "mixtral", "llama") == [llama, mixtral, llama]
