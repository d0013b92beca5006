"""Dotted overrides reach every key, and a wrong one says what was meant."""

from typing import Any

import pytest

from kenotron.config import InputError, load
from kenotron.config.model import ExistingCheckpointInit


def message(source: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load(source, overrides)
    return str(caught.value)


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
    said = message(minimal, override)
    assert said.startswith(f"override {override}:")
    assert expected in said
