"""Which configs are one run, and what follows from several keys."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from kenotron.config import InputError, load, same_run_difference
from kenotron.config.resolved import resolved
from kenotron.config.runs import same_batch_overrides

FILES = ["data_stages.0.data.dataset={text_files: a}", "tokenizer.tokenizer_name_or_path=t"]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["tokens.train_steps=30"],
        ["general.run=other", "general.step=10", "general.consumed_train_samples=20"],
        ["general.hooks=[my.Hook]", "general.ignore_sanity_checks=false"],
        ["logging.log_dir=elsewhere", "logging.sample_prompts=[a]"],
        ["checkpoints.checkpoint_interval=3", "checkpoints.keep_last=2", "checkpoints.keep_every=100"],
        ["checkpoints.save_final_state=false", "checkpoints.checkpoints_path=moved"],
        ["checkpoints.checkpointing_engine=async", "checkpoints.writer=native"],
        ["checkpoints.local={path: /dev/shm/runs, interval: 5}"],
        ["checkpoints.resume_checkpoint_path=checkpoints"],
        ["checkpoints.resume_checkpoint_path=./checkpoints/10"],
        ["profiler={profiler_export_path: p}"],
        ["tokens.val_samples=5", "tokens.limit_val_batches=-1"],
        ["optimizer.zero_stage=3", "model.compile=true", "parallelism.recompute_layer=true"],
        ["parallelism={tp: 2, pp: 2, context_parallel_size: 2, tp_mode: ALL_REDUCE}"],
        ["tokens.micro_batch_size=1", "tokens.batch_accumulation_per_replica=2"],
        ["parallelism.dp=2", "tokens.micro_batch_size=1"],
        [
            """parallelism={dp: 2, dp_shard: 2, strategy: fsdp, cpu_offload: true, tp: 2, tp_mode: REDUCE_SCATTER,
                tp_linear_async_communication: true, tp_recompute_allgather: false, timeout_seconds: 60,
                context_parallel_size: 2, context_parallel_method: ulysses}""",
            *("tokens.micro_batch_size=1", "optimizer.zero_stage=null", "model.make_vocab_size_divisible_by=64"),
        ],
        [
            "parallelism={pp: 2, pp_engine: interleaved_1f1b, pp_stages_per_rank: 1, pp_layers: [1, 1]}",
            *("tokens.micro_batch_size=1", "tokens.batch_accumulation_per_replica=2", "optimizer.zero_stage=2"),
        ],
        ["data_stages.0.data.num_loading_workers=4", "model.ddp_bucket_cap_mb=1"],
        ["general.project=renamed", "optimizer.skip_nonfinite_steps=100"],
        ["model.kernels=torch", "model.model_config._attn_implementation=sdpa"],
        ["optimizer.optimizer_factory.torch_adam_is_fused=false"],
        ["data_stages.0.data.dataset.on_bad_document=skip"],
        ["tokens.val_check_interval=5", "tokens.limit_val_batches=2"],
    ],
)
def test_a_run_may_change_its_length_layout_and_what_it_reports(minimal: dict[str, Any], overrides: list[str]) -> None:
    assert same_run_difference(load(minimal, FILES), load(minimal, [*FILES, *overrides])) is None


@pytest.mark.parametrize("cache", ["there", "null"])
def test_the_answers_of_a_teacher_may_move(minimal: dict[str, Any], cache: str) -> None:
    saved = load(minimal, ["model.loss={name: distillation, teacher: t, top_k: 2, cache: here}"])
    assert same_run_difference(saved, load(saved, [f"model.loss.cache={cache}"])) is None


SCHEDULE = "optimizer.learning_rate_scheduler"
TEXT = {"on_bad_document": "error", "text_files": "a", "text_column_name": "text"}


@pytest.mark.parametrize(
    ("overrides", "difference"),
    [
        (["optimizer.weight_decay=0.1"], ("optimizer.weight_decay", 0.01, 0.1)),
        (["general.seed=1"], ("general.seed", 42, 1)),
        (["tokens.sequence_length=128"], ("tokens.sequence_length", 256, 128)),
        (["tokens.val_fraction=0.1"], ("tokens.val_fraction", 0.005, 0.1)),
        (["tokens.micro_batch_size=4"], ("tokens.micro_batch_size", 2, 4)),
        (["parallelism.dp=2"], ("parallelism.dp", 1, 2)),
        ([f"{SCHEDULE}.lr_decay_steps=5"], (f"{SCHEDULE}.lr_decay_steps", None, 5)),
        (["data_stages.0.data.seed=1"], ("data_stages.0.data.seed", 42, 1)),
        (["data_stages.0.data.dataset={tokens: b}"], ("data_stages.0.data.dataset", TEXT, {"tokens": "b"})),
        (["model.model_config.hidden_size=32"], ("model.model_config.hidden_size", 16, 32)),
        (["checkpoints.resume_checkpoint_path=another"], ("checkpoints.resume_checkpoint_path", None, "another")),
    ],
)
def test_another_run_is_reported_by_its_first_other_key(
    minimal: dict[str, Any], overrides: list[str], difference: tuple[str, Any, Any]
) -> None:
    assert same_run_difference(load(minimal, FILES), load(minimal, [*FILES, *overrides])) == difference


@pytest.mark.parametrize(
    ("micro", "accumulation", "dp", "expected"),
    [(8, 1, 2, (4, 1)), (2, 6, 4, (1, 3)), (4, 3, 1, (4, 3)), (3, 4, 2, (3, 2)), (6, 1, 2, (3, 1))],
)
def test_overrides_keep_the_global_batch_on_any_number_of_replicas(
    minimal: dict[str, Any], micro: int, accumulation: int, dp: int, expected: tuple[int, int]
) -> None:
    sizes = [f"tokens.micro_batch_size={micro}", f"tokens.batch_accumulation_per_replica={accumulation}"]
    saved = load(minimal, sizes)
    other = load(minimal, [*sizes, f"parallelism.dp={dp}", *same_batch_overrides(saved, dp)])
    assert (other.tokens.micro_batch_size, other.tokens.batch_accumulation_per_replica) == expected
    assert same_run_difference(saved, other) is None


def test_overrides_for_more_replicas_keep_a_ramp_of_whole_micro_batches(minimal: dict[str, Any]) -> None:
    """A step of 12 samples on two replicas: three micro-batches of 2 each, where 4 would not come out."""
    ramp = "data_stages.0.batch_size_ramp={start: 8, increment: 4, samples: 40}"
    saved = load(minimal, ["tokens.micro_batch_size=4", "tokens.batch_accumulation_per_replica=4", ramp])
    assert same_batch_overrides(saved, 2) == ["tokens.micro_batch_size=2", "tokens.batch_accumulation_per_replica=4"]
    other = load(saved, ["parallelism.dp=2", *same_batch_overrides(saved, 2)])
    assert same_run_difference(saved, other) is None


def test_replicas_that_do_not_divide_the_global_batch_are_refused(minimal: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"parallelism\.dp: expected a divisor of the global batch of 2, found 3"):
        same_batch_overrides(load(minimal), 3)


def test_a_longer_run_keeps_a_schedule_that_was_written_out(minimal: dict[str, Any]) -> None:
    schedule = load(minimal).optimizer.learning_rate_scheduler
    assert (schedule.decay_start, schedule.final_lr) == (2, 3e-4)
    assert [schedule.decay_steps(steps) for steps in (15, 30, 1)] == [13, 28, 0]
    late = load(minimal, ["optimizer.learning_rate_scheduler.lr_decay_starting_step=10"])
    assert late.optimizer.learning_rate_scheduler.decay_steps(15) == 5
    fixed = load(minimal, ["optimizer.learning_rate_scheduler.lr_decay_steps=4"])
    assert fixed.optimizer.learning_rate_scheduler.decay_steps(100) == 4


@pytest.mark.parametrize(
    ("interval", "limit", "validates"), [(-1, 5, False), (5, 0, False), (5, 1, True), (5, -1, True)]
)
def test_validation_needs_an_interval_and_batches(minimal: Any, interval: int, limit: int, validates: bool) -> None:
    overrides = [f"tokens.val_check_interval={interval}", f"tokens.limit_val_batches={limit}"]
    assert load(minimal, overrides).tokens.validates is validates


def test_a_tilde_is_the_home_folder_in_every_path(minimal: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    paths = ["checkpoints.resume_checkpoint_path", "logging.log_dir", "tokenizer.tokenizer_name_or_path"]
    assert load(minimal, ["checkpoints.checkpoints_path=~/x"]).checkpoints.checkpoints_path == "/home/someone/x"
    sections = ["model={init_method: {path: ~/x}, model_config: {hf: ~/x}}"]
    sections += ["profiler={profiler_export_path: ~/x, skip_first: 0}"]
    sections += ["data_stages.0.data.dataset={text_files: [~/x, ~other, a~b, x]}"]
    config = load(minimal, [*(f"{path}=~/x" for path in paths), *sections])
    for path in [*paths, "model.init_method.path", "model.architecture.hf", "profiler.profiler_export_path"]:
        found: Any = config
        for name in path.split("."):
            found = getattr(found, name)
        assert found == "/home/someone/x", path
    assert config.data_stages[0].data.dataset.text_files[::3] == ["/home/someone/x", "x"]  # type: ignore[union-attr]
    mapped = load(minimal, ["data_stages.0.data.dataset={text_files: {~/x: 2}}", "tokenizer.tokenizer_name_or_path=t"])
    assert mapped.data_stages[0].data.dataset.text_files == {"/home/someone/x": 2}  # type: ignore[union-attr]


def test_a_config_that_an_earlier_version_resolved_is_the_same_run() -> None:
    """Its checkpoints name keys with their defaults that the schema has no more, such as `lighteval: null`."""
    folder = Path(__file__).parent
    saved = yaml.safe_load((folder / "resolved_before_unserved.yaml").read_text(encoding="utf-8"))
    assert saved["lighteval"] is None
    assert saved["parallelism"]["expert_parallel_size"] == 1
    saved["checkpoints"]["local"] = {"path": "/dev/shm/runs", "interval": 5, "copy_to_next_machine": False}
    assert same_run_difference(resolved(saved), load(folder / "run_before_unserved.yaml"), 5) is None
