"""What is said to fit into memory does: by hand, by torch's profiler, and in a process whose memory is limited."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from kenotron.launch.memory import sequence_bytes, state_bytes, what_fits
from support.tiny_run import environment, tiny_config, tiny_dict, tiny_yaml, train_quietly

GIB = 1 << 30
LLAMA_3_8B = tuple(
    f"model.model_config.{key}={value}"
    for key, value in {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }.items()
)
IN_BFLOAT16 = (*LLAMA_3_8B, "model.dtype=bfloat16", "tokens.sequence_length=8192")
MEDIUM = (
    "model.model_config.hidden_size=256",
    "model.model_config.intermediate_size=688",
    "model.model_config.num_hidden_layers=4",
    "model.model_config.max_position_embeddings=256",
    "tokens.sequence_length=256",
)
# For processors without instructions for bf16, whose products take 50 times as long.
SMALLER = (
    *MEDIUM,
    "model.dtype=bfloat16",
    "model.model_config.hidden_size=64",
    "model.model_config.intermediate_size=172",
)


def parameters_by_hand(vocab: int = 64, hidden: int = 16, inner: int = 24, layers: int = 2, kv: int = 8) -> int:
    """A Llama's: two matrices of the vocabulary, and in a layer q, k, v, o, three of the MLP and two norms."""
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
    return 2 * vocab * hidden + layers * layer + hidden


@pytest.mark.parametrize(
    ("overrides", "bytes_of_a_parameter"),
    [
        ((), 4 + 4 + 8),
        (("model.dtype=bfloat16",), 4 + 4 + 8 + 2),
        (("parallelism.dp=4",), 4 + 4 + 8),
        (("parallelism.dp=4", "optimizer.zero_stage=1"), (4 + 8) / 4 + 4 + 4),
        (("parallelism.dp=4", "optimizer.zero_stage=1", "model.dtype=bfloat16"), (4 + 8) / 4 + 4 + 2),
        (("parallelism.dp=4", "optimizer.zero_stage=2"), (4 + 8 + 4) / 4 + 4),
        (("parallelism.dp=4", "optimizer.zero_stage=3"), (4 + 8 + 4) / 4),
        (("parallelism.dp=4", "optimizer.zero_stage=3", "parallelism.dp_shard=2"), (4 + 8 + 4) / 2),
        (("parallelism.tp=2",), (4 + 4 + 8) / 2),
        (
            (
                "parallelism.pp=2",
                "parallelism.dp=4",
                "optimizer.zero_stage=3",
                "tokens.batch_accumulation_per_replica=2",
            ),
            (4 + 8) / 4 / 2 + 4 / 2,
        ),
        (("optimizer.optimizer_factory={name: sgd}",), 4 + 4),
        (("optimizer.optimizer_factory={name: sgd, momentum: 0.9}",), 4 + 4 + 4),
        (("optimizer.optimizer_factory={name: muon}",), 4 + 4 + 4 + 4 * (2 * 64 * 16 + 5 * 16) / 5968),
        (("optimizer.optimizer_factory={name: lion}",), 4 + 4 + 4),
        (
            ("optimizer.param_groups=[{pattern: mlp, optimizer_factory: {name: sgd}}]",),
            4 + 4 + 8 - 8 * 2 * 3 * 16 * 24 / 5968,
        ),
    ],
)
def test_states_are_the_bytes_of_each_parameter(
    tmp_path: Path, overrides: tuple[str, ...], bytes_of_a_parameter: float
) -> None:
    config = tiny_config(tmp_path, *overrides)
    assert parameters_by_hand() == 5968
    assert state_bytes(config, config.zero_stage) == pytest.approx(5968 * bytes_of_a_parameter)


def test_experts_are_divided_among_ranks(tmp_path: Path) -> None:
    shapes = tiny_dict(tmp_path)["model"]["model_config"] | {"num_local_experts": 4, "num_experts_per_tok": 2}
    overrides = (f"model.model_config={json.dumps(shapes)}", "parallelism.dp=2")
    whole = tiny_config(tmp_path, *overrides)
    apart = tiny_config(tmp_path, *overrides, "parallelism.expert_parallel_size=2")
    experts = 2 * 4 * 3 * 16 * 24
    assert state_bytes(whole, 0) - state_bytes(apart, 0) == pytest.approx(16 * experts / 2)


# ---- activations -------------------------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True, "selective", "elementwise"])
def test_a_sequence_takes_what_the_allocator_counts(tmp_path: Path, recompute: bool | str, dtype: str) -> None:
    shapes = MEDIUM if dtype == "float32" else SMALLER
    peaks = [allocated_at_peak(tmp_path, size, recompute, shapes) for size in (12, 20)]
    measured = (peaks[1] - peaks[0]) / 8
    estimated = sequence_bytes(tiny_config(tmp_path, *shapes), recompute)
    assert estimated is not None
    assert measured < estimated < 1.75 * measured


