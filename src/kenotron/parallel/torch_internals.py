"""All uses of torch's private names: process groups, the flight recorder, flattened meshes.

They may change with any torch release. No other file uses them, and a test lists them (tests/layouts/test_mesh.py).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh


def default_store() -> dist.Store:
    """Return the key-value store of the default process group."""
    return distributed_c10d._get_default_store()


def process_groups() -> Mapping[str, dist.ProcessGroup]:
    """Return every process group that this rank belongs to, by torch's name."""
    return {name: group for group, name in distributed_c10d._world.pg_names.items()}


def set_timeout_of_all_groups(seconds: float) -> None:
    """Set the timeout of all existing groups; torch gives a new group its default of 10 or 30 minutes."""
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # before torch 2.14
    for group in list(distributed_c10d._world.pg_map):
        set_timeout(timedelta(seconds=seconds), group)


def flight_recorder_dumps() -> list[dict[str, Any]]:
    """Return the entries of torch's flight recorders (gloo's, NCCL's) in this process; empty if torch has none."""
    dumps = (getattr(_distributed_c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"))
    return [json.loads(dump(True, False) or "{}") for dump in dumps if dump is not None]


def flatten(mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
    """Return one mesh axis that combines `axes` in row-major order. Every rank of `mesh` calls it."""
    return mesh[tuple(axes)]._flatten("_x_".join(axes))


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with the axes of all `meshes`, which are submeshes of the same larger mesh."""
    return type(meshes[0])._concatenate(list(meshes))
