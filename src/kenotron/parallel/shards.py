"""Which block of a logical tensor a DTensor holds on this rank.

Two ranks that share an [8, 4] matrix by rows: rank 1 holds the [4, 4] block at offset (4, 0). The one place
that asks torch for it, because the helper is not public in every release that we support.
"""

from __future__ import annotations

from torch import Tensor

from kenotron.models.initialization import Shard, whole


def shard_of(tensor: Tensor) -> Shard:
    """The local block of `tensor`; a plain tensor is whole."""
    if not hasattr(tensor, "placements"):  # asking for DTensor's type would import it: a second, for nothing
        return whole(tensor)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        tensor.shape,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,
    )
    return Shard(tensor.to_local(), tuple(tensor.shape), tuple(offset))  # type: ignore[attr-defined]
