"""One run on 32 ranks, dp 2 x pp 4 x tp 2 x cp 2, by torchrun: the losses of one process. `make test-ranks`."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.tiny_run import REPOSITORY, environment, losses, metrics, tiny_config, tiny_dict, train_quietly

pytestmark = [pytest.mark.slow, pytest.mark.many_ranks]

SHAPES = ("model.model_config.num_hidden_layers=4", "tokens.batch_accumulation_per_replica=4")
LAYOUT = (
    "parallelism.dp=2",
    "parallelism.pp=4",
    "parallelism.tp=2",
    "parallelism.context_parallel_size=2",
    "tokens.micro_batch_size=2",  # of the 4 of one process
)


def test_32_ranks_train_what_one_process_trains(tmp_path: Path) -> None:
    alone = tiny_config(tmp_path / "alone", *SHAPES)
    train_quietly(alone)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_dict(tmp_path)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=32", "--standalone"]
    process = subprocess.run(
        [*torchrun, str(REPOSITORY / "run_train.py"), "--config-file", "tiny.yaml", *SHAPES, *LAYOUT],
        cwd=tmp_path,
        env=environment(tmp_path, GLOO_SOCKET_IFNAME="lo"),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert process.returncode == 0, process.stderr
    ranks = tiny_config(tmp_path)
    assert losses(ranks) == pytest.approx(losses(alone), rel=1e-5)
    assert metrics(ranks)[0]["grad_norm"] == pytest.approx(metrics(alone)[0]["grad_norm"], rel=1e-5)
