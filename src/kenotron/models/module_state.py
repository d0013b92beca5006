"""What forward leaves in a module that others wrote, besides what its checkpoints hold.

    buffers in the state_dict             a training step changes them; put back after any other call
    other buffers, attributes             put back after every call: a resumed run would not have them
    what recomputation writes in backward put back: the forward pass has written it

A counter, a cache that grows with the longest text (`max_seq_len_cached`): without this, a validation would change
training, and a resumed run would be another one. What is inside of an attribute (a list, a tensor that is no buffer) is
not looked at: a module whose logits depend on that is refused by `document_separation.check_repeats`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

OURS = __name__.partition(".")[0]


class ModuleState:
    """Attributes of `root` and the modules in it, and their buffers named in `values`, as they are now.

    values: what a buffer gets that was written in place, by its name in `root`. Tensors are replaced, not written, when
    they are put back: autograd may need what forward left.
    """

    def __init__(self, root: nn.Module, values: Mapping[str, Tensor]) -> None:
        self.attributes, self.buffers, self.values = [], [], values
        package = type(root).__module__.partition(".")[0]
        for path, module in root.named_modules():
            if package != OURS and type(module).__module__.startswith(f"{OURS}."):
                continue  # parallel layers and blocks: what they keep is theirs
            prefix, own = f"{path}." if path else "", vars(module)
            self.attributes.append((prefix, own, own.copy()))
            for name, buffer in module._buffers.items():
                if prefix + name in values:
                    self.buffers.append((prefix, name, module._buffers, buffer, _writes(buffer)))

    def put_back(self) -> list[str]:
        """The names of what had changed."""
        changed = []
        for prefix, own, before in self.attributes:
            if [*map(id, own.values())] == [*map(id, before.values())]:
                continue  # the usual case; there are thousands
            names = own.keys() | before.keys()
            changed += [prefix + name for name in names if not _equal(own.get(name), before.get(name))]
            own.clear()
            own.update(before)
        for prefix, name, buffers, buffer, version in self.buffers:
            written = _writes(buffer) != version
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


def _writes(buffer: Tensor | None) -> int:
    """How often it was written in place."""
    return -1 if buffer is None or buffer.is_inference() else buffer._version


def _equal(one: Any, other: Any) -> bool:
    numbers = isinstance(one, int | float | str) and isinstance(other, int | float | str)
    return one is other or (numbers and one == other)


def _copy(value: Tensor, like: Tensor) -> Tensor:
    with torch.inference_mode(False):  # a tensor made in that mode counts no versions
        return value.to(like, copy=True)
