"""Overrides reach every key; what is wrong is said in one line each: file, line, key, what was expected and found."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kenotron.config import Config, InputError, dump, load, to_dict
from kenotron.config.dotted import import_dotted, search_folder_of
from kenotron.config.model import ExistingCheckpointInit
from kenotron.config.warnings import warnings_of
from kenotron.config.writing import flatten
from support.config_strategies import configs, plain


def message(source: Any, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(InputError) as caught:
        load(source, overrides, report=lambda line: None)
    return str(caught.value)


def test_each_error_has_one_line_with_file_and_line(minimal: dict[str, Any], write: Callable[[str], Path]) -> None:
    text = dump(load(minimal))
    text = text.replace("train_steps: 15", "train_steps: abc").replace("  hidden_size:", "  hiden_size:", 1)
    text = text.replace("  std: 0.025", "  std: wide").replace("  project: debug\n", "")
    path, lines = write(text), text.splitlines()

    def at(start: str) -> str:
        return f"{path}:{next(i for i, line in enumerate(lines, 1) if line.strip().startswith(start))}"

    assert message(path).splitlines() == [
        f"{at('general')}: missing key 'general.project'",
        f"{at('hiden_size')}: unknown key 'model.model_config.hiden_size'; did you mean 'hidden_size'?",
        f"{at('std')}: model.init_method.std: expected a number, found 'wide'",
        f"{at('train_steps')}: tokens.train_steps: expected an integer, found 'abc'",
    ]


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        ([], []),
        (["tokens.val_check_interval=5", "tokens.limit_val_batches=1"], []),
        (["tokens.val_check_interval=5"], ["tokens.val_check_interval is 5, limit_val_batches 0: without both, it"]),
        (["tokens.limit_val_batches=-1"], ["tokens.val_check_interval is -1, limit_val_batches -1: without both, it"]),
    ],
)
def test_half_of_the_keys_of_validation_is_a_warning(minimal: Any, overrides: list[str], lines: list[str]) -> None:
    said = [line for line in warnings_of(load(minimal, overrides)) if "random tokens" not in line]
    assert [line.removesuffix(" never validates") for line in said] == lines


def test_a_misspelt_required_key_is_one_error_not_two(minimal: dict[str, Any]) -> None:
    minimal["tokens"]["train_step"] = minimal["tokens"].pop("train_steps")
    assert message(minimal) == "unknown key 'tokens.train_step'; did you mean 'train_steps'?"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("epochs=3", "tokens.train_steps"),
        ("parallelism.fsdp_degree=8", "optimizer.zero_stage=3"),
        ("optimizer.optimizer_factory=muon", "set optimizer.optimizer_factory.name=muon"),
    ],
)
def test_what_is_done_another_way_here_is_said(minimal: dict[str, Any], override: str, expected: str) -> None:
    said = message(minimal, (override,))
    assert expected in said
    assert "\n" not in said
    assert "did you mean" not in said


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("val_fraction", "tokens.val_fraction"),  # and not 'evaluation', which is spelt alike
        ("text_files", "data_stages.<i>.data.dataset.text_files"),  # and not that of tokens.val_datasets
        ("data_stages.0.dataset", "data_stages.<i>.data.dataset"),
        ("data_stages.0.data.trian_files", None),
    ],
)
def test_the_place_of_a_key_is_the_nearest_of_exactly_its_name(minimal: Any, name: str, ours: str | None) -> None:
    hint = f"; did you mean '{ours}'?" if ours else ""
    assert message(minimal, (f"{name}=1",)) == f"override {name}=1: unknown key '{name}'{hint}"


def test_a_misspelt_key_of_another_variant_gets_its_nearest_name(minimal: dict[str, Any]) -> None:
    minimal["data_stages"][0]["data"]["dataset"] = {"corpus": "python-stdlib"}
    name = "data_stages.0.data.dataset.text_file"
    assert message(minimal, (f"{name}=a",)) == f"override {name}=a: unknown key '{name}'; did you mean 'text_files'?"


def test_a_map_that_replaces_a_section_is_told_how_to_set_one_key(minimal: dict[str, Any]) -> None:
    minimal["general"] = {"project": "debug", "run": "a"}
    at = "override general={run: b}"
    hint = "a map replaces the whole section; general.KEY=VALUE sets one key of it"
    assert message(minimal, ("general={run: b}",)).splitlines() == [
        f"{at}: {hint}",
        f"{at}: missing key 'general.project'",
    ]
    del minimal["general"]
    assert message(minimal, ("general.run=b",)) == "override general.run=b: missing key 'general.project'"


def test_a_number_that_pyyaml_takes_for_text_is_a_number_in_a_file_and_explained_in_a_dict(
    minimal: dict[str, Any], tmp_path: Path
) -> None:
    text = yaml.safe_dump(minimal).replace("learning_rate: 0.0003", "learning_rate: 3e-4")
    (tmp_path / "my.yaml").write_text(text)
    assert load(tmp_path / "my.yaml").optimizer.learning_rate_scheduler.learning_rate == 3e-4
    said = message(yaml.safe_load(text))
    assert "expected a number, found '3e-4' (text, as PyYAML reads numbers without a dot: " in said


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("tokens.train_steps=true", "expected an integer, found true"),
        ("tokens.val_check_interval=0", "expected -1 (never) or a number of steps above 0, found 0"),
        ("optimizer.weight_decay=.nan", "expected a finite number, found nan"),
        ("general.run=2026", """expected text, found 2026 (write 'general.run="2026"')"""),  # the shell takes quotes
        ("model.model_config.rope_scaling={rope_type: foo}", "expected a rope_type among default, linear"),
        ("model.model_config.rope_scaling={rope_type: yarn}", "expected the key 'factor' beside rope_type: yarn"),
        ("optimizer.weight_decay_exclude_named_params=['(']", "expected a regular expression"),
    ],
)
def test_a_wrong_value_says_what_was_expected(minimal: dict[str, Any], override: str, expected: str) -> None:
    said = message(minimal, (override,))
    assert said.startswith(f"override {override}: ")
    assert expected in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.model_config.num_key_value_heads=3", "num_key_value_heads: expected a divisor of num_attention_heads"),
        ("model.model_config={hidden_size: 12, num_attention_heads: 4}", "hidden_size: expected an even hidden_size /"),
        ("tokens.val_samples=4", "tokens.limit_val_batches: expected -1 or a number above 0 with tokens.val_samples"),
        ("checkpoints.keep_every=4", "checkpoints.keep_last: missing"),
        (
            "checkpoints={keep_last: 1, keep_best: true, checkpoints_path: c, checkpoint_interval: 3}",
            "limit_val_batches: expected a validation, whose loss checkpoints.keep_best compares",
        ),
        ("parallelism.tp=3", "parallelism.tp: expected a divisor of num_attention_heads 4, found 3"),
        ("optimizer.learning_rate_scheduler.lr_decay_starting_step=1", "expected at least lr_warmup_steps 2, found 1"),
        ("optimizer.learning_rate_scheduler.lr_decay_style=step", "lr_step_size: missing"),
        ("profiler={profiler_export_path: p, skip_first: 20}", "expected tokens.train_steps of at least 23"),
        ("data_stages.0.start_training_step=2", "expected one stage that starts at 1, found 2"),
        ("data_stages.0.data.dataset={corpus: python-stdlib}", "tokenizer.tokenizer_name_or_path: missing"),
        ("tokenizer={train: {vocab_size: 300}}", "tokenizer.train: expected the first stage, 'all', to read text to"),
        ("tokenizer={train: {vocab_size: 300}, tokenizer_name_or_path: x}", "tokenizer.train: expected either"),
    ],
)
def test_sections_are_checked_against_each_other(minimal: dict[str, Any], override: str, expected: str) -> None:
    assert expected in message(minimal, (override,))


BF16 = ("model.dtype=bfloat16", "optimizer.accumulate_grad_in_fp32=false", "optimizer.stochastic_rounding=true")
WIDTHS = "hidden_size: 96, intermediate_size: 96, vocab_size: 64"
CP, RING = "parallelism.context_parallel_size", "ring splits a sequence into 8 parts; expected"
DYNAMIC = "model.model_config={rope_scaling: {rope_type: dynamic, factor: 2.0}, max_position_embeddings: 32}"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("parallelism.strategy=fsdp", "optimizer.zero_stage=2"), "fsdp means optimizer.zero_stage 3, but that is 2"),
        (("parallelism.dp=4", "parallelism.dp_shard=3"), "parallelism.dp_shard: expected a divisor of dp 4, found 3"),
        (
            ("parallelism={dp: 4, dp_shard: 2}", "optimizer.zero_stage=0"),
            "parallelism.dp_shard: expected a zero_stage above 0",
        ),
        ((f"{CP}=4", "tokens.sequence_length=20"), f"{RING} tokens.sequence_length to be a multiple of 8, found 20"),
        (
            ("parallelism={context_parallel_size: 2, tp: 4, context_parallel_method: ulysses}",),
            "num_attention_heads 4 / tp 4 = 1; expected a divisor of that, found 2",
        ),
        ((f"{CP}=2", DYNAMIC), f"{CP}: rope_scaling dynamic depends on the longest position of a batch"),
        (
            ("parallelism={tp: 4, tp_mode: REDUCE_SCATTER}", "tokens.sequence_length=9"),
            "parallelism.tp_mode: REDUCE_SCATTER splits the 18 tokens of a micro-batch over tp 4; expected a multiple "
            "of 4",
        ),
        (
            (f"{CP}=4", "data_stages.0.sequence_length=20"),
            f"{RING} data_stages.0.sequence_length to be a multiple of 8, found 20",
        ),
        (
            ("parallelism.tp=6", f"model.model_config={{num_attention_heads: 12, num_key_value_heads: 4, {WIDTHS}}}"),
            "parallelism.tp: expected a divisor or a multiple of num_key_value_heads 4, found 6",
        ),
        (
            (*BF16, "optimizer.optimizer_factory={name: lion}"),
            "stochastic_rounding: is for adamW; expected false, and accumulate_grad_in_fp32 true, with lion",
        ),
        (
            ("data_stages.0.data.dataset={text_files: t}", "tokenizer.train.vocab_size=300"),
            "tokenizer.train.vocab_size: expected at most the model's vocab_size 256, found 300",
        ),
        (("parallelism.pp=64",), "parallelism.pp: expected at most num_hidden_layers"),
        (("parallelism.pp=2", "parallelism.pp_layers=[1]"), "parallelism.pp_layers: expected 2 numbers of at least 1"),
        (("parallelism.pp=2", "parallelism.pp_stages_per_rank=2"), "expected 1 with pp_engine afab, found 2"),
    ],
)
def test_a_layout_is_checked_before_anything_starts(minimal: Any, overrides: tuple[str, ...], expected: str) -> None:
    assert expected in message(minimal, overrides)


@pytest.mark.parametrize(
    ("ramp", "expected"),
    [
        ("start: 6, increment: 8, samples: 9", "start: expected a multiple of "),
        (
            "start: 8, increment: 6, samples: 9",
            "increment: expected a multiple of tokens.micro_batch_size 2 x dp 2 = 4, found 6",
        ),
        ("start: 32, increment: 4, samples: 9", "start: expected fewer than the global batch of 32 samples, found 32"),
        (
            "start: 8, increment: 16, samples: 9",
            "increment: expected a divisor of 24, the global batch of 32 samples minus start 8, found 16",
        ),
        ("start: 8, increment: 8", "missing key 'data_stages.0.batch_size_ramp.samples'"),
        (
            "start: 12, increment: 4, samples: 9",
            "batch_size_ramp: expected a multiple of 2 micro-batches, which pp_engine interleaved_1f1b splits into 2 "
            "rounds of at least pp 2, found 5 in a step of 20 samples",
        ),
    ],
)
def test_a_ramp_that_does_not_come_out_is_reported_with_its_arithmetic(minimal: Any, ramp: str, expected: str) -> None:
    layout = (
        "parallelism={dp: 2, pp: 2, pp_engine: interleaved_1f1b, pp_stages_per_rank: 2}",
        "model.model_config.num_hidden_layers=4",
        *("tokens.micro_batch_size=2", "tokens.batch_accumulation_per_replica=8"),
    )
    assert expected in message(minimal, (*layout, f"data_stages.0.batch_size_ramp={{{ramp}}}"))


@pytest.mark.parametrize(("key", "value"), [("name", "all"), ("start_training_step", 1)])
def test_stages_have_names_and_starts_of_their_own(minimal: dict[str, Any], key: str, value: object) -> None:
    other = {"name": "other", "start_training_step": 5, "data": {"dataset": None}} | {key: value}
    minimal["data_stages"].append(other)
    assert message(minimal) == f"data_stages.1.{key}: expected a value that no other stage has, found {value!r} twice"


def test_stages_are_sorted_by_their_start(minimal: dict[str, Any]) -> None:
    minimal["data_stages"].insert(0, {"name": "late", "start_training_step": 5, "data": {"dataset": None}})
    assert [stage.start_training_step for stage in load(minimal).data_stages] == [1, 5]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ": expected a config, found nothing"),
        ("- a\n", ": expected a map of sections at the top"),
        ("a:\n\tb: 1\n", ":2: not valid YAML: while scanning for the next token found character '\\t' that cannot"),
        ("a:\n  b:1\n  c: 2\n", ":3: not valid YAML: mapping values are not allowed here; is a space missing after a"),
        ("a: !!python/object:os.system x\n", ":1: expected plain YAML, found the tag"),
        ("1: a\n", ":1: expected text as a key, found 1 (quote it)"),
        ("a: 1\n---\nb: 2\n", ":2: not valid YAML: expected a single document"),
    ],
)
def test_yaml_that_cannot_be_read_names_the_line(write: Callable[[str], Path], text: str, expected: str) -> None:
    path = write(text)
    said = message(path)
    assert said.startswith(f"{path}{expected}")
    assert len(said.splitlines()) == 1


def test_aliases_that_multiply_without_end_are_stopped(write: Callable[[str], Path]) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert "values with aliases expanded" in message(write("\n".join(levels)))


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert message(path) == f"{path}: expected text in UTF-8"


@settings(suppress_health_check=list(HealthCheck))
@given(config=configs(), junk=plain | st.just({"mixture": 3, "path": 1, "std": 2}), data=st.data())
def test_whatever_is_wrong_somewhere_ends_in_a_clear_error_or_a_config(config: Config, junk: Any, data: Any) -> None:
    values = to_dict(config)
    path = data.draw(st.sampled_from([path for path, _ in flatten(values)]))
    target: Any = values
    *parents, last = path.split(".")[: data.draw(st.integers(1, 6))]
    try:
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target[part]
        target[int(last) if isinstance(target, list) else last] = junk
    except (KeyError, ValueError, IndexError):
        return  # a key of the user's own, with a dot in it
    said = "nothing"
    try:
        load(values, report=lambda line: None)
    except InputError as error:
        said = str(error)
    assert all(line.strip() for line in said.split("\n"))


def test_a_module_beside_the_yaml_file_hides_no_installed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "colorsys.py").write_text("def rgb_to_hsv(r, g, b):\n    return 'mine'\n")
    search_folder_of(tmp_path / "my.yaml")
    assert import_dotted("colorsys.rgb_to_hsv", "key")(1.0, 0.0, 0.0) == (0.0, 1.0, 1.0)


# ---- overrides --------------------------------------------------------------------------------------------


def test_values_are_yaml(minimal: dict[str, Any]) -> None:
    overrides = ["tokens.train_steps=100", "optimizer.learning_rate_scheduler.learning_rate=1e-3"]
    overrides += ["data_stages.0.data.seed=1", "model.init_method={path: checkpoints/100}", "general.run='10'"]
    config = load(minimal, [*overrides, "logging.sample_prompts=[a, b=c]", "optimizer.clip_grad=null"])
    assert config.tokens.train_steps == 100
    assert config.optimizer.learning_rate_scheduler.learning_rate == 1e-3
    assert config.data_stages[0].data.seed == 1
    assert config.model.init_method == ExistingCheckpointInit(path="checkpoints/100")
    assert config.general.run == "10"
    assert config.logging.sample_prompts == ["a", "b=c"]
    assert config.optimizer.clip_grad is None


def test_a_section_that_is_absent_is_made(minimal: dict[str, Any]) -> None:
    minimal["profiler"] = None
    config = load(minimal, ["profiler.profiler_export_path=p", "logging.log_dir=elsewhere"])
    assert config.profiler is not None
    assert (config.profiler.profiler_export_path, config.logging.log_dir) == ("p", "elsewhere")


def test_the_callers_data_stays_as_it_is(minimal: dict[str, Any]) -> None:
    load(minimal, ["tokens.train_steps=100"])
    assert minimal["tokens"]["train_steps"] == 15


def test_the_last_of_two_overrides_counts(minimal: dict[str, Any]) -> None:
    assert load(minimal, ["tokens.train_steps=1", "tokens.train_steps=2"]).tokens.train_steps == 2


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("tokens.train_step=1", "unknown key 'tokens.train_step'; did you mean 'train_steps'?"),
        ("data_stages.1.name=x", "'data_stages' is a list of 1 item, numbered from 0; it has no '1'"),
        ("data_stages.first.name=x", "'data_stages' is a list of 1 item, numbered from 0; it has no 'first'"),
        ("tokens.train_steps.x=1", "'tokens.train_steps' is 15, it has no key 'x'"),
        ("tokens.train_steps=[1", "not valid YAML"),
    ],
)
def test_a_path_that_leads_nowhere_is_reported_with_the_nearest(minimal: Any, override: str, expected: str) -> None:
    said = message(minimal, (override,))
    assert said.startswith(f"override {override}:")
    assert expected in said
