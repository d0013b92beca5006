"""Every storage that torch's operators make: its bytes, its life, and what made it.

    with Ledger() as ledger:
        train_step(run, batches)
    ledger.peak()                 # Peak(bytes=…, of={"weights": …, "activations": …}, largest=[…])

It follows real tensors and fake ones alike, so what is predicted can be measured by the same counter. A tensor of
before counts from when an operator first returns it or a view of it. Not seen: memory that operators use inside them,
libraries' workspaces and what Python and NumPy hold.
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
    """Bytes that were allocated at the moment `born` and freed at `died`. `site`: the function of ours that did it.

    `backward`: while autograd ran. `by_fsdp`: what it is if FSDP2 made it. `kind`: what else is known (`Ledger.name`).
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
        """What it is counted as."""
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
    """The moment of the largest sum: `of` by category and `largest` by (category, site), in bytes, largest first.

    `over_time`: the bytes of each category at up to `MOMENTS` moments, as many allocations and releases apart.
    """

    bytes: int
    of: dict[str, int]
    largest: list[tuple[str, str, int]]
    over_time: dict[str, list[int]]


class Ledger(TorchDispatchMode):
    """Within, all storages of a kind of device are followed. Time is a count of allocations and releases."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = device
        self.storages: list[Storage] = []
        self.live: dict[int, Storage] = {}  # by the address of torch's storage
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
        if not PLAIN.issuperset(types):  # a DTensor has no memory: the operators on its local tensor come by themselves
            return NotImplemented
        aten = torch.ops.aten
        if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of five calls
        if function is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 1
        if function is aten.is_nonzero.default and isinstance(args[0], FakeTensor):
            return True
        if function.namespace == "kenotron" and (body := WHOLE.get(function.overloadpacket.__name__)):
            return self._whole(function, body, args)
        return self._seen(function(*args, **(kwargs or {})))

    def name(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Tell what the storages of `tensors` are; the first name stays."""
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
            storage = None if local is None else self.live.get(local.untyped_storage()._cdata)
            if storage is not None:
                storage.kind = storage.kind or kind

    @property
    def bytes(self) -> int:
        """Those of the storages that live now."""
        return sum(each.size for each in self.live.values())

    def peak(self, since: int = 0) -> Peak:
        """The moment after `since` (a value of `clock`) at which most bytes lived."""
        changes: defaultdict[float, list[tuple[str, int]]] = defaultdict(list)
        for each in self.storages:
            changes[max(each.born, since)].append((each.category, each.size))
            changes[max(each.died, since)].append((each.category, -each.size))
        kinds: Counter[str] = Counter()
        most, of, moment, sums = 0, {}, float(since), []
        for at in sorted(at for at in changes if at <= self.clock):
            for kind, size in changes[at]:
                kinds[kind] += size
            sums.append(dict(kinds))
            if kinds.total() > most:
                most, of, moment = kinds.total(), dict(kinds.most_common()), at
        sites: Counter[tuple[str, str]] = Counter()
        for each in self.storages:
            if each.born <= moment < each.died:
                sites[each.category, each.site] += each.size
        some = sums[:: max(1, len(sums) // MOMENTS)]
        over_time = {kind: [each.get(kind, 0) for each in some] for kind in kinds}
        of = {kind: size for kind, size in of.items() if size}
        return Peak(most, of, [(*key, size) for key, size in sites.most_common()], over_time)

    def _seen(self, out: Any) -> Any:
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.device.type == self.device:
                storage = each.untyped_storage()
                if storage._cdata not in self.live:
                    self._born(storage._cdata, storage.nbytes())
                    weakref.finalize(storage, self._died, storage._cdata)
        return out

    def _born(self, address: int, size: int) -> None:
        if (found := site_of_caller()) is None:
            return
        self.clock += 1
        site, by_fsdp = found
        backward = torch._C._current_autograd_node() is not None
        self.live[address] = Storage(size, self.clock, site, backward, by_fsdp)
        self.storages.append(self.live[address])

    def _died(self, address: int) -> None:
        if address in self.live:
            self.clock += 1
            self.live.pop(address).died = self.clock

    def _whole(self, function: Any, body: Any, args: Any) -> Any:
        """An operator that torch calls whole: its `body` is followed once for arguments of the same shapes.

        It may loop over tokens. Later calls hold what the first one held besides its results, and beside their own.
        """
        key = function, *((each.shape, each.dtype) if isinstance(each, Tensor) else each for each in args)
        if key not in self.held:
            begun, before = self.clock, len(self.storages)
            super().__enter__()
            out = body(*args)
            super().__exit__(None, None, None)
            self.held[key] = begun, [each for each in self.storages[before:] if each.died <= self.clock]
            return out
        begun, storages = self.held[key]
        out = self._seen(function(*args))
        later = self.clock - begun
        self.storages += [replace(each, born=each.born + later, died=each.died + later) for each in storages]
        self.clock = max([self.clock, *(int(each.died) + later for each in storages)])
        return out

    def _resize(self, resize: Any) -> Any:
        """FSDP2 frees and allocates the memory of weights that it gathers by the size of their storage."""

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            if (known := self.live.get(storage._cdata)) is not None:
                self._died(storage._cdata)
                self._born(storage._cdata, size)
                self.live[storage._cdata].kind = known.kind
            return done

        return resized


def site_of_caller() -> tuple[str, str | None] | None:
    """``package.module:function`` of the innermost function of ours, and what FSDP2 makes if that calls it.

    None for a tensor that has no memory in a run either: DTensor asks fake ones for the shapes of results.
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
    """What the host reads of numbers that are not there."""
    return np.ones(tuple(tensor.shape), float if tensor.is_floating_point() else int).tolist()
