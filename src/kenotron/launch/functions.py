"""Functions by name, for processes that do not share memory."""

from collections.abc import Callable


def function_path(function: Callable[..., object]) -> str:
    """``module:name`` of a function or class at the top of a module, as pickle names it, for `pkgutil.resolve_name`.

    Raises ValueError for any other function: another process could not find it.
    """
    path = f"{function.__module__}:{function.__qualname__}"
    if function.__module__ == "__main__" or "." in function.__qualname__:
        raise ValueError(f"{path} cannot be called in other processes; move it to the top of a module they can import")
    return path