def allocated_at_peak(folder: Path, size: int, recompute: bool | str, shapes: tuple[str, ...]) -> int:
    """Bytes of tensors at once during a step, by the profiler's record of every allocation."""
    overrides = (f"tokens.micro_batch_size={size}", f"parallelism.recompute_layer={recompute}")
    config = tiny_config(folder / f"{size}", *shapes, *overrides, "tokens.train_steps=1")
    gc.collect()  # runs of earlier tests, whose memory would count as freed here
    with torch.profiler.profile(profile_memory=True) as profile:
        train_quietly(config)
    events: list[Any] = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


# ---- what is said ------------------------------------------------------------------------------------------------


def test_a_model_that_fits_nowhere_near_is_told_which_stage_would(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *IN_BFLOAT16, "parallelism.dp=8")
    states = 18 * parameters_by_hand(128256, 4096, 14336, 32, 1024)
    assert round(states / GIB) == 135
    assert what_fits(config, 80 * GIB) == (
        "weights, gradients and optimizer state need 135 of 80 GiB a rank: try optimizer.zero_stage=1, or 2 times as "
        "many ranks along parallelism.tp or pp"
    )
    assert "try optimizer.zero_stage=3, or 6 times as many" in what_fits(config, 30 * GIB)
    assert "need 135 of 8 GiB a rank: try 21 times as many ranks along" in what_fits(config, 8 * GIB)


def test_the_largest_micro_batch_that_fits_is_named_with_the_same_batch(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *MEDIUM, "tokens.micro_batch_size=12", "tokens.batch_accumulation_per_replica=2")
    each = sequence_bytes(config, False)
    assert each is not None
    for fits, count in ((6, 4), (4, 6), (3, 8), (1, 24)):
        needed = state_bytes(config, 0) + fits * each
        said = what_fits(config, int(needed / 0.85 + GIB / 4 + 1e6))
        assert said.startswith(
            f"try tokens.micro_batch_size={fits} tokens.batch_accumulation_per_replica={count} (weights, gradients and "
            f"optimizer state need "
        )


@pytest.mark.slow
def test_layers_are_recomputed_when_no_single_sequence_fits(tmp_path: Path) -> None:
    layout = (*IN_BFLOAT16, "parallelism.dp=8", "optimizer.zero_stage=3")
    config = tiny_config(tmp_path, *layout, "tokens.micro_batch_size=1")
    why = " (weights, gradients and optimizer state need 15 of "
    assert what_fits(config, 60 * GIB).startswith(f"try parallelism.recompute_layer=elementwise{why}60 ")
    assert what_fits(config, 30 * GIB).startswith(f"try parallelism.recompute_layer=true{why}30 ")


def test_a_pipeline_that_keeps_all_micro_batches_is_told_of_the_schedule_that_does_not(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "parallelism.pp=2", "tokens.batch_accumulation_per_replica=8")
    assert what_fits(config, GIB) == (
        "try parallelism.pp_engine=1f1b, which keeps activations of 2 micro-batches, not of all"
    )


def test_half_is_tried_where_nothing_is_known(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "tokens.micro_batch_size=12")
    split = "or split the model: parallelism.tp, parallelism.pp, optimizer.zero_stage: 3"
    assert what_fits(config, None) == f"try tokens.micro_batch_size=6 tokens.batch_accumulation_per_replica=2; {split}"
    config = tiny_config(tmp_path, "tokens.micro_batch_size=1")
    assert what_fits(config, None) == f"try parallelism.recompute_layer=true; {split}"
    config = tiny_config(tmp_path, "tokens.micro_batch_size=1", "parallelism.recompute_layer=true")
    assert what_fits(config, None) == f"lower tokens.sequence_length, now 16, {split}"


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


def train_within(memory: int, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    arguments = ["train", str(tiny_yaml(folder)), *MEDIUM, "tokens.train_steps=2", *overrides, "--fresh"]
    command = [sys.executable, "-c", LIMITED, str(memory), *arguments]
    env = environment(folder)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel limits a process's memory")
@pytest.mark.parametrize("gib", [0.5, 1.0])
def test_a_run_that_is_out_of_memory_trains_with_what_is_advised(tmp_path: Path, gib: float) -> None:
    memory = int(gib * GIB)
    failed = train_within(memory, tmp_path, "tokens.micro_batch_size=64")
    assert failed.returncode == 1
    found = re.search(r"^error: out of memory \(.*\); try (tokens\S+ tokens\S+) \(weights", failed.stderr, re.MULTILINE)
    assert found is not None, failed.stderr
    advised = found[1].split()
    trained = train_within(memory, tmp_path, *advised)
    assert trained.returncode == 0, trained.stderr
    assert "step 2/2" in trained.stdout
