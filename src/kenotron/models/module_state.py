"""Undo changes of state by the forward of a foreign module that checkpoints do not hold.

    buffers in the state_dict             changed by a training step; restored after any other call
    other buffers, attributes,            restored after every call: a resumed run would not have them
      variables of classes and files
    an iterator, a random generator       refused
    changes by recomputation in backward  restored: the forward pass has made them already

Examples are a counter, a cache that grows with the longest text (`max_seq_len_cached`), and a list of losses. If they
were kept, validation would change training, and a resumed run would differ.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kenotron.config.errors import InputError

LARGE = 10_000
"""If a container has more elements, such as a list of texts, only the container itself is watched."""

OURS = __name__.partition(".")[0]
_TORCHS = frozenset(vars(nn.Module()))
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, property, staticmethod, classmethod)
_CODE = (nn.Parameter, nn.Module, type, ModuleType, *_FUNCTIONS)
_POSITIONS = (Iterator, random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_OTHERS = sys.stdlib_module_names - {"types", "argparse"} | {"torch", OURS}  # packages without state of a model


class ModuleState:
    """A snapshot of the attributes of `root` and its submodules, and of their buffers named in `values`.

    `values` maps a buffer's name in `root` to the value that it gets if it was written in place. Restoring replaces
    tensors instead of writing them, because autograd may need what forward left.
    """

    def __init__(self, root: nn.Module, values: Mapping[str, Tensor]) -> None:
        self.attributes, self.buffers, self.values = [], [], values
        self.mutable: list[tuple[str, Any, Any]] = []
        package, seen = _package(root), set[int]()
        self.variables = [(space, _variables(space)) for space in _namespaces(root, package)]
        for space, variables in self.variables:
            for name, each in variables.items():
                self.mutable += _mutable(f"{space.__name__}.{name}", each, seen)
        for path, module in root.named_modules():
            if package != OURS and _package(module) == OURS:
                continue  # parallel layers and blocks keep their own state
            prefix, own = f"{path}." if path else "", vars(module)
            self.attributes.append((prefix, own, own.copy()))
            for name, each in own.items():
                if name not in _TORCHS:
                    self.mutable += _mutable(prefix + name, each, seen)
            for name, buffer in module._buffers.items():
                if prefix + name in values:
                    self.buffers.append((prefix, name, module._buffers, buffer, _contents(buffer)))

    def put_back(self) -> list[str]:
        """Restore the snapshot; return the names of changes. Raises InputError for in-place writes to non-buffers."""
        changed = []
        for name, value, contents in self.mutable:
            if not _holds(value, contents):
                changed.append(name)
                _refill(name, value, contents)
        for space, before in self.variables:
            now = _variables(space)
            for name in now.keys() | before.keys():
                if not _equal(now.get(name), before.get(name)):
                    changed.append(f"{space.__name__}.{name}")
                    setattr(space, name, before[name]) if name in before else delattr(space, name)
        for prefix, own, before in self.attributes:
            if [*map(id, own.values())] == [*map(id, before.values())]:
                continue  # the usual case; there are thousands
            names = own.keys() | before.keys()
            changed += [prefix + name for name in names if not _equal(own.get(name), before.get(name))]
            own.clear()
            own.update(before)
        for prefix, name, buffers, buffer, contents in self.buffers:
            written = not _holds(buffer, contents)
            if written or buffers.get(name) is not buffer:
                changed.append(prefix + name)
                buffers[name] = _copy(self.values[prefix + name], buffer) if written else buffer
        return changed


@contextmanager
def put_back(root: nn.Module, values: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Restore the state of `root` at the end of the block; the list that is yielded gets the names of what changed."""
    state, changed = ModuleState(root, values), list[str]()
    try:
        yield changed
    finally:
        changed += state.put_back()


def recomputed(forward: Callable[..., Any], how: Mapping[str, Any]) -> Callable[..., Any]:
    """Return `forward` under `checkpoint` with options `how`, for a block that changes no state."""

    def call(*args: Any, **kwargs: Any) -> Any:  # no functools.partial: torch.compile would silently skip it
        return checkpoint(forward, *args, **how, **kwargs)

    return call


