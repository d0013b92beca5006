"""Mamba's selective scan, a linear recurrence whose decay depends on the token, by chunks (arXiv 2312.00752).

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t        state h [channels, n], one decay for every channel and state
    y_t = C_t h_t + D x_t

Every token depends on the previous one, but only through h. With 12 tokens in chunks of 4, all chunks are first scanned
in parallel from a state of zero; then the final states are passed along the chunks; then all chunks are scanned again,
from their true initial states:

    chunk 0   t0  t1  t2  t3 ─▶ h3 ──┐          4 steps over all chunks, 3 along chunks, 4 again, where
    chunk 1   t4  t5  t6  t7 ─▶ +────┴▶ h7 ─┐   a loop over tokens has 12 (1024 tokens: 80 steps)
    chunk 2   t8  t9  t10 t11 ─▶ +──────────┴▶ h11

Decays are exponentials of negative numbers that are multiplied one after the other, so nothing can overflow. The states
of all tokens, ``[tokens, channels, n]``, n times the activations, exist only in backward: forward saves one per chunk,
and backward recomputes the others. Backward is the same recurrence with time reversed:

    g_t = C_t dy_t + exp(dt_{t+1} A) g_{t+1}        the gradient of h_t

A document that begins at t resets the state: h_{t-1} counts as 0.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.kernels.mamba_packages import packaged

# Tokens per chunk. Milliseconds forward and backward of 1024 tokens, 1536 channels, 16 states (fp32, 2 cores that
# other processes used too): chunks of 8, 16, 32, 64, 128, 256 take 224, 194, 169, 400, 456, 481.
CHUNK = 32


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    starts: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the scan of every sequence, and its state after the last token.

    x, dt ``[sequences, length, channels]``, dt positive; a ``[channels, n]``, negative; b, c
    ``[sequences, length, n]``; d ``[channels]``. `starts` ``[sequences, length]``: True where a document begins; None:
    only at the first token. `state` ``[sequences, channels, n]`` before the first token; None: zeros. A token with dt 0
    does not change the state. It is computed in fp32, or in float64 if x is; y has x's dtype and shape, the state is in
    fp32. On a GPU the package mamba_ssm is used if it is installed and there are neither `starts` nor a `state`; then
    the last state has no gradient.
    """
    if starts is None and state is None and a.shape[1] <= 256 and (kernel := packaged("selective_scan", x)):
        return kernel(x, dt, a, b, c, d)
    return scan_by_chunks(x, dt, a, b, c, d, starts, state)


