"""Mamba-2's layer: heads with one decay each, which read one projection of the input (arXiv 2405.21060, section 7).

    x ─ norm ─┬─ in_proj_x ─ conv1d_x ─ silu ─┐
              ├─ in_proj_b ─ conv1d_b ─ silu ─┤
              ├─ in_proj_c ─ conv1d_c ─ silu ─┼─ scan ─ * ─ norm ─ out_proj ─(+)─ x
              ├─ in_proj_dt ──────────────────┘         │
              └─ in_proj_z ──────────────────── silu ───┘

No projection reads the output of the convolution, so tensor parallelism needs no communication inside the layer. A rank
holds some heads and the groups whose B and C they read; a single group, shared by all heads, is on every rank. Head
counts are read off the local weights.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron.kernels.state_space_dual import state_space_dual
from kenotron.models.blocks.linear import Linear
from kenotron.models.blocks.mamba import CausalConv
from kenotron.models.blocks.norm import GroupRMSNorm
from kenotron.models.blocks.recurrence import document_starts, fold, inputs_before, kept, recall, remember, unfold
from kenotron.models.context import Context


class HeadTimeSteps(nn.Module):
    """The time step of each head at a token: softplus(x + bias), in fp32, kept within `limit`."""

    def __init__(self, heads: int, limit: tuple[float, float]) -> None:
        super().__init__()
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        """Return time steps ``[tokens, heads]`` for x of the same shape."""
        dt = F.softplus(x.float() + self.dt_bias.to(x.dtype).float())
        return dt if self.limit == (0.0, math.inf) else dt.clamp(*self.limit)


class HeadScan(nn.Module):
    """The scan with its weights: a decay rate ``exp(A_log)`` and a skip D for every head."""

    def __init__(self, heads: int, head_dim: int, state_size: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.head_dim, self.state_size = head_dim, state_size

    def forward(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, starts: Tensor | None, state: Tensor | None, ctx: Context
    ) -> tuple[Tensor, Tensor]:
        """Call `kernels.state_space_dual`. Rates are rounded to x's dtype, like all weights, and then used in fp32.

        x ``[sequences, length, heads * head_dim]``, b and c ``[sequences, length, groups * state_size]``.
        """
        rates, heads = -self.A_log.to(x.dtype).float().exp(), x.unflatten(2, (-1, self.head_dim))
        b, c = (each.unflatten(2, (-1, self.state_size)) for each in (b, c))
        skip = self.D.to(x.dtype)
        if ctx.passing is not None:
            _, added = state_space_dual(heads, dt, rates, b, c, skip, starts)
            state = ctx.passing.state_before(added, kept(dt.sum(1) * rates, starts)[..., None, None])
        y, state = state_space_dual(heads, dt, rates, b, c, skip, starts, state)
        return y.flatten(2), state

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Return the FLOPs of the recurrence, an update and a read of every state, for any algorithm."""
        return 4.0 * self.A_log.numel() * self.head_dim * self.state_size


class Mamba2Mixer(nn.Module):
    """Mamba-2's mixer of x ``[tokens, hidden]``, with a result of the same shape."""

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        head_dim: int,
        groups: int,
        state_size: int,
        width: int,
        *,
        bias: bool,
        conv_bias: bool,
        eps: float,
        time_step_limit: tuple[float, float],
    ) -> None:
        super().__init__()
        self.reach = width - 1
        inner, shared = heads * head_dim, groups * state_size
        self.in_proj_z = Linear(hidden_size, inner, bias, together=head_dim)
        self.in_proj_x = Linear(hidden_size, inner, bias, together=head_dim)
        self.in_proj_b = Linear(hidden_size, shared, bias, together=state_size)
        self.in_proj_c = Linear(hidden_size, shared, bias, together=state_size)
        self.in_proj_dt = Linear(hidden_size, heads, bias)
        self.conv1d_x = CausalConv(inner, width, conv_bias, together=head_dim)
        self.conv1d_b = CausalConv(shared, width, conv_bias, together=state_size)
        self.conv1d_c = CausalConv(shared, width, conv_bias, together=state_size)
        self.time_steps = HeadTimeSteps(heads, time_step_limit)
        self.scan = HeadScan(heads, head_dim, state_size)
        self.norm = GroupRMSNorm(inner, groups, eps)
        self.out_proj = Linear(inner, hidden_size, bias)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Return the output for x ``[tokens, hidden]``, of the same shape."""
        *conv_states, state = recall(ctx, self) or (None,) * 4
        starts = document_starts(ctx)
        linears = (self.in_proj_z, self.in_proj_x, self.in_proj_b, self.in_proj_c, self.in_proj_dt)
        z, *inputs, dt = self.in_proj_z.grouped(x, *linears)
        convs = (self.conv1d_x, self.conv1d_b, self.conv1d_c)
        inputs = [fold(each, ctx) for each in inputs]
        before = [inputs_before(each, self.reach, ctx, last) for each, last in zip(inputs, conv_states)]
        mixed = [conv(each, starts, last) for conv, each, last in zip(convs, inputs, before)]
        (x, b, c), conv_states = zip(*mixed)  # type: ignore[assignment]
        dt = fold(self.time_steps(dt), ctx)  # dt is 0 in padding: the state stays
        y, state = self.scan(x, dt, b, c, starts, state, ctx)
        remember(ctx, self, (*conv_states, state))
        gated = unfold(y, ctx).float() * F.silu(z.float())
        return self.out_proj(self.norm(gated).to(z.dtype))
