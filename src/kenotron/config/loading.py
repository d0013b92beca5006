"""Load a `Config` from YAML: read, upgrade old forms, apply overrides, validate.

>>> config = load("examples/quickstart.yaml", ["tokens.train_steps=100"])
>>> config.tokens.train_steps
100
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kenotron.config.config import Config
from kenotron.config.dialects import precision, resume_from_itself, upgrade
from kenotron.config.document import Document, Keys, read
from kenotron.config.domains import resolve_domains
from kenotron.config.dotted import search_folder_of
from kenotron.config.errors import InputError, NotSupportedYet
from kenotron.config.overrides import apply, check_overrides, is_file, merge
from kenotron.config.unserved import describe_key, take_unserved
from kenotron.config.urls import misplaced_urls, urls_with_passwords
from kenotron.config.writing import to_dict


def load(
    source: str | Path | dict[str, Any] | Config,
    overrides: Sequence[str] = (),
    *,
    report: Callable[[str], None] | None = None,
) -> Config:
    """Load the config of a YAML file, of a dict in the same schema or of another config, and apply overrides.

    An override is ``path=value``, or the name of another YAML file. Files are applied first, from left to right.
    `report` is called with one line for every key of an older form that was upgraded; by default the lines are logged
    as warnings. `%date` and `%jobid` in the run's name stay until `fill_run_name`. Raises InputError with one line for
    every problem, and NotSupportedYet for keys that are not implemented.
    """
    check_overrides(overrides)
    say = report or logging.getLogger("kenotron").warning
    document = overlay(to_dict(source) if isinstance(source, Config) else source, overrides, say)
    resolve_domains(document)
    for line in resume_from_itself(document):  # after overrides, which may set another checkpoints_path
        say(line)
    refused: list[tuple[Keys, Any]] = [*urls_with_passwords(document.data)]
    if not refused:  # messages of the other checks repeat values, and would print a password
        refused = [*take_unserved(document.data), *misplaced_urls(document)]
    if refused:
        raise NotSupportedYet("; ".join(_with_line(document, keys, value) for keys, value in refused))
    try:
        return Config.model_validate(document.data)
    except ValidationError as error:
        from kenotron.config.messages import explain

        raise InputError("\n".join(explain(error, document))) from None


def overlay(source: str | Path | dict[str, Any], overrides: Sequence[str], say: Callable[[str], None]) -> Document:
    """Read `source`, upgrade old forms and apply `overrides` as in `load`; `say` gets a line for every upgraded key."""
    document = read(source)
    document.notes += precision(document)
    if document.name:
        search_folder_of(Path(document.name))
    for file in filter(is_file, overrides):
        search_folder_of(Path(file))
        other = read(file)
        other.notes += precision(other)
        merge(document, other)
        document.notes += other.notes
    for line in (*document.notes, *upgrade(document)):
        say(line)
    for text in overrides:
        if not is_file(text):
            apply(document, text)
            for line in precision(document, overrides=True):
                say(line)
    return document


def _with_line(document: Document, keys: Keys, value: Any) -> str:
    place = document.place(keys)
    in_file = place and not place.startswith("override ")
    return describe_key(keys, value) + (f" ({place})" if in_file else "")
