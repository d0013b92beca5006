"""The rules for plain scalars in YAML: `1e-5` is a float, `12:30:00` and `2026-01-01` are text, `010` is not octal."""

import re

import yaml


class Loader(yaml.SafeLoader):
    """A SafeLoader with these rules for plain scalars."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF", "tTfFyYnNoO"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0b[01]+)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+"
        r"|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))