def scan_by_chunks(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, starts: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `selective_scan` in torch; the last state has a gradient."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if state is None:
        state = x.new_zeros(x.shape[0], x.shape[2], a.shape[1], dtype=wide)
    u = (dt * x).to(wide)
    y, last = _Scan.apply(u, dt.to(wide), a.to(wide), b.to(wide), c.to(wide), state.to(wide), starts)
    return (y + d.to(wide) * x).to(x.dtype), last


class _Scan(torch.autograd.Function):
    """The operators `_forward` and `_backward` as one function of u = dt x, dt, a, b, c and the state."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, starts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        y, begins, last = torch.ops.kenotron.selective_scan(u, dt, a, b, c, state, starts)
        ctx.save_for_backward(u, dt, a, b, c, begins, starts)
        return y, last

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        dy, dlast = upstream
        return *torch.ops.kenotron.selective_scan_backward(dy, dlast, *ctx.saved_tensors), None


def _by_chunk(x: Tensor, length: int) -> Tensor:
    """Return ``[chunk, sequences, chunks, …]``, where x[i] is token i of every chunk; the last is padded with zeros."""
    chunk = min(CHUNK, length)
    padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -length % chunk))
    return padded.unflatten(1, (-1, chunk)).movedim(2, 0).contiguous()


def _flat(x: Tensor, length: int) -> Tensor:
    """Invert `_by_chunk`."""
    return x.movedim(0, 2).flatten(1, 2)[:, :length]


def _kept(starts: Tensor | None, like: Tensor, length: int) -> Tensor | None:
    """Return 0 at tokens that reset the state and 1 at others, by chunk, to multiply a state ``[…, n, channels]``."""
    return None if starts is None else 1 - _by_chunk(starts.to(like.dtype)[..., None], length)[..., None]


def _forward(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y ``[sequences, length, channels]``, the initial states of chunks, and the last state.

    States are ``[sequences, chunks, n, channels]`` inside, with long rows of channels.
    """
    length, a = u.shape[1], a.t().contiguous()
    keep = _kept(starts, u, length)
    u, dt, b, c = (_by_chunk(each, length) for each in (u, dt, b, c))
    begins = u.new_empty(*u.shape[1:3], *a.shape)
    begins[:, 0] = state.mT
    if begins.shape[1] > 1:
        _fill_begins(begins, u, dt, a, b, keep)
    h, decay, y = begins.clone(), torch.empty_like(begins), torch.empty_like(u)
    for i in range(len(u)):
        _advance(h, decay, u[i], dt[i], a, b[i], None if keep is None else keep[i])
        y[i] = (c[i].unsqueeze(-2) @ h).squeeze(-2)
    return _flat(y, length).contiguous(), begins, h[:, -1].mT.contiguous()


def _advance(h: Tensor, decay: Tensor, u: Tensor, dt: Tensor, a: Tensor, b: Tensor, keep: Tensor | None) -> None:
    """Advance every chunk by one token in place, h = decay h + u b; set `decay` to exp(dt a), or 0 at new documents."""
    torch.mul(dt.unsqueeze(-2), a, out=decay).exp_()
    if keep is not None:
        decay.mul_(keep)
    h.mul_(decay).addcmul_(b.unsqueeze(-1), u.unsqueeze(-2))


def _fill_begins(begins: Tensor, u: Tensor, dt: Tensor, a: Tensor, b: Tensor, keep: Tensor | None) -> None:
    """Compute each chunk's initial state in place, from the first chunk's, by what chunks add and multiply."""
    h, decay = torch.zeros_like(begins), torch.empty_like(begins)
    for i in range(len(u)):
        _advance(h, decay, u[i], dt[i], a, b[i], None if keep is None else keep[i])
    torch.mul(dt.sum(0).unsqueeze(-2), a, out=decay).exp_()
    if keep is not None:
        decay.mul_(keep.amin(0))
    for chunk in range(1, begins.shape[1]):
        torch.addcmul(h[:, chunk - 1], decay[:, chunk - 1], begins[:, chunk - 1], out=begins[:, chunk])


def _backward(
    dy: Tensor,
    dlast: Tensor,
    u: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    begins: Tensor,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of u, dt, a, b, c and the first state."""
    length, a = u.shape[1], a.t().contiguous()
    keep = _kept(starts, u, length)
    dy, u, dt, b, c = (_by_chunk(each, length) for each in (dy, u, dt, b, c))
    h = begins.new_empty(len(u) + 1, *begins.shape)  # h[i + 1]: after token i of every chunk
    decay = torch.empty_like(h[1:])
    h[0] = begins
    for i in range(len(u)):
        _advance(h[i + 1].copy_(h[i]), decay[i], u[i], dt[i], a, b[i], None if keep is None else keep[i])
    g = _gradients_at_ends(dlast.mT, dy, decay, c)
    grads = [torch.empty_like(each) for each in (u, dt, b, c)]
    du, ddt, db, dc = grads
    da, exponent = torch.zeros_like(g), torch.empty_like(g)
    for i in reversed(range(len(u))):
        g.addcmul_(c[i].unsqueeze(-1), dy[i].unsqueeze(-2))
        du[i] = (b[i].unsqueeze(-2) @ g).squeeze(-2)
        db[i] = (g @ u[i].unsqueeze(-1)).squeeze(-1)
        dc[i] = (h[i + 1] @ dy[i].unsqueeze(-1)).squeeze(-1)
        g.mul_(decay[i])
        torch.mul(h[i], g, out=exponent)  # the gradient of dt a
        ddt[i] = (exponent * a).sum(-2)
        da.addcmul_(exponent, dt[i].unsqueeze(-2))
    du, ddt, db, dc = (_flat(each, length).contiguous() for each in grads)
    return du, ddt, da.sum((0, 1)).t().contiguous(), db, dc, g[:, 0].mT.contiguous()


def _gradients_at_ends(dlast: Tensor, dy: Tensor, decay: Tensor, c: Tensor) -> Tensor:
    """Return the gradient of each chunk's last state from later chunks: `_fill_begins`, time reversed."""
    ends = torch.zeros_like(decay[0])
    ends[:, -1] = dlast
    if ends.shape[1] == 1:
        return ends
    g, whole = torch.zeros_like(ends), torch.ones_like(ends)
    for i in reversed(range(len(dy))):
        g.addcmul_(c[i].unsqueeze(-1), dy[i].unsqueeze(-2)).mul_(decay[i])
        whole.mul_(decay[i])
    for chunk in reversed(range(ends.shape[1] - 1)):
        torch.addcmul(g[:, chunk + 1], whole[:, chunk + 1], ends[:, chunk + 1], out=ends[:, chunk])
    return ends


def _fake_forward(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    sequences, length, channels = u.shape
    chunks = -(-length // min(CHUNK, length))
    return torch.empty_like(u), u.new_empty(sequences, chunks, a.shape[1], channels), torch.empty_like(state)


def _fake_backward(dy: Tensor, dlast: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return empty gradients of u, dt, a, b and c, the first of `inputs`, and of the state."""
    return tuple(torch.empty_like(each) for each in (*inputs[:5], dlast))


# Custom operators: torch.compile calls them as a whole instead of unrolling their loops.
_library = torch.library.Library("kenotron", "FRAGMENT")
_library.define(
    "selective_scan(Tensor u, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor state, Tensor? starts)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "selective_scan_backward(Tensor dy, Tensor dlast, Tensor u, Tensor dt, Tensor a, Tensor b, Tensor c,"
    " Tensor begins, Tensor? starts) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
OPERATORS = {"selective_scan": _forward, "selective_scan_backward": _backward}
for name, body in OPERATORS.items():
    _library.impl(name, body, "CompositeExplicitAutograd")
torch.library.register_fake("kenotron::selective_scan", _fake_forward, lib=_library)
torch.library.register_fake("kenotron::selective_scan_backward", _fake_backward, lib=_library)
