"""A simulated GPU: tensors without memory on a separate device, on any machine.

    device = stand_in.install()
    with stand_in.memoryless():
        …                                   # tensors of two devices in one operator are an error, as on a GPU

Fake tensors have shapes, dtypes and devices, but no values: an operator whose result's shape depends on values is an
error, because on a GPU the host would wait for it.

torch's backend for devices in Python is experimental; only this module uses it.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any, ClassVar, Protocol
from unittest.mock import patch

import torch
import torch._meta_registrations as shapes
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import backend_registration

from kenotron.kernels import products
from kenotron.kernels.attentions import choice, packed
from kenotron.kernels.attentions.choice import DeviceFacts
from kenotron.optim import matrices, matrix_owners

NAME = "standin"
INSTALLED = frozenset({"triton", "flash_3", "flash_4"})  # on the GPU, wherever it is planned for
FLEX = choice.IMPLEMENTATIONS["flex_attention"]._replace(function=f"{__name__}.flex")


class Watcher(Protocol):
    """Receives the events of the device's queues, of which 0 is the default. See `trace.Trace`."""

    def mark(self, queue: int) -> int:
        """Record a position in a queue, and return its number."""

    def wait(self, queue: int | None, mark: int) -> None:
        """Record that a queue, or the host (None), waits for a position."""

    def launch(self, tensors: Sequence[Tensor]) -> None:
        """Record the launch of a Triton kernel with these arguments."""


_watchers: list[Watcher] = []


@contextlib.contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Send events of the device's queues in the block to the `watcher`."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


class Event:
    """A position in a queue, as `torch.cuda.Event`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.marks: list[int] = []  # one for each watcher

    def record(self, stream: StandInStream | None = None) -> Event:
        """Set this event to the queue's current position."""
        self.marks = [watcher.mark((stream or StandInStream.current).number) for watcher in _watchers]
        return self

    def wait(self, stream: StandInStream | None = None) -> None:
        """Make the queue wait for this event."""
        (stream or StandInStream.current).wait_event(self)

    def synchronize(self) -> None:
        """Make the host wait for this event."""
        for watcher, mark in zip(_watchers, self.marks):
            watcher.wait(None, mark)


class StandInStream:
    """A queue of the simulated device, as `torch.cuda.Stream`."""

    current: ClassVar[StandInStream]
    numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, *args: Any, **options: Any) -> None:
        self.number = next(self.numbers)

    def wait_event(self, event: Event) -> None:
        """Make this queue wait for an event; the host does not wait."""
        for watcher, mark in zip(_watchers, event.marks):
            watcher.wait(self.number, mark)

    def wait_stream(self, other: StandInStream) -> None:
        """Make this queue wait for the other queue's work; the host does not wait."""
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Record and return an event at the queue's current position."""
        return (event or Event()).record(self)

    def synchronize(self, *args: Any) -> None:
        """Make the host wait for the queue's work."""
        self.record_event().synchronize()


StandInStream.current = _DEFAULT = StandInStream()


def current_queue() -> int:
    """Return the number of the queue that operators use."""
    return StandInStream.current.number


class _Module(backend_registration._DummyBackendModule):
    """The device's counterpart of `torch.cuda`, as far as FSDP2, torch's pipelines and its recomputation use it."""

    Stream, Event, synchronize = StandInStream, Event, staticmethod(_DEFAULT.synchronize)

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, *args: Any) -> None: ...

    def current_stream(self, *args: Any) -> Any:
        return StandInStream.current

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, StandInStream.current = StandInStream.current, stream
        try:
            yield
        finally:
            StandInStream.current = before

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, *args: Any) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, *args: Any) -> None: ...


def install() -> torch.device:
    """Register the device, once per process. Backward runs on the caller's thread, on which fake tensors are active."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    torch.autograd.set_multithreading_enabled(False)
    return torch.device(NAME, 0)


_grouped: Any = shapes._meta_grouped_mm_common


@cache
def _values_unknown() -> FakeTensorMode:
    """Return the process's FakeTensorMode: there is only one, to which tables that modules cache belong."""
    return FakeTensorMode()


