"""YAML is read without surprises, and what is written loads to an equal config."""

from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from kenotron.config import ABSENT, Config, diff, dump, load, to_dict
from kenotron.config.document import parse, parse_value
from support.config_strategies import configs

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-5", 1e-5), ("1E5", 100000), ("-3e+2", -300), ("1.25e1", 12.5), ("1.0e-5", 1e-5), (".5", 0.5)),
        *(("5.", 5.0), ("-.inf", float("-inf")), ("1_000", 1000), ("-7", -7), ("0x1f", 31), ("0b101", 5)),
        *(("true", True), ("off", False), ("~", None), ("", None), ("null", None), ("'1e-5'", "1e-5")),
        *(("12:30:00", "12:30:00"), ("2026-01-01", "2026-01-01"), ("010", "010"), ("1f1b", "1f1b"), ("1e", "1e")),
        *(("e5", "e5"), ("[1, {a: b}]", [1, {"a": "b"}]), ("!!str 5", "5")),
    ],
)
def test_a_scalar_is_what_it_looks_like(text: str, value: Any) -> None:
    found = parse_value(text, "")
    assert found == value
    assert type(found) is type(value)


def test_anchors_and_merge_keys_are_written_out() -> None:
    document = parse("base: &base {a: 1, b: 2}\nx: {<<: *base, b: 3}\ny: {<<: [{a: 9}, *base]}\nz: *base\n")
    assert document.data["x"] == {"a": 1, "b": 3}
    assert document.data["y"] == {"a": 9, "b": 2}
    assert document.data["z"] == {"a": 1, "b": 2}


def test_every_key_remembers_its_line() -> None:
    document = parse("a:\n  b:\n  - c: 1\n    d: 2\n  - 3\n", "f")
    assert document.place(("a", "b", 0, "d")) == "f:4"
    assert document.place(("a", "b", 1)) == "f:5"
    assert document.place(("a", "b", 1, "nothing below")) == "f:5"
    assert document.place(("other",)) == "f"


@settings(suppress_health_check=SLOW)
@given(configs())
def test_a_config_survives_as_yaml_and_as_plain_data_and_a_plain_yaml_reader_sees_the_same(config: Config) -> None:
    assert Config.model_validate(parse(dump(config)).data) == config
    assert load(to_dict(config)) == config
    assert yaml.safe_load(dump(config)) == to_dict(config)  # PyYAML's own rules, independent of our reader


@settings(suppress_health_check=SLOW)
@given(configs(), configs())
def test_two_configs_are_equal_exactly_when_nothing_differs(a: Config, b: Config) -> None:
    assert diff(a, a) == []
    assert (a == b) == (diff(a, b) == [])
    swapped = [(path, new, old) for path, old, new in diff(b, a)]
    assert sorted(swapped, key=str) == sorted(diff(a, b), key=str)


def test_a_difference_names_the_path_and_both_values(minimal: dict[str, Any]) -> None:
    a = load(minimal)
    b = load(minimal, ["tokens.train_steps=30", "model.init_method={path: x}"])
    assert diff(a, b) == [
        ("model.init_method.std", 0.025, ABSENT),
        ("model.init_method.scaling_method", "NUM_LAYERS", ABSENT),
        ("tokens.train_steps", 15, 30),
        ("model.init_method.path", ABSENT, "x"),
    ]
    c = load(minimal, ["optimizer.param_groups=[{pattern: mlp, weight_decay: 0.5}]"])
    assert ("optimizer.param_groups.0.weight_decay", ABSENT, 0.5) in diff(a, c)
    assert str(diff(a, c)[0]) == "('optimizer.param_groups', None, something else)"  # a list, whose items follow


@pytest.mark.parametrize(
    "value", ["1e-5", "null", "yes", "12:30:00", "2026-01-01", "010", "0x1f", "a: b", "\x85", "a\u2028b", "\x00", ""]
)
def test_text_that_looks_like_something_else_stays_text(minimal: dict[str, Any], value: str) -> None:
    minimal["general"]["project"] = value
    assert parse(dump(load(minimal))).data["general"]["project"] == value
