"""What a checkpoint says of a run's data is found once, however many ranks there are."""

from types import SimpleNamespace
from typing import Any, cast

from kenotron.training.saved_state import manifest_state
from support.ranks import run_ranks


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
