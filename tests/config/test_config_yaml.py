"""YAML is read without surprises."""

from typing import Any

import pytest

from kenotron.config.document import parse, parse_value


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
