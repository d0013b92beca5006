"""What a hook records on several ranks."""

from pathlib import Path

from support.layout_runs import train_here
from support.ranks import run_ranks
from support.tiny_run import metrics, tiny_config


def trained(rank: int, folder: Path) -> None:
    overrides = ("parallelism.dp=2", "tokens.micro_batch_size=2", "general.hooks=[support.user_parts.Measures]")
    train_here(tiny_config(folder, *overrides))


def test_a_metric_is_reduced_over_the_ranks(tmp_path: Path) -> None:
    run_ranks(2, trained, tmp_path)
    steps = metrics(tiny_config(tmp_path))
    assert len(steps) == 3
    for step in steps:
        assert (step["mean_rank"], step["highest_rank"]) == (0.5, 1)
        assert step["twice_the_loss"] == 2 * step["lm_loss"]
