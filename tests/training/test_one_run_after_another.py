"""Nothing is left of a run: two different ones in one process have the bits of fresh processes, in either order."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.nursery import Nursery
from support.tiny_run import numbers, tiny_dict, tiny_yaml

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
