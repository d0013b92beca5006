"""Exports of runs on several ranks: each writes some of the files, and together they are the whole model."""

from pathlib import Path

import pytest

from kenotron.interop import to_hf
from support.layout_runs import train_here
from support.ranks import run_ranks
from support.tiny_run import equal_bits, exported, saved_weights, tiny_config


def trained(rank: int, folder: Path, layout: tuple[str, ...]) -> None:
    train_here(tiny_config(folder, "checkpoints.export_hf=true", "tokens.train_steps=1", *layout))
    to_hf(folder / "checkpoints" / "1", folder / "shards", max_shard_size="4KB")  # here too every rank writes some


@pytest.mark.parametrize(
    "layout",
    [
        ("parallelism.tp=2", "parallelism.pp=2"),
        pytest.param(("parallelism.dp=2", "optimizer.zero_stage=3", "parallelism.tp=2"), marks=pytest.mark.slow),
        pytest.param(("parallelism.dp=4", "optimizer.zero_stage=1"), marks=pytest.mark.slow),
    ],
)
def test_every_layout_exports_the_whole_model(layout: tuple[str, ...], tmp_path: Path) -> None:
    run_ranks(4, trained, tmp_path, layout)
    path = tmp_path / "checkpoints" / "1"
    assert equal_bits(exported(path / "hf"), saved_weights(path))
    alone = to_hf(path, tmp_path / "alone", max_shard_size="4KB")
    assert len(alone.files) > 4
    for file in (tmp_path / "alone").iterdir():
        assert (tmp_path / "shards" / file.name).read_bytes() == file.read_bytes()
