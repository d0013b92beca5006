"""What ranks gather and read is small, however many they are: each of N holds N times as much as one gives."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from kenotron.checkpoint.folders import newest_complete
from kenotron.checkpoint.loading import load
from kenotron.checkpoint.saving import save
from kenotron.parallel.ranks import run_on_rank0
from kenotron.training.saved_state import manifest_state
from support.ranks import run_ranks

TENSORS = 500
SMALL = 1000  # bytes: the names of the tensors have 20,000


def tensors(value: float) -> dict[str, Any]:
    return {f"model.layers.{number}.self_attn.q_proj.weight": torch.full((2,), value) for number in range(TENSORS)}


def resume(rank: int, root: Path) -> tuple[int, int]:
    """The bytes of the largest object that this rank gives to a gather or a scatter, and how many it gives."""
    sizes = []

    def recorded(name: str, position: int) -> Any:
        original = getattr(dist, name)

        def call(*arguments: Any, **options: Any) -> Any:
            sizes.append(len(pickle.dumps(arguments[position])))
            return original(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, position in (("all_gather_object", 1), ("gather_object", 0), ("scatter_object_list", 1)):
            patch.setattr(dist, name, recorded(name, position))
        text = run_on_rank0(lambda: "a large result" * 1000)
        found = tensors(0.0)
        load(newest_complete(root), model=found, optimizer=None, verify=False)
    assert text == "a large result" * 1000
    assert all(value.tolist() == [1.0, 1.0] for value in found.values())
    return max(sizes), len(sizes)


def test_a_run_that_resumes_gathers_neither_manifests_nor_names_nor_plans(tmp_path: Path) -> None:
    state = {"a large state": "x" * 10_000}
    save(tmp_path, 10, model=tensors(1.0), optimizer=None, state=state, config_yaml="", model_config={})
    for most, calls in run_ranks(2, resume, tmp_path):
        assert most < SMALL
        assert calls > 3


def state_of_data(rank: int) -> tuple[dict[str, str], int]:
    calls = []

    def fingerprints() -> dict[str, str]:
        calls.append(rank)
        return {"tokens/web": f"as rank {rank} reads it"}

    start = SimpleNamespace(schedule_start=0, data_start=0)
    data = SimpleNamespace(fingerprints=fingerprints, held_out_hashes=list)
    counts = {"step": 1, "consumed_tokens": 2, "consumed_samples": 1, "last_metrics": {}}
    run = SimpleNamespace(**counts, start=start, data=data)
    return manifest_state(cast(Any, run))["data"], len(calls)


def test_rank_0_alone_reads_the_heads_and_tails_of_all_files() -> None:
    """Of 10,000 files these are 1.3 GB, which thousands of ranks would read at the first save."""
    found = {"tokens/web": "as rank 0 reads it"}
    assert run_ranks(2, state_of_data) == [(found, 1), (found, 0)]
