"""The memory that autograd keeps between forward and backward."""

from collections.abc import Callable

import torch
from torch import Tensor


def bytes_saved(function: Callable[..., Tensor], *arguments: Tensor) -> int:
    """Bytes that autograd keeps for the backward, besides the arguments themselves."""
    own = {a.untyped_storage().data_ptr() for a in arguments}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(*arguments)
    saved.pop(out.untyped_storage().data_ptr(), None)
    return sum(saved.values())
