"""What the host waits for on a GPU that is not there (`kenotron.planner.stand_in`).

    device = stand_in.install()
    with stand_in.memoryless():
        with stand_in.HostWaits() as waits:
            train_step(run, batches)
        waits.sites                         # {"training.step:read waits for the device": 1}

What it waits for is counted by where it was asked for: reading a value, copying between devices other than from pinned
memory or to it, `synchronize`. Operators on the device with a result in one of `SLOW_DTYPES` are counted with them, and
so are reads of a copy that the device has yet to fill.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kenotron.planner.stand_in import NAME, install, memoryless, watched_by

__all__ = ["HostWaits", "install", "memoryless"]

OURS = re.compile(r"kenotron\.(?!planner\.)")
SLOW_DTYPES = (torch.float64, torch.complex64, torch.complex128)  # many times slower than float32 on accelerators


class HostWaits(TorchDispatchMode):
    """Within, `sites` counts what the host waits for, and slow dtypes: ``package.module:function what`` → times."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: Counter[str] = Counter()
        self.order: list[str] = []  # the same one by one, and collectives by their names
        self.coming: list[torch.Tensor] = []  # copies to the host since it waited last
        self.within = ExitStack()

    def count(self, what: str) -> None:
        """One more, asked for by the innermost function of ours."""
        if what in ("reads", "waits for the device"):
            self.coming.clear()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not OURS.match(frame.f_globals.get("__name__", "")):
            frame = frame.f_back
        where = f"{frame.f_globals['__name__'][9:]}:{frame.f_code.co_name}" if frame else "elsewhere"
        self.sites[f"{where} {what}"] += 1
        self.order.append(f"{where} {what}")

    def mark(self, queue: int) -> int:
        """A place in a queue, where nothing is counted."""
        return 0

    def wait(self, queue: int | None, mark: int) -> None:
        """A queue waits, or the host."""
        if queue is None:
            self.count("waits for the device")

    def launch(self, tensors: Sequence[torch.Tensor]) -> None:
        """A kernel in Triton."""

    def read(self, tensor: torch.Tensor) -> None:
        """The host reads a value."""
        if tensor.device.type == NAME:
            self.count("reads")
        elif any(tensor is copy for copy in self.coming):
            self.count("reads too early")

    def _tolist(self) -> Any:
        def tolist(tensor: torch.Tensor) -> Any:
            self.read(tensor)
            return np.ones(tuple(tensor.shape), float if tensor.is_floating_point() else int).tolist()

        return tolist

    def __enter__(self) -> HostWaits:
        self.within.enter_context(watched_by(self))
        self.within.enter_context(patch.object(FakeTensor, "tolist", self._tolist()))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.within.close()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if function.namespace == "c10d":
            self.order.append(function.overloadpacket.__name__)
        if function is aten._local_scalar_dense.default:
            self.read(args[0])
            return 1.0 if args[0].is_floating_point() else 1
        source, target = None, None
        if function is aten._to_copy.default:
            source, target = args[0], kwargs.get("device")
            blocking = not kwargs.get("non_blocking")
        elif function is aten.copy_.default:
            target, source = args[0].device, args[1]
            blocking = not (len(args) > 2 and args[2])
        if source is not None and target is not None and source.device.type != torch.device(target).type:
            pinned = getattr(source, "is_pinned_here", False)
            leaves = function is aten._to_copy.default and torch.device(target).type == "cpu"  # torch pins the copy
            if blocking or not (pinned or leaves):
                self.count(f"copies to {torch.device(target).type}")
            elif leaves:
                self.coming.append(out := function(*args, **kwargs))
                return out
        out = function(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == NAME and tensor.dtype in SLOW_DTYPES:
                self.count(f"computes in {str(tensor.dtype).removeprefix('torch.')}")
        return out
