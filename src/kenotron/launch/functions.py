"""What passes between processes that do not share memory: configs as plain data, functions by name."""

from collections.abc import Callable
from typing import Any, Protocol

from kenotron.config.parallelism import HasLayout

WhyKilled = Callable[[int], str | None]
"""The cause to report when a rank was killed by the signal that it receives, None if it does not know."""


class RankConfig(HasLayout, Protocol):
    """What `work_on_ranks` passes to its function on every rank: a pydantic model with a layout."""

    def model_dump(self, *, mode: str, by_alias: bool) -> dict[str, Any]:
        """Plain data; other processes validate it again."""


def function_path(function: Callable[..., object]) -> str:
    """``module:name`` of a function or class at the top of a module, as pickle names it, for `pkgutil.resolve_name`.

    Raises ValueError for any other function: another process could not find it.
    """
    path = f"{function.__module__}:{function.__qualname__}"
    if function.__module__ == "__main__" or "." in function.__qualname__:
        raise ValueError(f"{path} cannot be called in other processes; move it to the top of a module they can import")
    return path
