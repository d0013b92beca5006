"""Matrix products, on CPUs with the fastest implementation.

fp32 products use oneDNN on AMD processors from Zen 5 on, because MKL, which torch calls, uses half of their vector
width. GFLOP/s on two cores of an EPYC, 1024 tokens of 768 times a matrix of 2048: 205 with MKL, 450 with oneDNN, and
205 -> 420, 218 -> 400 for the gradients of the two.

On CPUs without fast instructions for bf16 (`kernels.bfloat16`), it is multiplied in fp32 and rounded once, because
torch emulates it there: 1024 tokens of 128 times a matrix of 384 take 20.7 ms on one core of an EPYC with AVX2, and 1.2
this way.

oneDNN's operator, which Inductor also uses, is private to torch, returns new memory, and needs its first factor in
row-major order: for ``dy^T x`` one of the two is transposed first. All other products are torch's own; with
``model.kernels: torch`` all are.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.kernels.bfloat16 import bfloat16_is_fast
from kenotron.kernels.fused import chosen

ZEN_5 = 26  # AMD's family of processors; later ones have higher numbers
PART = 1 << 22  # elements of a chunk of a transposed product
SMALL = 1 << 20  # multiplications; with fewer, a call of oneDNN's operator costs as much as it saves


def has_onednn() -> bool:
    """Return whether this torch has oneDNN's operator."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x M^T + b`` ``[..., out]`` by oneDNN for x ``[..., in]``, matrix ``[out, in]``, bias ``[out]``."""
    if not (matrix.is_contiguous() or matrix.t().is_contiguous()):
        matrix = matrix.contiguous()  # with gaps, oneDNN would take a thousand times as long
    return torch.ops.mkldnn._linear_pointwise(x, matrix, bias, "none", [], "")


def is_zen_5(cpuinfo: str) -> bool:
    """Return whether Linux's /proc/cpuinfo describes an AMD processor with full-width 512-bit vectors."""
    family = re.search(r"^cpu family\s*:\s*(\d+)", cpuinfo, re.MULTILINE)
    return "AuthenticAMD" in cpuinfo and "avx512f" in cpuinfo and family is not None and int(family[1]) >= ZEN_5


_cpuinfo = Path("/proc/cpuinfo")  # read once: compiled blocks rely on a fixed kind of product
ONEDNN = torch.backends.mkl.is_available() and has_onednn() and _cpuinfo.exists() and is_zen_5(_cpuinfo.read_text())
EMULATED = not bfloat16_is_fast(torch.device("cpu"))  # bf16
_whole = True  # set by `backward_in_halves`


@contextmanager
def backward_in_halves(halves: bool) -> Iterator[None]:
    """Use torch's linears within the block if `halves`: a pipeline engine splits their backward into two halves."""
    global _whole
    before, _whole = _whole, not halves
    try:
        yield
    finally:
        _whole = before


def on_onednn(x: Tensor, matrix: Tensor) -> bool:
    """Return whether the product of x ``[..., in]`` and matrix ``[out, in]`` is computed by oneDNN."""
    suits = x.dtype == matrix.dtype == torch.float32 and x.device.type == "cpu" and chosen() != "torch"
    return ONEDNN and suits and x.numel() * matrix.shape[0] >= SMALL


def in_fp32(x: Tensor, matrix: Tensor) -> bool:
    """Return whether the product of x and matrix, both bf16, is computed in fp32 and rounded."""
    return EMULATED and x.dtype == matrix.dtype == torch.bfloat16 and x.device.type == "cpu" and chosen() != "torch"


