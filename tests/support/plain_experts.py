"""What `kernels.experts` computes, one expert after the other: the reference that it is compared with."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.kernels.swiglu import ACTIVATIONS


def expert_mlp_plain(
    x: Tensor, experts: Tensor, weights: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, act: str = "silu"
) -> Tensor:
    """The formula; shapes as `expert_mlp`."""
    y = torch.zeros_like(x)
    plain = ACTIVATIONS[act].plain
    for number, (w_up, w_down) in enumerate(zip(up.unbind(), down.unbind())):
        token, slot = (experts == number).nonzero(as_tuple=True)
        rows = x[token]
        hidden = F.linear(rows, w_up)
        hidden = plain(hidden) if gate is None else plain(F.linear(rows, gate[number])) * hidden
        y = y.index_add(0, token, F.linear(hidden, w_down) * weights[token, slot, None].to(x.dtype))
    return y
