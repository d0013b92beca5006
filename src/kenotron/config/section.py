"""What every section of the schema shares: strict pydantic models whose fields explain themselves.

A section is a frozen model that forbids unknown keys and converts nothing but integers to floats. Its fields
are made by `key`, which carries the sentence that the generated reference prints, and a mark:

    class Tokens(Section):
        train_steps: int = key("Optimizer steps of the whole run.", ge=1)
        val_samples: int | None = key("Cap on the held-out sequences of one validation.", None, mark=OURS)

A check across several fields raises `problem`, which names the key that should be changed:

    raise problem("train_steps", "expected at least 10 steps, found 5")

Variants of one key (`init_method`, `dataset`, …) are told apart by a function from value to tag, never by
trying one after the other; tags look like ``(random)``, so that they differ from keys in an error's location.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

OURS = "ours"  # not in nanotron
EXPORT = "export only"  # travels to the Hugging Face export, changes nothing here
NO_EFFECT = "no effect"  # accepted for old files; this engine has nothing that it could change
RECORD = "record"  # written into the config that a checkpoint keeps; read by people and tools


class Section(BaseModel):
    """A part of the config: immutable, strict about types, closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True, allow_inf_nan=False)


def key(description: str, default: Any = ..., *, mark: str | None = None, **rules: Any) -> Any:
    """A field with its sentence for the reference; without a default it is required."""
    return Field(default, description=description, json_schema_extra={"mark": mark} if mark else None, **rules)


def problem(path: str, message: str) -> PydanticCustomError:
    """A failed check, at `path` below the section that raises it ("" for the section itself)."""
    return PydanticCustomError("check", "{path}: {message}", {"path": path, "message": message})


class _Context(dict[str, Any]):
    """Hashable, as `typing` wants the parts of an annotation to be."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def by_rule(choose: Callable[[Any], str | None], expected: str, keys: Iterable[str] = ()) -> Discriminator:
    """Tell variants apart with `choose`; None from it means that the value is none of them.

    `expected` completes the sentence "expected …"; `keys` are the names to suggest from for a misspelt one.
    """
    return Discriminator(
        choose,
        custom_error_type="variant",
        custom_error_message="expected {expected}",
        custom_error_context=_Context(expected=expected, keys=list(keys)),
    )


class _Spelling:
    """A value that may be written in other ways than the one it is kept in."""

    def __init__(self, convert: Callable[[Any], Any], any_case: bool) -> None:
        self.convert, self.any_case = convert, any_case

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.convert, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        inner = handler(schema)
        if self.any_case:
            inner["enum"] += [name.lower() for name in inner["enum"]]
        return {"anyOf": [inner, {"type": "null"}]}


def null_means(default: Any) -> _Spelling:
    """An explicit null is the default."""
    return _Spelling(lambda value: default if value is None else value, any_case=False)


def _expand_home(path: str) -> str:
    try:
        return os.path.expanduser(path)
    except ValueError:  # no user has a NUL in its name
        return path


LocalPath = Annotated[str, AfterValidator(_expand_home)]
"""A path on this machine, or a hub name: `~` is the home folder."""


def upper_case(default: str) -> _Spelling:
    """Names that nanotron reads in any case and keeps in upper case; null is the default."""

    def convert(value: Any) -> Any:
        if value is None:
            return default
        return value.upper() if isinstance(value, str) else value

    return _Spelling(convert, any_case=True)


def has(value: Any, name: str) -> bool:
    """Whether a variant's value, a mapping from YAML or a model made in Python, carries this key."""
    return name in value if isinstance(value, dict) else name in type(value).model_fields
