"""What forward leaves in a module that others wrote, besides what its checkpoints hold.

    buffers in the state_dict             a training step changes them; put back after any other call
    other buffers, attributes             put back after every call: a resumed run would not have them
    what recomputation writes in backward put back: the forward pass has written it

A counter, a cache that grows with the longest text (`max_seq_len_cached`), a list of losses: without this, a validation
would change training, and a resumed run would be another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kenotron.config.errors import InputError

OURS = __name__.partition(".")[0]
_TORCHS = frozenset(vars(nn.Module()))


class ModuleState:
    """Attributes of `root` and the modules in it, and their buffers named in `values`, as they are now.

    values: what a buffer gets that was written in place, by its name in `root`. Tensors are replaced, not written, when
    they are put back: autograd may need what forward left.
    """

    def __init__(self, root: nn.Module, values: Mapping[str, Tensor]) -> None:
        self.attributes, self.buffers, self.values = [], [], values
        self.mutable: list[tuple[str, Any, Any]] = []
        package, seen = type(root).__module__.partition(".")[0], set[int]()
        for path, module in root.named_modules():
            if package != OURS and type(module).__module__.startswith(f"{OURS}."):
                continue  # parallel layers and blocks: what they keep is theirs
            prefix, own = f"{path}." if path else "", vars(module)
            self.attributes.append((prefix, own, own.copy()))
            for name, each in own.items():
                if name not in _TORCHS:
                    self.mutable += _mutable(prefix + name, each, package, seen)
            for name, buffer in module._buffers.items():
                if prefix + name in values:
                    self.buffers.append((prefix, name, module._buffers, buffer, _contents(buffer)))

    def put_back(self) -> list[str]:
        """The names of what had changed. Raises InputError: a tensor that is no buffer was written in place."""
        changed = []
        for name, value, contents in self.mutable:
            if not _holds(value, contents):
                changed.append(name)
                _refill(name, value, contents)
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
    """As if nothing had been called within; the list gets the names of what had changed."""
    state, changed = ModuleState(root, values), list[str]()
    try:
        yield changed
    finally:
        changed += state.put_back()


def recomputed(forward: Callable[..., Any], how: Mapping[str, Any]) -> Callable[..., Any]:
    """`forward`, called again in backward by `checkpoint` with the options `how`; of a block that changes nothing."""

    def call(*args: Any, **kwargs: Any) -> Any:  # no functools.partial: torch.compile passes over it in silence
        return checkpoint(forward, *args, **how, **kwargs)

    return call


class Recomputed:
    """`block.forward`, called again in backward with the state that the block had.

    values: of the buffers of `block` at the time, as `ModuleState` takes them.
    """

    def __init__(self, block: nn.Module, values: Callable[[], Mapping[str, Tensor]], how: Mapping[str, Any]) -> None:
        self.block, self.values, self.how, self.forward = block, values, how, block.forward

    def compile(self) -> None:
        """Compile what is called twice; around it are only states."""
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


def _mutable(name: str, value: Any, package: str, seen: set[int]) -> Iterator[tuple[str, Any, Any]]:
    """What may be changed in place, in an attribute and inside of it: its name, itself, its contents."""
    if isinstance(value, int | float | str | nn.Parameter) or callable(value) or id(value) in seen:
        return  # functions, classes, modules: not values
    inside = _inside(value, package)
    if inside is None and not torch.is_tensor(value):
        return
    seen.add(id(value))
    yield name, value if inside is None else inside, _contents(value if inside is None else inside)
    for key, each in inside.items() if isinstance(inside, dict) else enumerate(inside or ()):
        yield from _mutable(f"{name}.{key}", each, package, seen)


def _inside(value: Any, package: str) -> Any:
    """The container that `value` is, or that holds the attributes of an object of the user's `package`."""
    if isinstance(value, list | dict | set | deque):
        return value
    theirs = type(value).__module__.partition(".")[0] in (package, "types")  # SimpleNamespace
    return vars(value) if theirs and hasattr(value, "__dict__") else None


def _contents(value: Any) -> Any:
    """What `_holds` and `_refill` need of a value that may be changed in place."""
    if isinstance(value, Tensor):
        return -1 if value.is_inference() else value._version
    return None if value is None else value.copy()


def _holds(value: Any, contents: Any) -> bool:
    """Whether `value` is as it was when it had `contents`, the very same objects."""
    if isinstance(value, list | deque):
        return len(value) == len(contents) and all(one is other for one, other in zip(value, contents))
    if isinstance(value, dict):
        return value.keys() == contents.keys() and all(value[key] is contents[key] for key in contents)
    return bool((value if isinstance(value, set) else _contents(value)) == contents)


def _equal(one: Any, other: Any) -> bool:
    numbers = isinstance(one, int | float | str) and isinstance(other, int | float | str)
    return one is other or (numbers and one == other)


def _refill(name: str, value: Any, contents: Any) -> None:
    if isinstance(value, Tensor):
        raise InputError(f"model.model_config: forward writes into {name}, a tensor that is no buffer: register it")
    value.clear()
    (value.extend if isinstance(value, list | deque) else value.update)(contents)


def _copy(value: Tensor, like: Tensor) -> Tensor:
    with torch.inference_mode(False):  # a tensor made in that mode counts no versions
        return value.to(like, copy=True)