def replaces_torch(x: Tensor, matrix: Tensor) -> bool:
    """Return whether the product of x ``[..., in]`` and matrix ``[out, in]`` is not torch's own."""
    return on_onednn(x, matrix) or in_fp32(x, matrix)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear`: ``x W^T + b`` ``[..., out]`` for x ``[..., in]``, weight ``[out, in]``, bias ``[out]``."""
    if _whole and replaces_torch(x, weight) and not torch.is_autocast_enabled("cpu"):
        return torch.ops.kenotron.rows_by_matrix(x, weight, bias)
    return F.linear(x, weight, bias)


def rows_by_matrix(x: Tensor, matrix: Tensor, out: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
    """Return ``x M^T`` ``[rows, out]`` for x ``[rows, in]``, matrix ``[out, in]``, in functions with their own
    backward.

    The result is in `out`, or in new memory if that is faster. With `onto` it is added to `onto`.
    """
    if replaces_torch(x, matrix):
        product: Tensor = torch.ops.kenotron.rows_by_matrix(x, matrix, None)
        return product if onto is None else onto.add_(product)
    return torch.mm(x, matrix.t(), out=out) if onto is None else onto.addmm_(x, matrix.t())


def rows_by_rows(y: Tensor, x: Tensor, out: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
    """Return ``y^T x`` ``[out, in]`` for y ``[rows, out]``, x ``[rows, in]``, in `out` if set, or added to `onto`."""
    if not replaces_torch(y, x.t()):
        return torch.mm(y.t(), x, out=out) if onto is None else onto.addmm_(y.t(), x)
    if onto is not None:
        return write_rows_by_rows(y, x, onto, add=True)
    return torch.ops.kenotron.rows_by_rows(y, x) if out is None else write_rows_by_rows(y, x, out)


def write_gradient(y: Tensor, x: Tensor, result: Tensor, add: bool) -> None:
    """Write ``y^T x`` to `result` of x's dtype or in fp32, or add it; on CUDA in fp32 inside the product."""
    narrow_on_cpu = x.device.type == "cpu" and x.dtype != torch.float32
    if narrow_on_cpu and (result.dtype != x.dtype or torch.get_num_threads() == 1):
        write_rows_by_rows(y, x, result, add)
    elif result.dtype == x.dtype:
        rows_by_rows(y, x, onto=result) if add else rows_by_rows(y, x, out=result)
    elif not rounds_once(y):
        result.add_(rows_by_rows(y, x)) if add else result.copy_(rows_by_rows(y, x))
    else:
        add_product(y, x, result) if add else torch.mm(y.t(), x, out_dtype=torch.float32, out=result)


def add_product(y: Tensor, x: Tensor, result: Tensor) -> None:
    """Add ``y^T x`` of half-precision factors to `result` in fp32, inside the product, on CUDA."""
    torch.addmm(result, y.t(), x, out_dtype=torch.float32, out=result)


def rounds_once(y: Tensor) -> bool:
    """Return whether a product of y in half precision can be in fp32: those of cuBLAS can, not yet when compiled."""
    return y.device.type == "cuda" and torch.version.hip is None and not torch.compiler.is_compiling()


def sum_of_products(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return ``dy_1 W_1 + dy_2 W_2 + …``, accumulated inside the products."""
    first, *rest = (grad.flatten(0, -2) for grad in grads)
    total = rows_by_matrix(first, weights[0].t())
    for grad, weight in zip(rest, weights[1:]):
        total = rows_by_matrix(grad, weight.t(), onto=total)
    return total.view(*grads[0].shape[:-1], -1)


def _of_weight(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype != x.dtype and rounds_once(x):
        return torch.mm(dy.t(), x, out_dtype=dtype)
    return rows_by_rows(dy, x).to(dtype)


def adds_inside(x: Tensor) -> bool:
    """Return whether `Linears` computes products of one x: in training on a GPU, where each sum and cast is a launch.

    Not those of a single linear: of the last one of a block, recomputation would repeat the product, since a function
    tells what it saves only after its forward pass.
    """
    eager = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return x.device.type != "cpu" and eager and _whole and chosen() != "torch"


class Exchange(NamedTuple):
    """What ranks that share linears do with x before the products and with dx after them: each returns what waits."""

    gather: Callable[[Tensor], Callable[[], Tensor]]
    reduce: Callable[[Tensor], Callable[[], Tensor]]
    keep: bool = True  # keeps the gathered x for backward, else it is gathered again


def itself(x: Tensor) -> Callable[[], Tensor]:
    """Return x, from which nothing has to be exchanged."""
    return lambda: x


ALONE = Exchange(itself, itself)


class Linears(torch.autograd.Function):
    """Computes ``x W^T + b`` for each W ``[out, in]``, then each b ``[out]`` or None, rounded to x's dtype.

    In backward, sums are made inside products, those of several ``dy W`` and over the rows of ``dy^T x``:

        start gathering x, if it is not kept     │  dx = dy_1 W_1 + dy_2 W_2 + …
        start summing dx over ranks              │  dW_i = dy_i^T x
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, *parameters: Any) -> Any:
        masters, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        weights, whole = [master.to(x.dtype) for master in masters], exchange.gather(x)()
        ctx.save_for_backward(whole if exchange.keep else x, *weights)
        ctx.exchange, ctx.dtypes = exchange, [master.dtype for master in masters]
        low = (None if bias is None else bias.to(x.dtype) for bias in biases)
        return tuple(linear(whole, weight, bias) for weight, bias in zip(weights, low))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, *weights), needs, exchange = ctx.saved_tensors, ctx.needs_input_grad, ctx.exchange
        whole = itself(x) if exchange.keep else exchange.gather(x)
        dx = exchange.reduce(sum_of_products(grads, weights)) if needs[0] else None
        rows, x = [dy.flatten(0, -2) for dy in grads], whole().flatten(0, -2)
        each = zip(rows, ctx.dtypes, needs[2:])
        of_weights = [_of_weight(dy, x, dtype) if need else None for dy, dtype, need in each]
        each = zip(rows, ctx.dtypes, needs[2 + len(rows) :])
        of_biases = [dy.sum(0, dtype=dtype) if need else None for dy, dtype, need in each]
        return None if dx is None else dx(), None, *of_weights, *of_biases


def _rows_by_matrix(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    if x.dtype == torch.float32:
        return onednn(x, matrix, bias)
    return F.linear(x.float(), matrix.float(), None if bias is None else bias.float()).to(x.dtype)


def _rows_by_rows(y: Tensor, x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        return _mm(y.t(), x).to(x.dtype)
    if _transposes_y(y, x):
        return onednn(y.t().contiguous(), x.t(), None)
    return write_rows_by_rows(y, x, y.new_empty(y.shape[1], x.shape[1]))


def _transposes_y(y: Tensor, x: Tensor) -> bool:
    return y.numel() <= x.numel() + y.shape[1] * x.shape[1]  # less than x and x^T y


def write_rows_by_rows(y: Tensor, x: Tensor, result: Tensor, add: bool = False) -> Tensor:
    """Write ``y^T x`` to `result`, or add it, in chunks, after a transpose of one factor.

    oneDNN's AMX product in bf16 is twice as slow if its first factor is transposed: y ``[2048, 8192]``, x ``[2048,
    384]``, 1 thread 26.9 ms → 15.8, 2 threads 9.7 → 9.5.
    """
    if _transposes_y(y, x):
        rows = max(1, PART // x.shape[1])
        parts = ((part, _mm(some.t().contiguous(), x)) for some, part in zip(y.split(rows, 1), result.split(rows)))
    else:
        columns = max(1, PART // y.shape[1])
        turned = x.t().contiguous().split(columns)
        parts = ((part, _mm(some, y).t()) for some, part in zip(turned, result.split(columns, 1)))
    for part, product in parts:
        part.add_(product) if add else part.copy_(product)
    return result


def _mm(a: Tensor, b: Tensor) -> Tensor:
    if in_fp32(a, b.t()):
        return torch.mm(a.float(), b.float())
    return onednn(a, b.t(), None) if on_onednn(a, b.t()) else torch.mm(a, b)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    first, second, *_ = inputs
    ctx.save_for_backward(first if ctx.needs_input_grad[1] else None, second if ctx.needs_input_grad[0] else None)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (x, weight), rows = ctx.saved_tensors, dy.reshape(-1, dy.shape[-1])
    dx = None if weight is None else linear(dy, weight.t())
    d_weight = None if x is None else rows_by_rows(rows, x.reshape(-1, x.shape[-1]))
    return dx, d_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def _backward_of_rows(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    y, x = ctx.saved_tensors
    return None if x is None else linear(x, d), None if y is None else linear(y, d.t())


# Custom operators, which torch.compile calls as a whole (see kernels/attention.py).
_library = torch.library.Library("kenotron", "FRAGMENT")
_library.define("rows_by_matrix(Tensor x, Tensor matrix, Tensor? bias) -> Tensor")
_library.define("rows_by_rows(Tensor y, Tensor x) -> Tensor")
_library.impl("rows_by_matrix", _rows_by_matrix, "CPU")
_library.impl("rows_by_rows", _rows_by_rows, "CPU")
torch.library.register_fake(
    "kenotron::rows_by_matrix", lambda x, matrix, bias: x.new_empty(*x.shape[:-1], matrix.shape[0]), lib=_library
)
torch.library.register_fake("kenotron::rows_by_rows", lambda y, x: y.new_empty(y.shape[1], x.shape[1]), lib=_library)
torch.library.register_autograd("kenotron::rows_by_matrix", _backward, setup_context=_keep, lib=_library)
torch.library.register_autograd("kenotron::rows_by_rows", _backward_of_rows, setup_context=_keep, lib=_library)
