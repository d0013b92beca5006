"""Fill fresh weights as functions of (seed, name, element), so that a rank fills only its shard, with the same bits.

Element [row, column] of a matrix is number ``row * columns + column`` of the stream named after the
parameter, so a shard with rows 4–7 holds exactly what rows 4–7 of the whole matrix would. Padding the
vocabulary adds rows at the end and moves nothing.

Rules by name choose a parameter's distribution: `models.init_rules`.
"""

import torch

from kenotron.kernels.hashing import derive_key
from kenotron.kernels.random import fill_normal_
from kenotron.kernels.tensor_shard import TensorShard
from kenotron.models.init_rules import Constant, FilledBy, Normal


@torch.no_grad()
def fill(name: str, shard: TensorShard, distribution: Normal | Constant | FilledBy, seed: int) -> None:
    """Fill one shard with the same bits as in the whole parameter."""
    if isinstance(distribution, Constant):
        shard.tensor.fill_(distribution.value)
        return
    key = derive_key("init", seed, name)
    if isinstance(distribution, FilledBy):
        distribution.fill(shard, key)
    else:
        fill_normal_(shard, key, distribution.std)
