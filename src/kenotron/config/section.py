"""The base of every section of the schema: strict pydantic models with a description per field.

A section is a frozen model that forbids unknown keys and converts only integers to floats. Its fields are made
by `key`, which takes the description for the generated reference, or by `our_key`, if nanotron does not have the key:

    class Tokens(Section):
        train_steps: int = key("Optimizer steps of the whole run.", ge=1)
        val_samples: int | None = our_key("Cap on the held-out sequences of one validation.", None)

A check of several fields raises `problem`, which names the key to change:

    raise problem("train_steps", "expected at least 10 steps, found 5")

Variants of one key (`init_method`, `dataset`, …) are distinguished by a function from value to tag, not by trying one
after the other. Tags look like ``(random)`` to differ from keys in an error's location.
"""

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

OURS = "Kénotron"  # not in nanotron
EXPORT = "export only"  # written to the Hugging Face export, no effect on training
NO_EFFECT = "no effect"  # accepted because nanotron's files have it
RECORD = "record"  # written to the config in a checkpoint, for people and tools


class Section(BaseModel):
    """A part of the config: immutable, strict about types, without unknown keys."""

    model_config = ConfigDict(
        defer_build=True, extra="forbid", frozen=True, strict=True, populate_by_name=True, allow_inf_nan=False
    )

    def __setattr__(self, name: str, value: object) -> None:
        """Raise AttributeError, because every value of a config must have been validated."""
        new = value if isinstance(value, str | int | float) else "…"
        raise AttributeError(
            f"a config is not changed in place; make a changed copy with the key's dotted path: "
            f"config = kn.load(config, ['….{name}={new}'])"
        )


def key(description: str, default: Any = ..., *, mark: str | None = None, **rules: Any) -> Any:
    """Return a field with its description; without a default it is required."""
    return Field(default, description=description, json_schema_extra={"mark": mark} if mark else None, **rules)


def our_key(description: str, default: Any = ..., **rules: Any) -> Any:
    """Return a `key` that nanotron does not have."""
    return key(description, default, mark=OURS, **rules)


def problem(path: str, message: str) -> PydanticCustomError:
    """Return the error for a failed check, at `path` below the section that raises it ("" for the section itself)."""
    return PydanticCustomError("check", "{path}: {message}", {"path": path, "message": message})


class _Context(dict[str, Any]):
    """A hashable dict, because `typing` hashes the parts of an annotation."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def by_rule(choose: Callable[[Any], str | None], expected: str, keys: Iterable[str] = ()) -> Discriminator:
    """Return a discriminator: `choose` returns the tag of the variant of a value, or None if it is no variant.

    `expected` completes the message "expected …"; `keys` are the names to suggest for a misspelt one.
    """
    return Discriminator(
        choose,
        custom_error_type="variant",
        custom_error_message="expected {expected}",
        custom_error_context=_Context(expected=expected, keys=list(keys)),
    )


class _Spelling:
    """The spellings that are accepted for a value in addition to the stored one."""

    def __init__(self, convert: Callable[[Any], Any], any_case: bool = False, names: Iterable[str] = ()) -> None:
        self.convert, self.any_case, self.names = convert, any_case, names

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.convert, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        inner = handler(schema)
        if self.any_case:
            inner["enum"] += [name.lower() for name in inner["enum"]]
        if self.names:
            inner["enum"] = [*inner["enum"], *self.names]
        return {"anyOf": [inner, {"type": "null"}]}


def null_means(default: object) -> _Spelling:
    """Accept null for the default."""
    return _Spelling(lambda value: default if value is None else value)


def _expand_home(path: str) -> str:
    try:
        return os.path.expanduser(path)
    except ValueError:  # a NUL in the name of the user
        return path


LocalPath = Annotated[str, AfterValidator(_expand_home)]
"""A local path, where `~` is the home folder, or a Hub name."""


def upper_case(default: str) -> _Spelling:
    """Accept names in any case, and store them in upper case, as nanotron does; null means the default."""

    def convert(value: Any) -> Any:
        if value is None:
            return default
        return value.upper() if isinstance(value, str) else value

    return _Spelling(convert, any_case=True)


def has_key(value: Any, name: str) -> bool:
    """Return whether a variant, as a dict or as a section, has this key."""
    return name in value if isinstance(value, dict) else name in type(value).model_fields


def also_called(names: dict[str, str], default: str, served: Iterable[str], expected: str) -> _Spelling:
    """Accept other names of a value in any case (`names`: other name → stored name); null means `default`.

    A name that is neither one of `names` nor `served` is an error, whose message has `expected`.
    """

    def convert(value: Any) -> Any:
        if value is None:
            return default
        name = str(value).lower().removeprefix("torch.")
        if name not in names and name not in served:
            raise PydanticCustomError("expected", expected)  # type: ignore[arg-type]
        return names.get(name, name)

    return _Spelling(convert, names=names)
