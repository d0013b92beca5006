"""Pass configs and functions between processes: configs as plain data, functions by name."""

from collections.abc import Callable
from typing import Any, Protocol

from kenotron.config.parallelism import HasLayout

WhyKilled = Callable[[int], str | None]
"""Returns the cause to report for a rank that was killed by the signal in the argument; None if it is unknown."""


class RankConfig(HasLayout, Protocol):
    """The config that `work_on_ranks` passes to its function on every rank: a pydantic model with a layout."""

    def model_dump(self, *, mode: str, by_alias: bool) -> dict[str, Any]:
        """Return plain data, which other processes validate again."""


def function_path(function: Callable[..., object]) -> str:
    """Return ``module:name`` of a function or class at the top of a module, for `pkgutil.resolve_name`.

    Raises ValueError for any other function, because another process could not find it.
    """
    path = f"{function.__module__}:{function.__qualname__}"
    if function.__module__ == "__main__" or "." in function.__qualname__:
        raise ValueError(f"{path} cannot be called in other processes; move it to the top of a module they can import")
    return path
