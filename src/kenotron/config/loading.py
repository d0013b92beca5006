"""From YAML to `Config`: read, upgrade old forms, apply overrides, check.

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
from kenotron.config.dotted import find_beside
from kenotron.config.errors import InputError, NotSupportedYet
from kenotron.config.overrides import apply, is_file, merge
from kenotron.config.unserved import named, take_unserved
from kenotron.config.urls import misplaced, with_passwords
from kenotron.config.writing import to_dict


def load(
    source: str | Path | dict[str, Any] | Config,
    overrides: Sequence[str] = (),
    *,
    report: Callable[[str], None] | None = None,
) -> Config:
    """The config of a YAML file, of a dict in the same schema or of another config, with overrides on top.

    An override is ``path=value``, or the name of another YAML file. Files come first, from left to right.
    `report` is called with one line for every key of an older form that was upgraded; by default they are logged as
    warnings. `%date` and `%jobid` in the run's name stay until `fill_run_name`. Raises InputError with one line for
    everything that is wrong, NotSupportedYet for keys that ask for what is not implemented.
    """
    listed = isinstance(overrides, Sequence) and not isinstance(overrides, str)
    if not listed or not all(isinstance(text, str) for text in overrides):
        raise InputError(f"overrides: expected a list such as ['tokens.train_steps=100'], found {overrides!r}")
    say = report or logging.getLogger("kenotron").warning
    document = laid_over(to_dict(source) if isinstance(source, Config) else source, overrides, say)
    resolve_domains(document)
    for line in resume_from_itself(document):  # with another checkpoints_path it starts from the file's
        say(line)
    refused: list[tuple[Keys, Any]] = [*with_passwords(document.data)]
    if not refused:  # the others repeat values
        refused = [*take_unserved(document.data), *misplaced(document)]
    if refused:
        raise NotSupportedYet("; ".join(_with_line(document, keys, value) for keys, value in refused))
    try:
        return Config.model_validate(document.data)
    except ValidationError as error:
        from kenotron.config.messages import explain

        raise InputError("\n".join(explain(error, document))) from None


def laid_over(source: str | Path | dict[str, Any], overrides: Sequence[str], say: Callable[[str], None]) -> Document:
    """`source` with `overrides` on top as in `load`, in keys of today; `say` gets a line for every older key."""
    document = read(source)
    document.notes += precision(document)
    if document.name:
        find_beside(Path(document.name))
    for file in filter(is_file, overrides):
        find_beside(Path(file))
        over = read(file)
        over.notes += precision(over)
        merge(document, over)
        document.notes += over.notes
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
    return f"{named(keys, value)} ({place})" if in_file else named(keys, value)
