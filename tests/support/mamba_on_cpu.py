"""The functions of mamba_ssm and causal_conv1d, played on the CPU: the branch of a GPU then runs without one.

    calls = mamba_on_cpu.install(monkeypatch)
    …
    calls                       # ["causal_conv", "selective_scan", …], by the names in `mamba_packages.PACKAGES`

Each has the signature of the package's own (mamba_ssm 2.3.2, causal_conv1d 1.6.1) and computes token by token, in
float64, by the definition, after checking what the package's Python and C++ check. What it does with documents and
states follows the kernels: the numbers of documents are compared, what comes before the first token has number 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kenotron.kernels import causal_conv, mamba_packages, selective_scan, state_space_dual

INPUTS = (torch.float32, torch.float16, torch.bfloat16)


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels compute from now on, in fp32, too, where `packaged` would ask for half precision."""
    calls: list[str] = []

    def packaged(name: str, x: Tensor) -> Callable[..., Any]:
        calls.append(name)
        return partial(getattr(mamba_packages, name), KERNELS[name])

    for module in (causal_conv, selective_scan, state_space_dual):
        monkeypatch.setattr(module, "packaged", packaged)
    monkeypatch.setattr(state_space_dual, "PACKAGED", INPUTS)
    return calls


class _IgnoringGradient(torch.autograd.Function):
    """As `selective_scan_fn` gives its last state: it seems to have a gradient, and has none."""

    @staticmethod
    def forward(ctx: Any, state: Tensor) -> Tensor:
        return state.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        return torch.zeros_like(upstream[0])


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    not_played = (initial_states, return_final_states, final_states_out, activation)
    assert not_played == (None, False, None, None)
    (sequences, channels, length), width = x.shape, weight.shape[-1]
    assert {x.dtype, weight.dtype} <= {*INPUTS}
    assert weight.shape == (channels, width)
    assert 2 <= width <= 4
    channels_last = x.stride(1) == 1 and x.stride(2) > 1
    assert channels_last or x.stride(2) == 1
    if channels_last:
        assert channels % 8 == x.stride(2) % 8 == x.stride(0) % 8 == 0
    if bias is not None:
        assert (bias.dtype, bias.shape, bias.stride(-1)) == (weight.dtype, (channels,), 1)
    if seq_idx is not None:
        assert channels_last
        check_numbers(seq_idx, sequences, length)
    wide, taps = x.double(), weight.double()
    y = torch.zeros_like(wide) if bias is None else bias.double()[:, None].expand_as(wide)
    for back in range(min(width, length)):
        earlier = wide[:, :, : length - back] * taps[:, width - 1 - back, None]
        if seq_idx is not None:
            earlier = earlier * (seq_idx[:, back:] == seq_idx[:, : length - back])[:, None]
        y = y + torch.nn.functional.pad(earlier, (back, 0))
    return y.to(x.dtype)


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    assert (z, delta_bias, delta_softplus) == (None, None, False), "not played"
    (sequences, channels, length), n = u.shape, A.shape[1]
    assert u.dtype in INPUTS
    assert delta.dtype == B.dtype == C.dtype == u.dtype
    assert (A.dtype, A.shape, delta.shape) == (torch.float32, (channels, n), u.shape)
    assert n <= 256
    assert B.shape == C.shape == (sequences, n, length)
    h = u.new_zeros(sequences, channels, n, dtype=torch.float64)
    wide_u, dt, a, b, c = (each.double() for each in (u, delta, A, B, C))
    outputs = []
    for t in range(length):
        h = (dt[:, :, t, None] * a).exp() * h + (dt[:, :, t] * wide_u[:, :, t])[..., None] * b[:, None, :, t]
        outputs.append((h * c[:, None, :, t]).sum(-1))
    y = torch.stack(outputs, -1)
    if D is not None:
        assert (D.dtype, D.shape) == (torch.float32, (channels,))
        y = y + D.double()[:, None] * wide_u
    return (y.to(u.dtype), _IgnoringGradient.apply(h.float())) if return_last_state else y.to(u.dtype)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    assert (z, dt_bias, cu_seqlens, dt_softplus, dt_limit) == (None, None, None, False, (0.0, float("inf")))
    assert (return_varlen_states, state_dtype) == (False, None), "not played"
    (sequences, length, heads, head_dim), (groups, n) = x.shape, B.shape[2:]
    assert chunk_size & (chunk_size - 1) == 0
    assert heads % groups == 0
    assert B.shape == C.shape == (sequences, length, groups, n)
    assert B.dtype == C.dtype == x.dtype
    assert (dt.dtype, dt.shape) == (torch.float32, (sequences, length, heads))
    assert (A.dtype, A.shape) == (torch.float32, (heads,))
    if seq_idx is not None:
        check_numbers(seq_idx, sequences, length)
    wide, step, a = x.double(), dt.double(), A.double()
    b, c = (each.double().repeat_interleave(heads // groups, 2) for each in (B, C))
    h = x.new_zeros(sequences, heads, head_dim, n, dtype=torch.float64)
    if initial_states is not None:
        assert initial_states.shape == h.shape
        h = initial_states.double()
    number, outputs = torch.zeros(sequences, dtype=torch.int32), []
    for t in range(length):
        if seq_idx is not None:
            h = h * (seq_idx[:, t] == number)[:, None, None, None]
            number = seq_idx[:, t]
        added = (step[:, t, :, None] * wide[:, t])[..., None] * b[:, t, :, None]
        h = (step[:, t] * a).exp()[..., None, None] * h + added
        outputs.append((h * c[:, t, :, None]).sum(-1))
    y = torch.stack(outputs, 1)
    if D is not None:
        assert D.shape == (heads,)
        y = y + D.double()[:, None] * wide
    return (y.to(x.dtype), h.float()) if return_final_states else y.to(x.dtype)


def check_numbers(seq_idx: Tensor, sequences: int, length: int) -> None:
    """Of documents: int32, in order, none negative (causal_conv1d takes those for padding)."""
    assert (seq_idx.dtype, seq_idx.shape) == (torch.int32, (sequences, length))
    assert seq_idx.is_contiguous()
    assert int(seq_idx.min()) >= 0
    assert bool((seq_idx.diff(dim=1) >= 0).all())


KERNELS: dict[str, Callable[..., Any]] = {
    "causal_conv": causal_conv1d_fn,
    "selective_scan": selective_scan_fn,
    "state_space_dual": mamba_chunk_scan_combined,
}