@contextlib.contextmanager
def memoryless() -> Iterator[None]:
    """Make tensors without memory in the block."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param
    from torch.optim import adam, adamw, optimizer

    devices = [*optimizer._get_fused_kernels_supported_devices(), NAME]
    with contextlib.ExitStack() as stack:
        for module in (adam, adamw, optimizer):
            if hasattr(module, "_get_fused_kernels_supported_devices"):
                name = "_get_fused_kernels_supported_devices"
                stack.enter_context(patch.object(module, name, lambda: devices))
        stack.enter_context(patch.object(FakeTensorMode, "avoid_device_init", True))  # torch.tensor(…, device=…)
        stack.enter_context(patch.object(nn.Module, "_apply", _apply))
        stack.enter_context(patch.object(Tensor, "pin_memory", _pinned))
        stack.enter_context(patch.object(FakeTensor, "record_stream", lambda tensor, stream: None, create=True))
        stack.enter_context(patch.object(FakeTensorMode, "__deepcopy__", lambda mode, memo: mode, create=True))
        stack.enter_context(patch.object(DeviceMesh, "mesh", property(_with_values(vars(DeviceMesh)["mesh"].fget))))
        numbering_ranks = ((DeviceMesh, "__init__"), (matrix_owners, "_places"), (matrices, "mesh_group"))
        for place, name in numbering_ranks:
            stack.enter_context(patch.object(place, name, _with_values(getattr(place, name))))
        stack.enter_context(patch.object(_fsdp_param, "_chunk_with_empty", _Chunks))
        stack.enter_context(patch.object(_fsdp_collectives, "torch", _TorchOfCollectives()))
        stack.enter_context(_values_unknown())
        yield


@contextlib.contextmanager
def kernels_of_a_gpu(facts: DeviceFacts) -> Iterator[None]:
    """Give the device the kernels of a GPU with such `facts` in the block: Triton kernels and flash attention."""
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    vars(language).update(constexpr=object)
    vars(triton).update(jit=_Launch, language=language, cdiv=lambda a, b: -(-a // b))
    vars(triton).update(next_power_of_2=lambda number: 1 << (number - 1).bit_length())
    with (
        _modules({"triton": triton, "triton.language": language}, "kenotron.kernels.triton."),
        patch.object(choice, "facts_of", lambda device: facts._replace(installed=INSTALLED)),
        patch.object(F, "scaled_dot_product_attention", _flash),
        patch.object(shapes, "_meta_grouped_mm_common", _grouped_of_any_dtype),
        patch.dict(choice.IMPLEMENTATIONS, flex_attention=FLEX),
        patch.object(products, "rounds_once", lambda y: facts.vendor == "nvidia"),
        patch.object(products, "add_product", _product),  # which torch 2.11 has no shapes for
        patch.object(packed, "activate", lambda version: None),  # the stand-in's flash attention is that of any version
    ):
        yield


def _product(y: Tensor, x: Tensor, result: Tensor) -> None:
    """Take the place of `add_product`; that it reads `result` is not counted."""
    torch.mm(y.t(), x, out_dtype=result.dtype, out=result)


@contextlib.contextmanager
def _modules(modules: dict[str, ModuleType], importers: str) -> Iterator[None]:
    """Replace `modules` in sys.modules in the block; modules whose names begin with `importers` are imported again."""

    def forget() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name in modules or name.startswith(importers)]
        return {name: sys.modules.pop(name) for name in names}

    before = forget()
    sys.modules.update(modules)
    try:
        yield
    finally:
        forget()
        sys.modules.update(before)


class _Launch:
    """A Triton kernel whose launches compute nothing, as the tensors that they would fill exist already."""

    def __init__(self, function: Any) -> None: ...

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return _launch


def _launch(*args: Any, **options: Any) -> None:
    tensors = [argument for argument in args if isinstance(argument, Tensor)]
    for watcher in _watchers:
        watcher.launch(tensors)


def _flash(q: Tensor, k: Tensor, v: Tensor, *, scale: float, **options: Any) -> Tensor:
    """Call the flash kernel, which stores no matrix of scores; with a custom mask, for all pairs of tokens."""
    causal = options.get("attn_mask") is None
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[0]
    assert isinstance(out, Tensor)
    return out


def _grouped_of_any_dtype(a: Tensor, b: Tensor, *args: Any, **options: Any) -> Tensor:
    """Call torch's shape function of grouped products, which supports only bf16, unlike the kernels."""
    return _grouped(a.bfloat16(), b.bfloat16(), *args, **options).to(a.dtype)


def flex(*args: Any, softcap: float | None = None, **options: Any) -> Tensor:
    """Replace flex_attention, which cannot be compiled here, by the flash kernel with a window, of equal memory."""
    return packed.torch_flash(*args, **options)


def _with_values(function: Any) -> Any:
    """Wrap a function that numbers the ranks of a mesh, to run with real tensors, whose values it needs."""

    def call(*args: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **options)

    return call


def _apply(module: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
    """Replace `nn.Module._apply`, used by `to` and `to_empty`: make new parameters, as torch cannot swap fake ones."""
    for child in module.children():
        child._apply(change)
    for name, old in module._parameters.items():
        if old is not None:
            module._parameters[name] = nn.Parameter(change(old), old.requires_grad)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else change(buffer)
    return module


def _pinned(tensor: Tensor) -> Tensor:
    tensor.is_pinned_here = True  # type: ignore[attr-defined]
    return tensor


class _Chunks(Sequence[Tensor]):
    """A parameter's chunks for FSDP2, computed on access, as FSDP2 reads only the rank's own and the first.

    With 8,192 ranks, lists of all chunks would take 200 s for an 8B model.
    """

    def __init__(self, tensor: Tensor, parts: int, dim: int) -> None:
        self.tensor, self.parts, self.dim = tensor, parts, dim
        self.size = -(-tensor.shape[dim] // parts)

    def __len__(self) -> int:
        return self.parts

    def __getitem__(self, number: Any) -> Any:
        begin = min(number * self.size, self.tensor.shape[self.dim])
        return self.tensor.narrow(self.dim, begin, min(self.size, self.tensor.shape[self.dim] - begin))


class _TorchOfCollectives:
    """torch for FSDP2's collectives, with chunks as a single view that has a dimension for the ranks.

    The collectives only concatenate the chunks of a tensor, and lists of 1,280 views took a third of the time.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def chunk(self, tensor: Tensor, parts: int, dim: int) -> Tensor:
        return tensor.unflatten(dim, (parts, -1)).movedim(dim, 0)

    def cat(self, chunks: Tensor, dim: int, out: Tensor | None = None) -> Tensor:
        moved = chunks.movedim(0, dim)
        if out is None:
            return moved.clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)
        return out.unflatten(dim, (len(chunks), -1)).copy_(moved)
