"""What the planner predicts is what real ranks hold, and what formulas say; on GPUs, by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from kenotron.config import Config, load
from kenotron.config.errors import InputError
from kenotron.planner import verdict
from kenotron.planner.hardware import GPUS
from kenotron.planner.ledger import Peak
from kenotron.planner.memory import RankPlan, first_ranks, plan_memory
from kenotron.planner.planning import plan_run
from kenotron.planner.verdict import nearest_that_fits
from support.plans import allocated, config_of, measure, predict
from support.ranks import run_ranks
from support.tiny_run import REPOSITORY, tiny_config, train_quietly

# Of every family, axis, engine, stage, optimizer and kind of recomputation; quick tests take some of them.
QUICK = ("llama|dp=2 zero=3", "llama|pp=2 engine=interleaved_1f1b accum=4")
CASES = (
    "llama|dp=1 accum=1",
    "llama|dp=1 accum=1|tokens.sequence_length=2048",  # several blocks of rows in norms, MLPs and the loss
    "llama|dp=1 recompute=true",
    "llama|dp=1 recompute=selective",
    "llama|dp=1 recompute=elementwise",
    "llama|dp=1|model.dtype=bfloat16",
    "llama|dp=1|optimizer.optimizer_factory={name: sgd}",
    "llama|dp=1|optimizer.optimizer_factory={name: lion}",
    "llama|dp=1|optimizer.optimizer_factory={name: muon}",
    "llama|dp=2 zero=1|optimizer.optimizer_factory={name: soap}",
    "llama|dp=2 zero=0",
    "llama|dp=2 zero=1|model.dtype=bfloat16",
    "llama|tp=2 recompute=selective",
    "llama|dp=2 zero=2",
    "llama|dp=2 zero=3 recompute=true|model.dtype=bfloat16",
    "llama|dp=2 zero=1|optimizer.optimizer_factory={name: muon}",
    "llama|dp=2 zero=3|optimizer.optimizer_factory={name: muon}",
    "llama|dp=2 shard=1 zero=3",
    "llama|dp=4 shard=2 zero=3",
    "mixtral|dp=1",
    "llama|tp=2",
    "llama|tp=2 mode=ALL_REDUCE async=false",
    "llama|tp=4|model.dtype=bfloat16",
    "llama|tp=2 dp=2 zero=1",
    "llama|tp=2 dp=2 zero=3",
    "llama|pp=2 engine=afab accum=4",
    "llama|pp=2 engine=1f1b accum=8",
    "llama|pp=2 engine=interleaved_zero_bubble accum=8",
    "llama|pp=2 engine=zbv_zero_bubble accum=8",
    "llama|pp=2 engine=dualpipev accum=8",
    "llama|pp=4 engine=1f1b accum=16",
    "llama|pp=2 dp=2 zero=1 engine=1f1b accum=4",
    "llama|pp=2 tp=2 engine=1f1b accum=4",
    "llama|cp=2",
    "llama|cp=2 method=allgather",
    "llama|cp=2 method=ulysses",
    "llama|cp=2 dp=2 zero=3",
    "mistral|dp=2 zero=1",
    "qwen2|tp=2",
    "olmo2|dp=2 zero=3",
    "qwen3|tp=2",
    "smollm3|dp=1",
    "starcoder2|tp=2",
    "gpt_neox|dp=2 zero=1",
    "nano|dp=2 zero=1",
    "nano_with_value_embeddings|pp=2 engine=1f1b",
    "mamba|dp=1",
    "mamba|tp=2",
    "mamba2|tp=2|model.model_config.expand=1",
    "mamba2_in_groups|dp=2 zero=3|model.model_config.expand=1",
    "nemotron_h|tp=2",
    "nemotron_h|pp=2 engine=1f1b accum=4",
    "nemotron_h|dp=2 zero=3",
    "mixtral|pp=2 engine=1f1b",
    "mixtral|dp=2 zero=3",
    "mixtral|dp=2 zero=3|model.model_config.num_local_experts=3",
    "olmoe|dp=2 zero=1",
    "qwen2_moe|dp=2 zero=3",
    "qwen3_moe|tp=2",
    "deepseek_v3|dp=1",
    "deepseek_v3|dp=2 zero=1",
    "nemotron_h_of_experts|dp=2 zero=1",
)


@pytest.mark.budget(10, reason="trains on ranks, and plans each")
@pytest.mark.cases(slow=4)
@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in CASES)])
def test_the_peak_of_a_step_is_that_of_real_ranks(case: str) -> None:
    """Every storage of torch's counted, on every rank; worst allowed: 0.5%."""
    ranks = config_of(case).parallelism.world_size
    measured = run_ranks(ranks, measure, case)
    for (peak, between), (real_peak, real_between) in zip(predict(case), measured, strict=True):
        assert peak == pytest.approx(real_peak, rel=0.005)
        assert between == pytest.approx(real_between, rel=0.0001)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["mixtral", "nemotron_h_of_experts"])
