"""What is said of a memory that is too small, and that what is planned for it fits, in a process of limited memory."""

import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from kenotron.launch.memory import advice, too_large
from kenotron.planner import memory
from support.tiny_run import environment, tiny_config, tiny_yaml

GIB = 1 << 30
SHAPES = ("hidden_size=256", "intermediate_size=688", "num_hidden_layers=2", "max_position_embeddings=256")
MEDIUM = (*(f"model.model_config.{shape}" for shape in SHAPES), "tokens.sequence_length=256")


# ---- what is said ------------------------------------------------------------------------------------------------


def test_a_smaller_batch_is_named_with_the_same_number_of_sequences(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "tokens.micro_batch_size=12")
    halved = "tokens.micro_batch_size=6 tokens.batch_accumulation_per_replica=2"
    assert advice(config) == f"try {halved}; `kenotron plan` predicts what fits"
    config = tiny_config(tmp_path, "tokens.micro_batch_size=1")
    assert advice(config).startswith("try parallelism.recompute_layer=true; ")
    config = tiny_config(tmp_path, "tokens.micro_batch_size=1", "parallelism.recompute_layer=true")
    assert advice(config).startswith("lower tokens.sequence_length, now 16, or split the model: parallelism.tp, ")


def test_a_pipeline_that_keeps_all_micro_batches_is_told_of_the_schedule_that_does_not(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "parallelism.pp=2", "tokens.batch_accumulation_per_replica=8")
    said = "try parallelism.pp_engine=1f1b, which keeps activations of 2 micro-batches, not of all; "
    assert advice(config).startswith(said)


def test_only_a_run_that_may_be_too_large_waits_for_the_planner(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    with patch.object(memory, "plan_memory") as plan:
        assert too_large(config, GIB) is None
    assert not plan.called
    assert (said := too_large(config, 100_000)) is not None
    assert re.fullmatch(r"rank 0 will need \d\S+ GiB of 9.31e-05; `kenotron plan` says .*", said)


SCRIPT = """
import sys
print("begins", flush=True)
import kenotron as kn
from kenotron.launch import memory
memory.free_memory = lambda *_: 100_000
print("ends at", kn.train(kn.load(sys.argv[1])).step, flush=True)
"""


@pytest.mark.budget(20, reason="trains and plans in a process of its own")
def test_the_planner_does_not_run_the_script_that_trains(tmp_path: Path) -> None:
    """The script needs no `if __name__ == "__main__"`, without which multiprocessing runs it in each new process."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, tiny_yaml(tmp_path)]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=True, timeout=120)
    lines = done.stdout.splitlines()
    assert (lines.count("begins"), lines.count("ends at 3")) == (1, 1)
    assert "warning: rank 0 will need " in done.stderr


# ---- in a process of little memory -------------------------------------------------------------------------------

LIMITED = """
import contextlib, os, resource, sys
from pathlib import Path
import kenotron.launch.training, torch.distributed.fsdp
with contextlib.suppress(ImportError):
    import triton._C.libtriton  # which torch would map into the limited memory
from kenotron.cli import main
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (mapped + int(sys.argv[1]),) * 2)
main(sys.argv[2:])
"""


STEPS = ("tokens.train_steps=2", "--fresh")


def within(memory: int, folder: Path, command: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    arguments = [command, str(tiny_yaml(folder)), *MEDIUM, *overrides]
    command = [sys.executable, "-c", LIMITED, str(memory), *arguments]
    env = environment(folder)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel limits a process's memory")
@pytest.mark.parametrize("gib", [0.5, 1.0])
def test_a_run_that_is_out_of_memory_trains_with_what_is_planned(tmp_path: Path, gib: float) -> None:
    memory = int(gib * GIB)
    failed = within(memory, tmp_path, "train", *STEPS, "tokens.micro_batch_size=64")
    assert failed.returncode == 1
    assert re.search(r"^error: out of memory \(.*\); try tokens\S+ tokens\S+; `kenotron plan`", failed.stderr, re.M)
    planned = within(memory, tmp_path, "plan", "tokens.micro_batch_size=64")
    found = re.search(r"^The nearest that fits: (tokens\S+ tokens\S+)$", planned.stdout, re.MULTILINE)
    assert found is not None, planned.stdout + planned.stderr
    trained = within(memory, tmp_path, "train", *STEPS, *found[1].split())
    assert trained.returncode == 0, trained.stderr
    assert "step 2/2" in trained.stdout