class Recomputed:
    """`block.forward` under `checkpoint`, recomputed with the state that the block had in the forward pass.

    `values` returns the current values of the block's buffers for `ModuleState`.
    """

    def __init__(self, block: nn.Module, values: Callable[[], Mapping[str, Tensor]], how: Mapping[str, Any]) -> None:
        self.block, self.values, self.how, self.forward = block, values, how, block.forward

    def compile(self) -> None:
        """Compile the inner forward, which is called twice; the code around it only handles state."""
        self.forward = torch.compile(self.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before, calls = ModuleState(self.block, self.values()), iter((self.forward,))

        def again(*args: Any, **kwargs: Any) -> Any:
            with put_back(self.block, self.values()):
                before.put_back()
                return self.forward(*args, **kwargs)

        def first_or_again(*args: Any, **kwargs: Any) -> Any:
            return next(calls, again)(*args, **kwargs)

        return recomputed(first_or_again, self.how)(*args, **kwargs)


def check_state(root: nn.Module) -> None:
    """Raise InputError for state that can be neither saved nor restored: extra state, iterators, random generators."""
    for path, module in root.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise InputError(
                f"model.model_config: {type(module).__name__} has get_extra_state, which checkpoints do not hold; "
                f"expected its state in buffers (register_buffer)"
            )
        for name, each in vars(module).items():
            if isinstance(each, _POSITIONS):
                raise InputError(
                    f"model.model_config: {path}{'.' if path else ''}{name} is a {type(each).__name__}, whose position "
                    "no checkpoint holds; expected state in buffers (register_buffer)"
                )


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _namespaces(root: nn.Module, package: str) -> list[Any]:
    """Return the classes of modules that users wrote themselves, and the Python modules that define these classes."""
    if package in (OURS, "transformers"):
        return []
    kinds = {kind: None for module in root.modules() for kind in type(module).__mro__}
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] == package]
    return [*own, *{kind.__module__: sys.modules[kind.__module__] for kind in own}.values()]


def _variables(space: Any) -> dict[str, Any]:
    """Return the variables of a class or Python module, without functions, classes and names that begin with __."""
    values = {name: each for name, each in vars(space).items() if not name.startswith("__")}
    return {name: each for name, each in values.items() if not isinstance(each, _CODE)}


def _mutable(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, object, contents) of the objects in `value`, itself included, that can be changed in place."""
    if isinstance(value, (int, float, str, bytes, *_CODE)) or id(value) in seen:
        return
    inside = _inside(value)
    if inside is None and not isinstance(value, Tensor | np.ndarray):
        return
    seen.add(id(value))
    if not isinstance(value, tuple):
        yield name, value if inside is None else inside, _contents(value if inside is None else inside)
    if inside is not None and len(inside) > LARGE:
        return
    for key, each in inside.items() if isinstance(inside, dict) else enumerate(inside or ()):
        yield from _mutable(f"{name}.{key}", each, seen)


def _inside(value: Any) -> Any:
    """Return `value` if it is a container, or the dictionary of its attributes if it is an object with state."""
    if isinstance(value, list | dict | set | deque | tuple):
        return value
    return vars(value) if hasattr(value, "__dict__") and _package(value) not in _OTHERS else None


def _contents(value: Any) -> Any:
    """Return what `_holds` and `_refill` need: a tensor's version counter, or a copy."""
    if isinstance(value, Tensor):
        return -1 if value.is_inference() else value._version
    return value.copy()


def _holds(value: Any, contents: Any) -> bool:
    """Return whether `value` still has `contents`, the identical objects."""
    if isinstance(value, list | deque):
        return len(value) == len(contents) and all(one is other for one, other in zip(value, contents))
    if isinstance(value, dict):
        return value.keys() == contents.keys() and all(value[key] is contents[key] for key in contents)
    if isinstance(value, np.ndarray):
        return value.tobytes() == contents.tobytes()
    return bool((value if isinstance(value, set) else _contents(value)) == contents)


def _equal(one: Any, other: Any) -> bool:
    numbers = isinstance(one, int | float | str) and isinstance(other, int | float | str)
    return one is other or (numbers and one == other)


def _refill(name: str, value: Any, contents: Any) -> None:
    if isinstance(value, Tensor):
        raise InputError(f"model.model_config: forward writes into {name}, a tensor that is no buffer: register it")
    if isinstance(value, np.ndarray):
        value[...] = contents
        return
    value.clear()
    (value.extend if isinstance(value, list | deque) else value.update)(contents)


def _copy(value: Tensor, like: Tensor) -> Tensor:
    with torch.inference_mode(False):  # a tensor made in inference mode has no version counter
        return value.to(like, copy=True)
