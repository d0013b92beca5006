"""`general`: what the run is called, and its seed."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Tag

from kenotron.config.section import OURS, RECORD, LocalPath, Section, by_rule, key, null_means

DEFAULT_RUN_NAME = "%date_%jobid"


class Hook(Section):
    """A user's own `train.Hook`, with the arguments that it is made with."""

    path: str = key("Dotted path of a `train.Hook` class or a function that returns a hook.", mark=OURS)
    kwargs: dict[str, Any] = key("Keyword arguments it is called with.", {}, mark=OURS)


def _hook_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "(dotted path)"
    return "(hook)" if isinstance(value, dict | Hook) else None


_hook_rule: Discriminator = by_rule(_hook_kind, "a dotted path, or {path, kwargs}")
AnyHook = Annotated[Annotated[str, Tag("(dotted path)")] | Annotated[Hook, Tag("(hook)")], _hook_rule]


class General(Section):
    project: str = key("Name of the project: printed when a run starts, and written to its TensorBoard text.")
    run: Annotated[str, null_means(DEFAULT_RUN_NAME)] = key(
        "Name of the run and of its log folder; `%date` and `%jobid` are filled once, when the run first "
        "starts, and a resumed run keeps its name.",
        DEFAULT_RUN_NAME,
    )
    seed: Annotated[int, null_means(42)] = key(
        "Seed of the first weights and of generated samples; the data order has a seed of its own (data.seed).",
        42,
        ge=0,
    )
    step: int | None = key("Step of the checkpoint that this file was saved with; set by a save.", None, mark=RECORD)
    consumed_train_samples: int | None = key(
        "Samples consumed when this file was saved with a checkpoint; set by a save.", None, mark=RECORD
    )
    benchmark_csv_path: LocalPath | None = key(
        "A CSV file that gets one row of speed, memory and layout at the end of the run (not supported yet).", None
    )
    ignore_sanity_checks: bool = key(
        "False: every checkpoint is read back and checked right after it is written.",
        True,
    )
    hooks: list[AnyHook] | None = key(
        "Hooks of your own, as dotted paths or {path, kwargs}, called after the built-in ones.",
        None,
        mark=OURS,
    )
