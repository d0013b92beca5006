"""Record every storage that torch's operators allocate: its bytes, its lifetime, and the code that allocated it.

    with Ledger() as ledger:
        train_step(run, batches)
    ledger.peak()                 # Peak(bytes=…, of={"weights": …, "activations": …}, largest=[…])

It records real and fake tensors alike, so predictions can be measured by the same counter. A tensor from before counts
from the first operator that returns it or a view of it. Not recorded are temporary memory inside operators, workspaces
of libraries, and memory of Python and NumPy.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kenotron.kernels import attention, selective_scan

PLAIN = {Tensor, torch.nn.Parameter, FakeTensor}
LOGITS = "kernels.linear_cross_entropy"
MOMENTS = 240
WHOLE = attention.OPERATORS | selective_scan.OPERATORS


@dataclass(slots=True)
class Storage:
    """Bytes that were allocated at the moment `born` and freed at `died`, by Kénotron's function `site`.

    `backward`: allocated while autograd ran. `by_fsdp`: its category if FSDP2 allocated it. `kind`: its category set by
    `Ledger.name`.
    """

    size: int
    born: int
    site: str
    backward: bool
    by_fsdp: str | None
    kind: str | None = None
    died: float = float("inf")

    @property
    def category(self) -> str:
        """The category that it counts to."""
        if self.kind is not None:
            return self.kind
        if self.site.startswith(LOGITS):
            return "logits"
        if self.by_fsdp is not None or self.site.startswith("parallel."):
            return self.by_fsdp or "communication"
        if self.site.startswith("optim."):
            return "update"
        return "backward" if self.backward else "activations"


class Peak(NamedTuple):
    """The moment of the most live bytes: `of` by category and `largest` by (category, site), in bytes, largest first.

    `over_time`: the bytes of each category at up to `MOMENTS` moments, with equally many allocations and frees between.
    """

    bytes: int
    of: dict[str, int]
    largest: list[tuple[str, str, int]]
    over_time: dict[str, list[int]]


class Ledger(TorchDispatchMode):
    """A context manager that records all storages of a kind of device. Time is a count of allocations and frees."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = device
        self.storages: list[Storage] = []
        self.live: dict[int, Storage] = {}  # address of torch's storage → its record
        self.clock = 0
        self.held: dict[Any, tuple[int, list[Storage]]] = {}  # see `_whole`
        self.reads = patch.object(FakeTensor, "tolist", _ones)
        self.resizes = patch.object(torch.UntypedStorage, "resize_", self._resize(torch.UntypedStorage.resize_))

    def __enter__(self) -> Ledger:
        self.reads.start()
        self.resizes.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.resizes.stop()
        self.reads.stop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not PLAIN.issuperset(types):  # a DTensor has no memory: operators on its local tensor are dispatched as well
            return NotImplemented
        aten = torch.ops.aten
        if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # a shortcut, for two of five calls
        if function is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 1
        if function is aten.is_nonzero.default and isinstance(args[0], FakeTensor):
            return True
        if function.namespace == "kenotron" and (body := WHOLE.get(function.overloadpacket.__name__)):
            return self._whole(function, body, args)
        return self._record(function(*args, **(kwargs or {})))

    def name(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Set the category of the storages of `tensors`, unless it is set already."""
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)  # a DTensor's local tensor
            storage = None if local is None else self.live.get(local.untyped_storage()._cdata)
            if storage is not None:
                storage.kind = storage.kind or kind

    @property
    def bytes(self) -> int:
        """The bytes of all live storages."""
        return sum(storage.size for storage in self.live.values())

    def peak(self, since: int = 0) -> Peak:
        """Return the moment after `since` (a value of `clock`) with the most live bytes."""
        changes: defaultdict[float, list[tuple[str, int]]] = defaultdict(list)
        for storage in self.storages:
            changes[max(storage.born, since)].append((storage.category, storage.size))
            changes[max(storage.died, since)].append((storage.category, -storage.size))
        kinds: Counter[str] = Counter()
        most, of, moment, sums = 0, {}, float(since), []
        for at in sorted(at for at in changes if at <= self.clock):
            for kind, size in changes[at]:
                kinds[kind] += size
            sums.append(dict(kinds))
            if kinds.total() > most:
                most, of, moment = kinds.total(), dict(kinds.most_common()), at
        sites: Counter[tuple[str, str]] = Counter()
        for storage in self.storages:
            if storage.born <= moment < storage.died:
                sites[storage.category, storage.site] += storage.size
        sampled = sums[:: max(1, len(sums) // MOMENTS)]
        over_time = {kind: [bytes_of.get(kind, 0) for bytes_of in sampled] for kind in kinds}
        of = {kind: size for kind, size in of.items() if size}
        return Peak(most, of, [(*key, size) for key, size in sites.most_common()], over_time)

    def _record(self, out: Any) -> Any:
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type == self.device:
                storage = leaf.untyped_storage()
                if storage._cdata not in self.live:
                    self._born(storage._cdata, storage.nbytes())
                    weakref.finalize(storage, self._died, storage._cdata)
        return out

    def _born(self, address: int, size: int) -> None:
        if (caller := site_of_caller()) is None:
            return
        self.clock += 1
        site, by_fsdp = caller
        backward = torch._C._current_autograd_node() is not None
        self.live[address] = Storage(size, self.clock, site, backward, by_fsdp)
        self.storages.append(self.live[address])

    def _died(self, address: int) -> None:
        if address in self.live:
            self.clock += 1
            self.live.pop(address).died = self.clock

    def _whole(self, function: Any, body: Any, args: Any) -> Any:
        """Record an operator that torch calls as one: run its `body`, but only once for arguments of the same shapes.

        The body may loop over tokens. Later calls record the same temporary storages as the first, and their results.
        """
        key = function, *((value.shape, value.dtype) if isinstance(value, Tensor) else value for value in args)
        if key not in self.held:
            started, before = self.clock, len(self.storages)
            super().__enter__()
            out = body(*args)
            super().__exit__(None, None, None)
            self.held[key] = started, [storage for storage in self.storages[before:] if storage.died <= self.clock]
            return out
        started, storages = self.held[key]
        out = self._record(function(*args))
        later = self.clock - started
        self.storages += [replace(one, born=one.born + later, died=one.died + later) for one in storages]
        self.clock = max([self.clock, *(int(storage.died) + later for storage in storages)])
        return out

    def _resize(self, resize: Any) -> Any:
        """Wrap torch's `resize_`, with which FSDP2 frees and allocates the memory of gathered weights."""

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (record := self.live.get(storage._cdata)) is not None:
                self._died(storage._cdata)
                self._born(storage._cdata, size)
                self.live[storage._cdata].kind = record.kind
            return result

        return resized


def site_of_caller() -> tuple[str, str | None] | None:
    """Return Kénotron's innermost function, ``package.module:function``, and the category of memory if FSDP2 calls it.

    Returns None for tensors without memory in a real run: DTensor uses fake tensors to infer shapes.
    """
    frame: FrameType | None = sys._getframe(1)
    by_fsdp = None
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module == "torch.distributed.tensor._sharding_prop":
            return None
        if module.startswith("kenotron.") and not module.startswith("kenotron.planner."):
            return f"{module.removeprefix('kenotron.')}:{function}", by_fsdp
        if module.startswith("torch.distributed.fsdp.") and by_fsdp is None:
            by_fsdp = "gradients" if function == "to_accumulated_grad_if_needed" else "communication"
        frame = frame.f_back
    return "elsewhere", by_fsdp


def _ones(tensor: FakeTensor) -> Any:
    """Replace `tolist` of fake tensors, which have no values: return ones."""
    return np.ones(tuple(tensor.shape), float if tensor.is_floating_point() else int).tolist()
