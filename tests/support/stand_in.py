"""An accelerator that computes nothing: tensors without memory on a device of its own, on any machine.

    device = stand_in.install()
    with stand_in.memoryless():
        …                                   # tensors of two devices in one operator are an error, as on a GPU
        with stand_in.HostWaits() as waits:
            train_step(run, batches)
        waits.sites                         # {"training.step:read waits for the device": 1}

Fake tensors have shapes, dtypes and devices, and no values: an operator whose result's shape depends on values is an
error, because on a GPU the host waits for it. What else it waits for is counted by where it was asked for: reading a
value, copying between devices other than from pinned memory or to it, `synchronize`. Operators on the device with a
result in one of `SLOW_DTYPES` are counted with them, and so are reads of a copy that the device has yet to fill.

torch's backend for devices in Python is experimental; it is used here alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kenotron.optim import matrices, matrix_owners

NAME = "standin"
SLOW_DTYPES = (torch.float64, torch.complex64, torch.complex128)  # many times slower than float32 on accelerators
_waits: list[HostWaits] = []  # those that count at present


class Stream:
    """A queue of a device that has none."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def wait_stream(self, other: Any = None) -> None:
        """The device waits, not the host."""

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> Event:
        """A place in the queue."""
        return event or Event()

    def synchronize(self, *args: Any) -> None:
        """The host waits."""
        for waits in _waits:
            waits.count("waits for the device")


class Event(Stream):
    """A place in a queue."""

    record = wait = Stream.wait_stream

    def query(self) -> bool:
        """Whether the queue is past it."""
        return True


class _Module(backend_registration._DummyBackendModule):
    """What `torch.cuda` is to CUDA, as far as FSDP2, torch's pipelines and its recomputation ask."""

    Stream, Event, synchronize = Stream, Event, staticmethod(Stream().synchronize)

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, *args: Any) -> None: ...

    def current_stream(self, *args: Any) -> Stream:
        return Stream()

    def stream(self, stream: Stream) -> Any:
        return contextlib.nullcontext()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, *args: Any) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, *args: Any) -> None: ...


def install() -> torch.device:
    """Register the device, once a process. Backward runs on the caller's thread, where fake tensors are known."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    torch.autograd.set_multithreading_enabled(False)
    return torch.device(NAME, 0)


@cache
def _values_unknown() -> FakeTensorMode:
    """One for the process: tables that modules keep belong to it."""
    return FakeTensorMode()


@contextlib.contextmanager
def memoryless() -> Iterator[None]:
    """Within, tensors have no memory."""
    from torch.optim import adam, adamw, optimizer

    devices = [*optimizer._get_fused_kernels_supported_devices(), NAME]
    with contextlib.ExitStack() as stack:
        for module in (adam, adamw, optimizer):
            if hasattr(module, "_get_fused_kernels_supported_devices"):
                name = "_get_fused_kernels_supported_devices"
                stack.enter_context(patch.object(module, name, lambda: devices))
        stack.enter_context(patch.object(FakeTensorMode, "avoid_device_init", True))  # torch.tensor(…, device=…)
        stack.enter_context(patch.object(nn.Module, "_apply", _apply))
        stack.enter_context(patch.object(torch.Tensor, "pin_memory", _pinned))
        stack.enter_context(patch.object(FakeTensor, "record_stream", lambda tensor, stream: None, create=True))
        stack.enter_context(patch.object(FakeTensorMode, "__deepcopy__", lambda mode, memo: mode, create=True))
        stack.enter_context(patch.object(DeviceMesh, "mesh", property(_with_values(DeviceMesh.mesh.fget))))
        numbering_ranks = ((DeviceMesh, "__init__"), (matrix_owners, "_places"), (matrices, "mesh_group"))
        for place, name in numbering_ranks:
            stack.enter_context(patch.object(place, name, _with_values(getattr(place, name))))
        stack.enter_context(_values_unknown())
        yield


def _with_values(function: Any) -> Any:
    """`function` of tensors that have values: those that number the ranks of a mesh."""

    def call(*args: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **options)

    return call


def _apply(module: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` (which `to` and `to_empty` call) by replacing parameters: torch cannot swap fake ones."""
    for child in module.children():
        child._apply(change)
    for name, old in module._parameters.items():
        if old is not None:
            module._parameters[name] = nn.Parameter(change(old), old.requires_grad)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else change(buffer)
    return module


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    tensor.is_pinned_here = True  # type: ignore[attr-defined]
    return tensor


class HostWaits(TorchDispatchMode):
    """Within, `sites` counts what the host waits for, and slow dtypes: ``package.module:function what`` → times."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: Counter[str] = Counter()
        self.order: list[str] = []  # the same one by one, and collectives by their names
        self.coming: list[torch.Tensor] = []  # copies to the host since it waited last
        self.tolist = patch.object(FakeTensor, "tolist", self._tolist())

    def count(self, what: str) -> None:
        """One more, asked for by the innermost function of ours."""
        if what in ("reads", "waits for the device"):
            self.coming.clear()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("kenotron."):
            frame = frame.f_back
        where = f"{frame.f_globals['__name__'][9:]}:{frame.f_code.co_name}" if frame else "elsewhere"
        self.sites[f"{where} {what}"] += 1
        self.order.append(f"{where} {what}")

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
        _waits.append(self)
        self.tolist.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.tolist.stop()
        _waits.remove(self)

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
