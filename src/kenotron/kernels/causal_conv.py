"""A depthwise causal convolution: each token becomes a weighted sum of itself and the few tokens before it.

Width 4, one channel, weights w0 … w3, the last for the token itself; a document begins at x4:

    x        x0            x1              x2                    x3                          x4
    y - bias w3 x0         w3 x1 + w2 x0   w3 x2 + w2 x1 + w1 x0  w3 x3 + … + w0 x0          w3 x4

Before the first token there are zeros, or the `state`, the last width - 1 tokens of a text that continues.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.kernels.mamba_packages import packaged


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the convolution of every sequence, and its last ``width - 1`` inputs.

    x ``[sequences, length, channels]``; weight ``[channels, 1, width]`` as in ``torch.nn.Conv1d(groups=channels)``;
    bias ``[channels]``; `starts` ``[sequences, length]``: True where a document begins; `state`
    ``[sequences, width - 1, channels]``: the inputs before the first; None: zeros. It sums shifted products in x's own
    layout, without a transpose. On a GPU, the package causal_conv1d is used if it is installed and supports the shape.
    """
    length, width = x.shape[1], weight.shape[2]
    if 2 <= width <= 4 and x.shape[2] % 8 == 0 and (kernel := packaged("causal_conv", x)):
        return kernel(x, weight, bias, starts, state)
    if state is None:
        state = x.new_zeros(x.shape[0], width - 1, x.shape[2])
    inputs, taps = torch.cat([state.to(x.dtype), x], dim=1), weight[:, 0].unbind(1)
    y = x * taps[-1] if bias is None else torch.addcmul(bias, x, taps[-1])
    here = None if starts is None else ~starts
    seen = here  # which tokens see the token `back` before them
    for back in range(1, width):
        earlier = inputs[:, width - 1 - back :][:, :length]
        if here is not None and seen is not None:
            earlier = earlier * seen[..., None]
            seen = here & F.pad(seen[:, :-1], (1, 0), value=True)
        y = torch.addcmul(y, earlier, taps[-1 - back])
    return y, inputs[:, length:]