def test_over_ranks_of_experts_the_mean_is_that_of_real_ranks(family: str) -> None:
    """Which rank gets more tokens than another depends on the data: for the planner all get as many."""
    case = f"{family}|dp=2 ep=2"
    measured = [peak for peak, _ in run_ranks(2, measure, case)]
    assert sum(peak for peak, _ in predict(case)) == pytest.approx(sum(measured), rel=0.03)


@pytest.mark.budget(25, reason="three plans")
def test_a_plan_takes_as_long_for_fifty_thousand_ranks_as_for_two() -> None:
    config = config_of("llama|dp=2 zero=1|model.dtype=bfloat16")
    seconds = []
    for ranks in (2, 2, 50_000):  # at first modules are imported
        begun = time.monotonic()
        plan_memory(load(config, [f"parallelism.dp={ranks}"]), GPUS["h100"], [0])
        seconds.append(time.monotonic() - begun)
    assert seconds[2] < 2 * seconds[1] + 5


@pytest.mark.budget(20, reason="two plans")
def test_a_plan_for_a_cpu_takes_as_long_for_large_micro_batches() -> None:
    """Kernels loop over blocks of rows; a hundred times as many are not followed one by one."""
    config = config_of("llama|dp=1 accum=1")
    small, large = (load(config, [f"tokens.micro_batch_size={count}"]) for count in (2_000, 200_000))
    (few,) = plan_memory(small, None)
    begun = time.monotonic()
    (many,) = plan_memory(large, None)
    assert time.monotonic() - begun < 60
    assert many.peak.bytes == pytest.approx(100 * few.peak.bytes, rel=0.02)


ON_RANKS = (
    "llama|dp=2 zero=3",
    "llama|tp=2",
    "llama|pp=2 engine=1f1b accum=8",
    "llama|cp=2",
    "mixtral|pp=2 engine=1f1b",
)


@pytest.mark.budget(12, reason="torch reports each token of a scan")
@pytest.mark.parametrize(
    "case", ["mamba|dp=1|tokens.sequence_length=8", *(pytest.param(case, marks=pytest.mark.slow) for case in ON_RANKS)]
)
def test_torchs_allocator_says_the_same(case: str) -> None:
    """It sees what operators allocate inside them, too; `benchmarks/plan_proof.py` compares all cases."""
    ranks = config_of(case).parallelism.world_size
    measured = run_ranks(ranks, allocated, case, 1 if ranks == 1 else 8)
    assert [peak for peak, _ in predict(case)] == pytest.approx(measured, rel=0.005)


MUON = "optimizer.optimizer_factory={name: muon}"


def planned_checkpoint(config: Config) -> int:
    saved = plan_run(config, lambda overrides: config, None, None).saved
    assert saved is not None
    return saved


def test_a_checkpoint_is_as_large_as_planned(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "model.model_config.vocab_size=61", "optimizer.ema_decay=0.9")
    train_quietly(config)
    indexes = [json.loads(path.read_text()) for path in (tmp_path / "checkpoints/3").rglob("index.json")]
    files = list((tmp_path / "checkpoints/3").rglob("*.safetensors"))
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in files)
    assert len(indexes) == 2
    assert sum(path.stat().st_size for path in files) - headers == planned_checkpoint(config)


@pytest.mark.budget(15, reason="plans two ranks")
@pytest.mark.parametrize(
    ("whole", "parts"),
    [
        pytest.param("mixtral|dp=1", "mixtral|pp=2 dp=2 ep=2 engine=1f1b accum=4", marks=pytest.mark.slow),
        (f"llama|dp=1|{MUON}", f"llama|tp=2 dp=2 zero=3|{MUON}"),
    ],
)
def test_a_checkpoint_is_as_large_on_every_layout(whole: str, parts: str) -> None:
    """On tp ranks the vocabulary is padded, with pp tied weights are on two stages."""
    assert planned_checkpoint(config_of(parts)) == planned_checkpoint(config_of(whole))


# ---- by hand -----------------------------------------------------------------------------------------------------


PARAMETERS = 2 * 64 * 16 + 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16) + 16  # of `tiny_config`'s Llama


@pytest.mark.parametrize(
    ("overrides", "bytes_of_a_parameter"),
    [
        ((), 4 + 8),
        (("model.dtype=bfloat16",), 4 + 8),
        (("parallelism.dp=4", "optimizer.zero_stage=1"), (4 + 8) / 4),
        (("parallelism.dp=4", "optimizer.zero_stage=3"), (4 + 8) / 4),
        (("optimizer.optimizer_factory={name: sgd, momentum: 0.9}",), 4 + 4),
    ],
)
def test_between_steps_are_weights_and_moments(
    tmp_path: Path, overrides: tuple[str, ...], bytes_of_a_parameter: float
) -> None:
    (plan,) = plan_memory(tiny_config(tmp_path, *overrides), None)
    assert plan.between_steps == pytest.approx(PARAMETERS * bytes_of_a_parameter, rel=0.03)


