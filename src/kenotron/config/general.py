"""`general`: the name of the run, its seed, and its hooks."""

from pathlib import PurePath
from typing import Annotated, Any

from pydantic import AfterValidator, Discriminator, Tag
from pydantic_core import PydanticCustomError

from kenotron.config.section import RECORD, LocalPath, Section, by_rule, key, null_means, our_key

DEFAULT_RUN_NAME = "%date_%jobid"


def _inside(name: str) -> str:
    if name.startswith(("/", "~")) or ".." in PurePath(name).parts or "\0" in name:
        raise PydanticCustomError("expected", "a name whose folder is inside logging.log_dir")
    return name


class Hook(Section):
    """A `kenotron.Hook` of the user's, with its arguments."""

    path: str = our_key("Dotted path of a `kenotron.Hook` class, or of a function that returns a hook.")
    kwargs: dict[str, Any] = our_key("Keyword arguments for it.", {})


def _hook_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "(dotted path)"
    return "(hook)" if isinstance(value, dict | Hook) else None


_hook_rule: Discriminator = by_rule(_hook_kind, "a dotted path, or {path, kwargs}")
AnyHook = Annotated[Annotated[str, Tag("(dotted path)")] | Annotated[Hook, Tag("(hook)")], _hook_rule]


class General(Section):
    """Name and seed of the run, and its hooks."""

    project: str = key("Name of the project, printed at the start of a run and written to TensorBoard.")
    run: Annotated[str, AfterValidator(_inside), null_means(DEFAULT_RUN_NAME)] = key(
        "Name of the run and of its log folder. `%date` and `%jobid` are filled in when the run first starts; a "
        "resumed run keeps its name.",
        DEFAULT_RUN_NAME,
    )
    seed: Annotated[int, null_means(42)] = key(
        "Seed of the initial weights and of generated samples; the data order has its own seed (data.seed).", 42, ge=0
    )
    step: int | None = key("Step of the checkpoint that contains this file; set when it is saved.", None, mark=RECORD)
    consumed_train_samples: int | None = key(
        "Samples consumed up to the checkpoint that contains this file; set when it is saved.", None, mark=RECORD
    )
    benchmark_csv_path: LocalPath | None = key(
        "CSV file that gets one row at the end of each run: speed, memory, layout, model. Runs share it. With "
        "NANOTRON_BENCHMARK=1 in the environment a run stops after 4 steps.",
        None,
    )
    kill_switch_path: LocalPath | None = key(
        "A run saves and stops after the step in which this file appears, and none starts while it is there.", None
    )
    ignore_sanity_checks: bool = key(
        "False: compare replicas of weights and optimizer at the start and before every save; read checkpoints back.",
        True,
    )
    deterministic: bool = our_key(
        "True: use only deterministic algorithms, so that a rerun on the same GPUs is bitwise identical; an "
        "operator without one is an error. Slower.",
        False,
    )
    hooks: list[AnyHook] | None = our_key(
        "Your own hooks, as dotted paths or {path, kwargs}; they run after the built-in ones.", None
    )
