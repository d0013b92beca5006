"""Every older form of the schema loads, and says so in one line per upgraded key."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from kenotron.config import Config, InputError, fill_run_name, load, refuse_unsupported, to_dict
from kenotron.config.data_stages import NanosetDataset
from kenotron.config.optimizer import AdamW


def upgraded(source: Any) -> tuple[Config, list[str]]:
    lines: list[str] = []
    return load(source, report=lines.append), lines


def test_flat_adam_keys_move_into_the_factory(minimal: dict[str, Any]) -> None:
    del minimal["optimizer"]["optimizer_factory"]
    minimal["optimizer"] |= {"adam_eps": 1e-6, "adam_beta1": 0.8, "adam_beta2": 0.9, "torch_adam_is_fused": False}
    config, lines = upgraded(minimal)
    expected = AdamW(adam_eps=1e-6, adam_beta1=0.8, adam_beta2=0.9, torch_adam_is_fused=False)
    assert config.optimizer.optimizer_factory == expected
    assert len(lines) == 4
    assert lines[0] == "optimizer.adam_eps is now optimizer.optimizer_factory.adam_eps"


def test_a_flat_adam_key_beside_the_same_in_the_factory_is_an_error(minimal: dict[str, Any]) -> None:
    minimal["optimizer"]["optimizer_factory"]["adam_eps"] = 1e-8
    minimal["optimizer"]["adam_eps"] = 1e-6
    with pytest.raises(InputError, match="adam_eps is also set in optimizer"):
        load(minimal)


def test_a_precision_that_is_none_or_contradicts_is_one_line(minimal: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"precision: expected one of 32, .* found bf16-mixd; did you mean"):
        load(minimal | {"precision": "bf16-mixd"})
    minimal["model"]["dtype"] = "float32"
    with pytest.raises(InputError, match=r"precision 16-mixed sets float16, but model.dtype is float32; remove one"):
        load(minimal | {"precision": "16-mixed"})
    minimal["model"].pop("dtype")
    minimal["optimizer"].pop("accumulate_grad_in_fp32")
    with pytest.raises(InputError, match=r"expected true with model\.dtype float16"):
        load(minimal | {"precision": "16-true"})


def test_a_precision_lies_over_what_came_before(minimal: dict[str, Any], write: Callable[[str], Path]) -> None:
    """A later file's over an earlier one's keys, and an override over all files."""
    minimal["model"]["dtype"] = "float32"
    path = write(yaml.safe_dump(minimal))
    other = path.parent / "precision.yaml"
    other.write_text("precision: bf16-mixed\n")
    for overrides, expected in (
        ([str(other)], ("bfloat16", True)),
        (["precision=bf16-true"], ("bfloat16", False)),
        ([str(other), "precision=32", "model.dtype=bfloat16"], ("bfloat16", True)),
    ):
        config = load(path, overrides)
        assert (config.model.dtype, config.optimizer.accumulate_grad_in_fp32) == expected, overrides


@pytest.mark.parametrize(
    ("second", "key", "value"),
    [
        ("optimizer: {optimizer_factory: {name: sgd, momentum: 0.5}}", "name", "sgd"),
        ("optimizer: {optimizer_factory: {name: adamW, adam_eps: 0.5}}", "adam_eps", 0.5),
        ("model: {init_method: {path: x}}", "path", "x"),
        ("model: {init_method: {scaling_method: NONE}}", "std", 0.025),
    ],
)
def test_a_later_file_may_choose_another_variant(
    minimal: dict[str, Any], write: Callable[[str], Path], second: str, key: str, value: object
) -> None:
    """Without keys of the one before; and of the same variant keys are joined."""
    minimal["optimizer"]["optimizer_factory"] = {"name": "adamW", "adam_beta1": 0.5}
    path = write(yaml.safe_dump(minimal))
    (path.parent / "second.yaml").write_text(second)
    config = load(path, [str(path.parent / "second.yaml")])
    section: Any = config.model.init_method if "init" in second else config.optimizer.optimizer_factory
    assert getattr(section, key) == value
    assert getattr(section, "adam_beta1", 0.5) == 0.5


@pytest.mark.parametrize("inside_a_mixture", [False, True])
def test_a_map_of_folders_becomes_folders_and_weights(minimal: dict[str, Any], inside_a_mixture: bool) -> None:
    old = {"dataset_folder": {"a": 3, "b": 0.5}}
    dataset = {"mixture": [old | {"weight": 1.0}]} if inside_a_mixture else old
    minimal["data_stages"][0]["data"]["dataset"] = dataset
    config, lines = upgraded(minimal)
    found = config.data_stages[0].data.dataset
    found = found.mixture[0] if inside_a_mixture else found  # type: ignore[union-attr]
    assert isinstance(found, NanosetDataset)
    assert (found.folders, found.dataset_weights) == (["a", "b"], [3.0, 0.5])
    assert lines == ["dataset_folder {folder: weight} is now dataset_folder and dataset_weights"]


# Datasets as nanotron's, Kénotron's and Gapetron's documents and examples write them.
FOLDERS, BOTH = "dataset_folder: [datasets/a, datasets/b]", ["datasets/a", "datasets/b"]
SEEDS = {
    "nothing": ("null", None),
    "a folder": ("{dataset_folder: datasets/a}", (["datasets/a"], None)),
    "folders": (f"{{{FOLDERS}}}", (BOTH, None)),
    "a map": ("{dataset_folder: {datasets/a: 0.8, datasets/b: 0.2}}", (BOTH, [0.8, 0.2])),
    "weights": (f"{{{FOLDERS}, dataset_weights: [8, 2]}}", (BOTH, [8, 2])),
    "local copies": (f"{{{FOLDERS}, dataset_read_path: [/scratch/a, /scratch/b]}}", (BOTH, None)),
    "caps": (f"{{{FOLDERS}, dataset_max_tokens: [1000, 2000]}}", (BOTH, None)),
    "all of nanotron's": (
        """{dataset_folder: [datasets/a], dataset_weights: [1.0], dataset_read_path: null, tokenizer_name: gpt2,
        vocab_size: 256, token_size_in_bytes: 2, return_positions: false, skip_in_stream: true, shuffle_files: true,
        pad_samples_to_global_batch_size: true, dataset_max_tokens: null, use_old_brrr_dataloader: true}""",
        (["datasets/a"], [1.0]),
    ),
    "rows": (
        """{hf_dataset_or_datasets: {org/a: 1.0, org/b: 0.1}, hf_dataset_splits: null, hf_dataset_config_name: null,
        dataset_processing_num_proc_per_process: 12, dataset_overwrite_cache: false, text_column_name: null}""",
        None,
    ),
    "prompts": ("{hf_dataset_or_datasets: org/a, sft_dataloader: true, debug_max_samples: null}", None),
    "Gapetron's mix": ("{tokens: mix.json}", None),
}


@pytest.mark.parametrize("form", SEEDS)
def test_every_dataset_of_the_seeds_loads_unchanged(form: str, minimal: dict[str, Any]) -> None:
    text, expected = SEEDS[form]
    minimal["data_stages"][0]["data"] = {"dataset": yaml.safe_load(text), "seed": None, "num_loading_workers": 4}
    minimal["tokenizer"] = {"tokenizer_name_or_path": "gpt2"}
    config, lines = upgraded(minimal)
    refuse_unsupported(config)
    assert len(lines) == (form == "a map")
    dataset = config.data_stages[0].data.dataset
    assert isinstance(dataset, NanosetDataset) == (expected is not None)
    if isinstance(dataset, NanosetDataset):
        assert (dataset.folders, dataset.dataset_weights) == expected
    assert load(to_dict(config)) == config


def test_data_without_stages_becomes_one_stage(minimal: dict[str, Any]) -> None:
    del minimal["data_stages"]
    minimal["data"] = {"dataset": None, "seed": 6, "num_loading_workers": 2}
    config, lines = upgraded(minimal)
    (stage,) = config.data_stages
    assert (stage.start_training_step, stage.data.seed, stage.data.num_loading_workers) == (1, 6, 2)
    assert len(lines) == 1


def test_moe_layer_recompute_is_ignored_with_a_message(minimal: dict[str, Any]) -> None:
    minimal["parallelism"] = {"dp": 1, "pp": 1, "tp": 1, "moe_layer_recompute": True}
    lines = upgraded(minimal)[1]
    assert len(lines) == 1
    assert "moe_layer_recompute is ignored" in lines[0]


@pytest.mark.parametrize("beside", [{}, {"rope_interleaved": True}])
def test_interleaved_rotary_is_rope_interleaved(minimal: dict[str, Any], beside: dict[str, Any]) -> None:
    minimal["model"]["model_config"] |= {"interleaved_rotary": True} | beside
    config, lines = upgraded(minimal)
    assert config.model.decoder.model_dump()["rope_interleaved"] is True
    assert lines == ["model.model_config.interleaved_rotary is now model.model_config.rope_interleaved"]


def test_interleaved_rotary_beside_another_rope_interleaved_is_an_error(minimal: dict[str, Any]) -> None:
    minimal["model"]["model_config"] |= {"interleaved_rotary": True, "rope_interleaved": False}
    with pytest.raises(InputError, match=r"interleaved_rotary is also set in model\.model_config\.rope_interleaved"):
        load(minimal)


QWEN = "model:\n  init_method: {std: 0.02}\n  model_config:\n    is_qwen2_config: true\n"


@pytest.mark.parametrize("last", ["null", "{num_experts: 4}"])
def test_of_two_moe_configs_the_last_counts_as_in_nanotron(minimal: Any, write: Any, last: str) -> None:
    del minimal["model"]
    first = "{num_experts: 8}" if last == "null" else "null"
    keys = f"    moe_config: {first}\n    hidden_size: 16\n    moe_config: {last}\n"
    shapes = "    num_attention_heads: 2\n    num_hidden_layers: 1\n    intermediate_size: 32\n    vocab_size: 64\n"
    path = write(QWEN + keys + shapes + yaml.safe_dump(minimal))
    config, lines = upgraded(path)
    assert lines == [f"{path}:7: duplicate key 'moe_config' (first on line 5); the last one counts"]
    assert config.model.decoder.experts == (0 if last == "null" else 4)


def test_document_masking_beside_nanotrons_shapes_is_the_models(minimal: Any, write: Callable[[str], Path]) -> None:
    del minimal["model"]
    path = write(QWEN + "    _use_doc_masking: true\n" + yaml.safe_dump(minimal))
    config, lines = upgraded(path)
    assert config.model.document_masking
    assert lines == [f"{path}:5: model.model_config._use_doc_masking is now model.document_masking"]
    path.write_text(path.read_text().replace("std: 0.02}", "std: 0.02}\n  document_masking: false"))
    with pytest.raises(InputError, match=r"_use_doc_masking is true and .* false"):
        load(path)


def test_a_key_that_is_repeated_is_read_as_pyyaml_reads_it(minimal: Any, write: Callable[[str], Path]) -> None:
    stages = minimal.pop("data_stages")
    other = [stages[0] | {"name": "last"}]
    path = write("".join(map(yaml.safe_dump, ({"data_stages": stages}, minimal, {"data_stages": other}))))
    config, lines = upgraded(path)
    assert [stage.name for stage in config.data_stages] == ["last"]
    line = path.read_text().splitlines().index("data_stages:", 1) + 1
    assert lines == [f"{path}:{line}: duplicate key 'data_stages' (first on line 1); the last one counts"]


@pytest.mark.parametrize(
    ("granularity", "layer", "said"),
    [
        (None, False, []),
        ("FULL", True, ["parallelism.recompute_granularity FULL is now parallelism.recompute_layer: true"]),
        (
            "selective",
            False,
            ["parallelism.recompute_granularity SELECTIVE is left out: no kernel keeps the scores of"],
        ),
    ],
)
def test_keys_of_the_first_releases_of_nanotron(
    minimal: dict[str, Any], tmp_path: Path, granularity: str | None, layer: bool, said: list[str]
) -> None:
    minimal["parallelism"] = {"recompute_granularity": granularity}
    minimal["general"] |= {"kill_switch_path": str(tmp_path / "stop"), "benchmark_csv_path": None}
    minimal["general"].pop("seed", None)
    minimal["benchmark_csv_path"] = "benchmark.csv"
    minimal["model"]["init_method"] = {"std": 0.02, "seed": 7}
    minimal["data_stages"][0]["data"]["dataset"] = {"dataset_path": ["a.npy", "b.npy"]}
    config, lines = upgraded(minimal)
    assert config.parallelism.recompute_layer is layer
    assert (config.general.benchmark_csv_path, config.general.seed) == ("benchmark.csv", 7)
    assert config.general.kill_switch_path == str(tmp_path / "stop")
    assert [dataset.tokens for dataset in config.datasets] == [["a.npy", "b.npy"]]  # type: ignore[union-attr]
    moved = ["benchmark_csv_path is now general.benchmark_csv_path", "model.init_method.seed is now general.seed"]
    for line, start in zip(lines, [*said, *moved, "data_stages.0.data.dataset.dataset_path is now "], strict=True):
        assert line.startswith(start)


def test_a_granularity_that_nanotron_does_not_have(minimal: dict[str, Any]) -> None:
    minimal["parallelism"] = {"recompute_granularity": "some"}
    with pytest.raises(InputError, match="recompute_granularity: expected FULL, SELECTIVE or null, found 'some'"):
        load(minimal)


LIGHTEVAL = """{batch_size: 16, checkpoints_path: null, wandb: null,
    logging: {local_output_path: logs, push_results_to_tensorboard: true}, parallelism: {dp: 2, pp: 1, tp: 2},
    tasks: {max_samples: 1000, dataset_loading_processes: 8, custom_tasks: null}}"""
EARLY = "hellaswag winogrande piqa social_iqa openbookqa arc_easy arc_challenge commonsense_qa mmlu"


@pytest.mark.parametrize(
    ("text", "tasks", "examples"),
    [
        ("lighteval|hellaswag|0|0", ["hellaswag"], 0),
        ("lighteval|arc:easy|5|1, leaderboard|mmlu:abstract_algebra|5|0", ["arc_easy", "mmlu_abstract_algebra"], 5),
        ("custom|siqa|3|1,lighteval|early-signal|3|0", ["social_iqa", *EARLY.split()], 3),
    ],
)
def test_nanotrons_lighteval_becomes_evaluation(
    minimal: dict[str, Any], text: str, tasks: list[str], examples: int | None
) -> None:
    minimal["tokenizer"] = {"tokenizer_name_or_path": "a/b"}
    section = yaml.safe_load(LIGHTEVAL)
    section["tasks"]["tasks"] = text
    config, (line,) = upgraded(minimal | {"lighteval": section})
    harness = "evaluation, by lm-evaluation-harness in a process of its own"
    assert line == f"lighteval is now {harness}; left out: logging, parallelism"
    evaluation = {"tasks": tasks, "num_fewshot": examples, "limit": 1000, "batch_size": 16}
    assert config == load(minimal | {"evaluation": evaluation})


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ({"tasks": "a|b|0|0,a|c|5|0"}, "lighteval.tasks.tasks: expected one number for all tasks, found 0, 5 examples"),
        ({"tasks": "a", "custom_tasks": "my.tasks"}, "custom_tasks my.tasks: expected evaluation.include_path instead"),
    ],
)
def test_lighteval_that_has_no_equal(minimal: dict[str, Any], tasks: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said.replace(".", r"\.")):
        load(minimal | {"lighteval": {"tasks": tasks}})
    if "custom_tasks" not in tasks:
        return
    with pytest.raises(InputError, match="lighteval and evaluation are both set; remove one of them"):
        load(minimal | {"lighteval": {"tasks": {"tasks": "a"}}, "evaluation": {"tasks": ["a"]}})


def test_an_error_in_an_upgraded_key_names_the_line_where_it_was_written(write: Callable[[str], Path]) -> None:
    path = write("data:\n  dataset: null\n  sed: 3\n")
    with pytest.raises(InputError) as caught:
        load(path, report=lambda line: None)
    assert f"{path}:3: unknown key 'data_stages.0.data.sed'; did you mean 'seed'?" in str(caught.value)


@pytest.mark.parametrize(
    ("run", "filled"),
    [
        (None, "20261120_134953_777"),
        ("tiny_%date_%jobid", "tiny_20261120_134953_777"),
        ("%jobid-%jobid", "777-777"),
        ("%date and %date", "20261120_134953 and 20261120_134953"),
        ("plain", "plain"),
    ],
)
def test_every_placeholder_is_filled_once(minimal: dict[str, Any], run: str | None, filled: str) -> None:
    minimal["general"]["run"] = run
    config = load(minimal)
    assert config.general.run == (run or "%date_%jobid")
    now = datetime(2026, 11, 20, 13, 49, 53)
    named = fill_run_name(config, now, "777")
    assert named.general.run == filled
    assert fill_run_name(named, datetime(1999, 1, 1), None) == named
    assert "local" in fill_run_name(load(minimal, ["general.run=%jobid"]), now, None).general.run


def test_nanotrons_nulls_mean_its_defaults(minimal: dict[str, Any]) -> None:
    minimal["general"]["seed"] = None
    minimal["model"]["dtype"] = None
    minimal["parallelism"] = yaml.safe_load("""{dp: 1, pp: 1, tp: 1, pp_engine: null, tp_mode: reduce_scatter,
        tp_linear_async_communication: null}""")
    minimal["logging"] = {"log_level": None, "log_level_replica": None}
    minimal |= {"profiler": None, "lighteval": None, "s3_upload": None, "tokenizer": None, "metrics_logging": None}
    config = load(minimal)
    assert (config.general.seed, config.model.dtype, config.logging.log_level) == (42, "bfloat16", "info")
    assert (config.parallelism.pp_engine, config.parallelism.tp_mode) == ("afab", "REDUCE_SCATTER")


def test_datastates_at_the_top_level_belongs_to_checkpoints(minimal: dict[str, Any]) -> None:
    """As in the README and the example of the first Kénotron."""
    minimal["checkpoints"]["checkpointing_engine"] = "datastates"
    minimal["datastates"] = {"host_cache_size": 8, "parser_threads": 1, "pin_host_cache": False}
    config, lines = upgraded(minimal)
    engine = config.checkpoints.datastates
    assert (engine.host_cache_size, engine.parser_threads, engine.pin_host_cache) == (8, 1, False)
    assert lines == ["datastates is now checkpoints.datastates"]
    with pytest.raises(InputError, match=r"checkpointing_engine: expected datastates, which checkpoints\.datastates"):
        load(minimal, ["checkpoints.checkpointing_engine=async"])


def test_the_embedding_has_its_name_of_here(minimal: dict[str, Any]) -> None:
    """The YAML files that SmolLM3 was trained with exclude it from weight decay."""
    minimal["optimizer"]["weight_decay_exclude_named_params"] = [".*norm.*", ".*token_embedding.*"]
    config, lines = upgraded(minimal)
    assert config.optimizer.weight_decay_exclude_named_params == [".*norm.*", ".*embed_tokens.*"]
    assert lines == ["optimizer.weight_decay_exclude_named_params: token_embedding is now embed_tokens"]
    minimal["optimizer"]["weight_decay_exclude_named_params"] = [".*token_embedding.*"]
    minimal["model"]["model_config"] = {"module": "torch.nn.Identity", "args": {}, "vocab_size": 5}
    config, lines = upgraded(minimal)
    assert (config.optimizer.weight_decay_exclude_named_params, lines) == ([".*token_embedding.*"], [])


@pytest.mark.parametrize("own", ["checkpoints", "s3://bucket/run"])
def test_a_run_that_resumes_from_itself_needs_no_key(minimal: dict[str, Any], own: str) -> None:
    """nanotron's YAML of `s3_upload` names its own bucket, which is empty when it first starts."""
    minimal["checkpoints"] |= {"checkpoints_path": "checkpoints", "resume_checkpoint_path": own}
    minimal["s3_upload"] = {"upload_s3_path": "s3://bucket/run", "remove_after_upload": False}
    config, lines = upgraded(minimal)
    assert config.checkpoints.resume_checkpoint_path is None
    assert lines == ["a run resumes from its own checkpoints; checkpoints.resume_checkpoint_path ignored"]
    elsewhere = load(minimal, ["checkpoints.checkpoints_path=other", "s3_upload=null"])  # starts from the file's
    assert elsewhere.checkpoints.resume_checkpoint_path == own
    minimal["checkpoints"]["resume_checkpoint_path"] = f"{own}/10"
    config, lines = upgraded(minimal)
    assert (config.checkpoints.resume_checkpoint_path, lines) == (f"{own}/10", [])
