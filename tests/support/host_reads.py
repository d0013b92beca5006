"""Counts how often Python reads a tensor's value, which on an accelerator makes the host wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select")
READS = {getattr(torch.ops.aten, name).default for name in NAMES}


class HostReads(TorchDispatchMode):
    """Within, `count` is the number of reads: of the operators `READS`, which `item`, `bool` and `float` call, and
    of the methods `tolist`, `numpy` and `cpu`, which call none on a CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.patches = [patch.object(torch.Tensor, name, self._counted(name)) for name in ("tolist", "numpy", "cpu")]

    def _counted(self, name: str) -> Callable[..., Any]:
        plain = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return plain(tensor, *args, **kwargs)

        return read

    def __enter__(self) -> HostReads:
        for each in self.patches:
            each.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for each in self.patches:
            each.stop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in READS
        return function(*args, **(kwargs or {}))
