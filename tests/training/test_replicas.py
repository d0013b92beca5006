"""`general.ignore_sanity_checks: false`: a weight that differs between ranks ends the run before it is saved."""

from pathlib import Path

import pytest

from kenotron.config.errors import RunFailed
from kenotron.observers.consistency import replica_difference
from support.layout_runs import train_here
from support.ranks import run_ranks
from support.tiny_run import tiny_config

NORM = "model.norm.weight"


def trained(rank: int, folder: Path, layout: str, weight: str | None) -> str | None:
    keys = ["general.ignore_sanity_checks=false", "checkpoints.checkpoint_interval=2", "tokens.train_steps=4"]
    if weight is not None:
        keys.append(f"general.hooks=[{{path: support.user_parts.FlipBit, kwargs: {{weight: {weight}, step: 3}}}}]")
    try:
        train_here(tiny_config(folder, *keys, *layout.split()))
    except RunFailed as error:
        return str(error)
    return None


DP = "parallelism.dp=2 tokens.micro_batch_size=2"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [DP, "parallelism.tp=2", "parallelism.tp=2 parallelism.tp_mode=REDUCE_SCATTER"])
def test_a_flipped_bit_of_one_replica_ends_all_ranks_with_its_name(layout: str, tmp_path: Path) -> None:
    messages = run_ranks(2, trained, tmp_path, layout, NORM)
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"step 4: replicas differ: {NORM} on rank 1 differs from that on rank 0")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()) == ["2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [DP, f"{DP} optimizer.zero_stage=1", f"{DP} optimizer.zero_stage=3", "parallelism.tp=2", "parallelism.pp=2",
     "parallelism.context_parallel_size=2", f"{DP} model.model_config.is_mixtral_config=true"],
)  # fmt: skip
def test_replicas_agree_without_a_fault(layout: str, tmp_path: Path) -> None:
    assert run_ranks(2, trained, tmp_path, layout, None) == [None, None]


def test_the_ranks_that_differ_are_those_in_the_minority() -> None:
    block, other = ("norm", (0,), (4,)), ("rows", (2, 0), (2, 4))
    ranks = [{block: 5}, {block: 5, other: 1}, {block: 6}, {block: 5, other: 1}]
    assert replica_difference(ranks) == "norm on rank 2 differs from that on ranks 0, 1, 3"
    assert replica_difference(ranks[:2]) is None
