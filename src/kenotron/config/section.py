"""What every section of the schema shares: strict pydantic models whose fields explain themselves.

A section is a frozen model that forbids unknown keys and converts nothing but integers to floats. Its fields are
made by `key`, which carries the sentence that the generated reference prints, and a mark:

    class Tokens(Section):
        train_steps: int = key("Optimizer steps of the whole run.", ge=1)
        val_samples: int | None = key("Cap on the held-out sequences of one validation.", None, mark=OURS)

A check across several fields raises `problem`, which names the key that should be changed:

    raise problem("train_steps", "expected at least 10 steps, found 5")

Variants of one key (`init_method`, `dataset`, …) are told apart by a function from value to tag, never by trying
one after the other; tags look like ``(random)``, so that they can be told from keys in an error's location.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field
from pydantic_core import PydanticCustomError

OURS = "ours"  # not in nanotron
EXPORT = "export only"  # travels to the Hugging Face export, changes nothing here
NO_EFFECT = "no effect"  # accepted for old files; this engine has nothing that it could change
RECORD = "record"  # written into the config that a checkpoint keeps; read by people and tools


class Section(BaseModel):
    """A part of the config: immutable, strict about types, closed to unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, populate_by_name=True, allow_inf_nan=False
    )


def key(description: str, default: Any = ..., *, mark: str | None = None, **rules: Any) -> Any:
    """A field with its sentence for the reference; without a default it is required."""
    extra = {"mark": mark} if mark else None
    return Field(default, description=description, json_schema_extra=extra, **rules)


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


def null_means(default: Any) -> BeforeValidator:
    """An explicit null is the default."""
    return BeforeValidator(lambda value: default if value is None else value)


def has(value: Any, name: str) -> bool:
    """Whether a variant's value, a mapping from YAML or a model made in Python, carries this key."""
    return name in value if isinstance(value, dict) else name in type(value).model_fields
