"""Mamba's layer: a short convolution and a selective scan, gated (Gu & Dao 2023, arXiv 2312.00752, section 3.4).

    x ─ norm ─┬─ in_proj_x ─ conv1d ─ silu ─┬────────────────────── scan ─ * ─ out_proj ─(+)─ x
              │                             └─ x_proj ─ dt, B, C ───┘      │
              └─ in_proj_z ───────────────────────────────── silu ─────────┘

Every channel is a separate recurrence; only x_proj mixes channels, so a tensor-parallel rank holds some channels, and
the ranks sum the outputs of their shards of x_proj. Channel counts are read off the local weights.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron.kernels.causal_conv import causal_conv
from kenotron.kernels.products import linear
from kenotron.kernels.selective_scan import scan_by_chunks, selective_scan
from kenotron.kernels.swiglu import swiglu
from kenotron.models.blocks.linear import Linear
from kenotron.models.blocks.recurrence import document_starts, fold, inputs_before, kept, recall, remember, unfold
from kenotron.models.context import Context


class MixerBlock(nn.Module):
    """``x + mixer(norm(x))``, x ``[tokens, hidden]``; with `residual_in_fp32` x is fp32 in any compute dtype.

    `reads` names the mixer's arguments besides x: "ctx" for a recurrence, which needs no positions, also "positions"
    for attention, and none for a feed-forward.
    """

    def __init__(
        self, norm: nn.Module, mixer: nn.Module, residual_in_fp32: bool, reads: tuple[str, ...] = ("ctx",)
    ) -> None:
        super().__init__()
        self.norm, self.mixer = norm, mixer
        self.residual_in_fp32, self.reads = residual_in_fp32, reads
        self.compute_dtype = torch.float32  # set by the decoder

    def forward(self, x: Tensor, positions: Any, ctx: Context) -> Tensor:
        """Return the next hidden states; `positions` are the output of `Family.positions`."""
        x = x.float() if self.residual_in_fp32 else x
        inputs = {"positions": positions, "ctx": ctx}
        return x + self.mixer(self.norm(x).to(self.compute_dtype), *(inputs[name] for name in self.reads))


class CausalConv(nn.Module):
    """A convolution of each channel over the last `width` tokens, then SiLU.

    `together`: the number of adjacent channels that tensor parallelism keeps on one rank.
    """

    def __init__(self, channels: int, width: int, bias: bool, together: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.together = together

    def forward(self, x: Tensor, starts: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x convolved, ``[sequences, length, channels]``, and the last inputs as the next state."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y, state = causal_conv(x, self.weight.to(x.dtype), bias, starts, state)
        return F.silu(y), state

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Return the FLOPs of one token's forward pass."""
        return 2.0 * self.weight.numel()


class TimeSteps(Linear):
    """The time step of each channel at a token: softplus of a low-rank projection, in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Return time steps ``[tokens, channels]`` for x ``[tokens, rank]``."""
        assert self.bias is not None
        return F.softplus(linear(x, self.weight.to(x.dtype)).float() + self.bias.to(x.dtype).float())


class ChannelScan(nn.Module):
    """The selective scan with its weights: decay rates ``exp(A_log)`` of every channel and state, and the skip D."""

    def __init__(self, channels: int, state_size: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(channels, state_size))
        self.D = nn.Parameter(torch.empty(channels))

    def forward(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, starts: Tensor | None, state: Tensor | None, ctx: Context
    ) -> tuple[Tensor, Tensor]:
        """Call `kernels.selective_scan`. Rates are rounded to x's dtype, like all weights, and then used in fp32."""
        rates, skip = -self.A_log.to(x.dtype).float().exp(), self.D.to(x.dtype)
        if ctx.passing is not None:
            _, added = scan_by_chunks(x, dt, rates, b, c, skip, starts, None)
            state = ctx.passing.state_before(added, kept(dt.sum(1)[..., None] * rates, starts))
        return selective_scan(x, dt, rates, b, c, skip, starts, state)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Return the FLOPs of the recurrence, a decay, an update and a read of every state, for any algorithm."""
        return 6.0 * self.A_log.numel()


class MambaMixer(nn.Module):
    """Mamba's mixer of x ``[tokens, hidden]``. `inner`: channels; `rank`: width of the time steps' projection."""

    def __init__(
        self, hidden_size: int, inner: int, state_size: int, rank: int, width: int, *, bias: bool, conv_bias: bool
    ) -> None:
        super().__init__()
        self.split, self.reach = (rank, state_size, state_size), width - 1
        self.in_proj_x = Linear(hidden_size, inner, bias)
        self.in_proj_z = Linear(hidden_size, inner, bias)
        self.conv1d = CausalConv(inner, width, conv_bias)
        self.x_proj = Linear(inner, sum(self.split))
        self.dt_proj = TimeSteps(rank, inner, bias=True)
        self.scan = ChannelScan(inner, state_size)
        self.out_proj = Linear(inner, hidden_size, bias)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Return the output for x ``[tokens, hidden]``, of the same shape."""
        conv_state, state = recall(ctx, self) or (None, None)
        starts = document_starts(ctx)
        x, z = self.in_proj_x.grouped(x, self.in_proj_x, self.in_proj_z)
        x = fold(x, ctx)
        y, conv_state = self.conv1d(x, starts, inputs_before(x, self.reach, ctx, conv_state))
        steps, b, c = self.x_proj(unfold(y, ctx)).split(self.split, dim=-1)
        dt, b, c = (fold(each, ctx) for each in (self.dt_proj(steps), b, c))  # dt is 0 in padding: the state stays
        y, state = self.scan(y, dt, b, c, starts, state, ctx)
        remember(ctx, self, (conv_state, state))
        return self.out_proj(swiglu(z, unfold(y, ctx), "silu"))