def test_what_is_kept_in_host_memory_is_not_in_a_gpus(tmp_path: Path) -> None:
    """Sharded weights, their gradients and moments: 16 bytes a parameter over four ranks."""
    layout = ("parallelism.dp=4", "optimizer.zero_stage=3", "parallelism.cpu_offload=true")
    (plan,) = plan_memory(tiny_config(tmp_path, *layout), GPUS["h100"])
    (whole,) = plan_memory(tiny_config(tmp_path, *layout[:2]), GPUS["h100"])
    assert not {"weights", "optimizer"} & plan.peak.of.keys()
    assert plan.between_steps < 0.01 * PARAMETERS
    assert whole.between_steps - plan.between_steps == pytest.approx(PARAMETERS * 12 / 4, rel=0.03)


def test_a_proxy_whose_reference_is_not_counted_is_refused() -> None:
    proxy = load(REPOSITORY / "examples/doremi/doremi.yaml", ["doremi.ref_model_resume_checkpoint_path=x"])
    with pytest.raises(InputError, match="the memory and time of a reference are not planned"):
        plan_memory(proxy, None)


LLAMA_8B = (
    "model.model_config.hidden_size=4096",
    "model.model_config.intermediate_size=14336",
    "model.model_config.num_attention_heads=32",
    "model.model_config.num_key_value_heads=8",
    "model.model_config.num_hidden_layers=4",  # of 32
    "model.model_config.vocab_size=128256",
    "model.model_config.max_position_embeddings=8192",
    "tokens.sequence_length=4096",
    "model.dtype=bfloat16",
)


def test_a_large_model_on_thousands_of_gpus(tmp_path: Path) -> None:
    """States by hand on 10,240 ranks."""
    layout = ("parallelism.dp=1280", "parallelism.tp=8", "optimizer.zero_stage=3", "tokens.micro_batch_size=1")
    config = tiny_config(tmp_path, *LLAMA_8B, *layout, "parallelism.recompute_layer=true")
    (plan,) = plan_memory(config, GPUS["h100"])
    # The first of 1,280 parts of the rows that tp leaves of each matrix: q, k, v, o, gate, up, down, two norms.
    layer = (1 + 1 + 1) * 4096 + 4 * 512 + (2 + 2) * 4096 + 4 * 1792 + 2 * 4
    share = 2 * 13 * 4096 + 4 * layer + 4  # 13 of the 16,032 rows of embedding and head
    assert plan.peak.of["weights"] == 4 * share
    assert plan.peak.of["optimizer"] == pytest.approx(8 * share, rel=0.001)


def test_attention_on_a_gpu_keeps_no_matrix_of_scores(tmp_path: Path) -> None:
    """As many tokens in sequences four times as long take as much: there is nothing quadratic."""
    longest = "model.model_config.max_position_embeddings=4096"
    peaks = []
    for length, count in ((1024, 4), (4096, 1)):
        batch = f"tokens.sequence_length={length}", f"tokens.micro_batch_size={count}"
        (plan,) = plan_memory(tiny_config(tmp_path, longest, *batch, "model.dtype=bfloat16"), GPUS["h100"])
        peaks.append(plan.peak.bytes)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.02)


def test_what_is_named_as_fitting_fits_on_every_stage(tmp_path: Path) -> None:
    """With afab the last stage is the largest, by its logits; with 1f1b the first one, by its activations."""
    peaks = {"afab": (90, 100), "1f1b": (80, 50)}

    def planned(config: Config, gpu: object, ranks: Sequence[int]) -> list[RankPlan]:
        engine, recomputes = config.parallelism.pp_engine, config.parallelism.recompute_layer is not False
        sizes = [peaks[engine][rank] // (1 + recomputes) for rank in ranks]
        return [
            RankPlan(rank, rank, Peak(size, {}, [], {}), 0, [], {}) for rank, size in zip(ranks, sizes, strict=True)
        ]

    def changed(overrides: list[str]) -> Config:
        return tiny_config(tmp_path, "parallelism.pp=2", "tokens.batch_accumulation_per_replica=4", *overrides)

    config = changed([])
    with patch.object(verdict, "plan_memory", planned):
        for usable, expected in ((90, "parallelism.pp_engine=1f1b"), (60, "parallelism.recompute_layer=elementwise")):
            found = nearest_that_fits(config, changed, None, planned(config, None, [0, 1]), usable, lambda line: None)
            assert found is not None
            assert found[-1] == expected
            assert all(plan.peak.bytes < usable for plan in planned(changed(found), None, [0, 1]))


def test_the_first_rank_of_every_stage_is_followed(tmp_path: Path) -> None:
    layout = ("parallelism.pp=2", "parallelism.dp=2", "tokens.batch_accumulation_per_replica=2")
    config = tiny_config(tmp_path, *layout)
    assert first_ranks(config) == [0, 2]
    assert [(plan.rank, plan.stage) for plan in plan_memory(config, None)] == [(0, 0), (2, 1)]
