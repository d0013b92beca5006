"""Matrix products, in fp32 through oneDNN on the CPUs where that is faster than MKL, which torch calls.

These are AMD's from Zen 5 on: MKL uses half of their vector width. GFLOP/s on two cores of an EPYC, MKL and oneDNN:

    tokens, in, out       x W^T         dy W          dy^T x
    4096, 256, 768        215 -> 490    212 -> 490    206 -> 360
    1024, 768, 2048       205 -> 450    205 -> 420    218 -> 420

oneDNN's operator reads its first matrix row by row: for ``dy^T x`` the narrower of the two is transposed before. It
returns new memory. On other CPUs and in other dtypes everything here is torch's own product; ``KENOTRON_KERNELS=torch``
makes it so everywhere. The operator is private to torch, which Inductor calls for the same end.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.kernels.fused import KEY

ZEN_5 = 26  # AMD's family of processors; later ones have higher numbers
SMALL = 1 << 20  # multiplications; with fewer, a call of oneDNN's operator costs as much as it saves


def has_onednn() -> bool:
    """Whether this torch has the operator."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """x ``[..., in]``, matrix ``[out, in]`` (of any strides, or packed), bias ``[out]`` → ``x M^T + b``."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, matrix, bias, "none", [], "")
    return y


def is_zen_5(cpuinfo: str) -> bool:
    """Whether Linux's /proc/cpuinfo describes one of AMD's processors with vectors of 512 bits all the way."""
    family = re.search(r"^cpu family\s*:\s*(\d+)", cpuinfo, re.MULTILINE)
    return "AuthenticAMD" in cpuinfo and "avx512f" in cpuinfo and family is not None and int(family[1]) >= ZEN_5


def _onednn_is_faster() -> bool:
    path = Path("/proc/cpuinfo")
    if os.environ.get(KEY) == "torch" or not torch.backends.mkl.is_available() or not path.exists():
        return False
    return has_onednn() and is_zen_5(path.read_text())


ONEDNN = _onednn_is_faster()  # a constant: a compiled block contains one of the two


def on_onednn(x: Tensor, matrix: Tensor) -> bool:
    """Whether the product of x ``[..., in]`` and matrix ``[out, in]`` is computed by oneDNN here."""
    return (
        ONEDNN
        and x.dtype == matrix.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() * matrix.shape[0] >= SMALL
    )


def compiles_for_rows(dtype: torch.dtype) -> bool:
    """Whether a CPU's first product with a number of rows takes longer: oneDNN compiles a kernel for it."""
    return dtype.itemsize == 2 or (ONEDNN and dtype == torch.float32)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: x ``[..., in]``, weight ``[out, in]``, bias ``[out]`` → ``x W^T + b``, ``[..., out]``."""
    if on_onednn(x, weight) and not torch.is_autocast_enabled("cpu"):
        y: Tensor = torch.ops.kenotron.rows_by_matrix(x, weight, bias)
        return y
    return F.linear(x, weight, bias)


def rows_by_matrix(x: Tensor, matrix: Tensor, out: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
    """x ``[rows, in]``, matrix ``[out, in]`` → ``x M^T``, ``[rows, out]``, for functions with a backward of their own.

    The result is in `out`, or in memory of its own where that is faster. With `onto` it is added to that.
    """
    if on_onednn(x, matrix):
        product: Tensor = torch.ops.kenotron.rows_by_matrix(x, matrix, None)
        return product if onto is None else onto.add_(product)
    return torch.mm(x, matrix.t(), out=out) if onto is None else onto.addmm_(x, matrix.t())


def rows_by_rows(y: Tensor, x: Tensor, out: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
    """y ``[rows, out]``, x ``[rows, in]`` → ``y^T x``, ``[out, in]``; `out` and `onto` as of `rows_by_matrix`."""
    if on_onednn(y, x.t()):
        product: Tensor = torch.ops.kenotron.rows_by_rows(y, x)
        return product if onto is None else onto.add_(product)
    return torch.mm(y.t(), x, out=out) if onto is None else onto.addmm_(y.t(), x)


def _transposed_first(y: Tensor, x: Tensor) -> Tensor:
    if y.shape[1] <= x.shape[1]:
        return onednn(y.t().contiguous(), x.t(), None)
    return onednn(x.t().contiguous(), y.t(), None).t().contiguous()


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    for_x, for_weight, for_bias = ctx.needs_input_grad
    rows = dy.flatten(0, -2)
    dx = linear(dy, weight.t()) if for_x else None
    d_weight = rows_by_rows(rows, x.flatten(0, -2)) if for_weight else None
    return dx, d_weight, rows.sum(0) if for_bias else None


# Operators of our own: torch.compile calls them as they are (see kernels/attention.py).
_library = torch.library.Library("kenotron", "FRAGMENT")
_library.define("rows_by_matrix(Tensor x, Tensor matrix, Tensor? bias) -> Tensor")
_library.define("rows_by_rows(Tensor y, Tensor x) -> Tensor")
_library.impl("rows_by_matrix", onednn, "CPU")
_library.impl("rows_by_rows", _transposed_first, "CPU")
torch.library.register_fake(
    "kenotron::rows_by_matrix", lambda x, matrix, bias: x.new_empty(*x.shape[:-1], matrix.shape[0]), lib=_library
)
torch.library.register_fake("kenotron::rows_by_rows", lambda y, x: y.new_empty(y.shape[1], x.shape[1]), lib=_library)
torch.library.register_autograd("kenotron::rows_by_matrix", _backward, setup_context=_keep, lib=_library)
