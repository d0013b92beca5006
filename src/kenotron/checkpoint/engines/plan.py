"""Which bytes this rank writes: planned once with the other ranks, used again while names, shapes and values last.

    model/rank0.safetensors      header │ model.embed_tokens.weight │ model.norm.weight
    optimizer/rank0.safetensors  header │ …
    model/index.json             rank 0 alone: it says where every rank's bytes are, and no tensor's content

The plan is that of `checkpoint.tensor_writer`, to which it listens instead of writing: the same bytes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from kenotron.checkpoint.index import INDEX, Index
from kenotron.checkpoint.tensor_writer import Writer, write_through_dcp
from kenotron.kernels.tensor_shard import TensorShard

Parts = dict[str, dict[str, Any]]
"""Folder ("model", "optimizer", "hooks") → name → `TensorShard` or value."""


@dataclass(frozen=True)
class FilePlan:
    """One file: its name in the checkpoint, its header, and the tensors that follow, as (folder, name)."""

    name: str
    header: bytes
    tensors: tuple[tuple[str, str], ...]


@dataclass
class RankPlan:
    """This rank's files. `indexes`: on rank 0, the content of each ``index.json``."""

    key: Hashable
    files: list[FilePlan] = field(default_factory=list)
    indexes: dict[str, bytes] = field(default_factory=dict)

    def tensors(self, parts: Parts) -> list[Tensor]:
        """The tensors of all files, in the order of their bytes."""
        return [_tensor(parts[folder][name]) for file in self.files for folder, name in file.tensors]


def key_of(parts: Parts) -> Hashable:
    """What a plan depends on: equal keys on every rank, equal plans."""
    return tuple((folder, tuple(map(_key_of, tensors.items()))) for folder, tensors in parts.items())


def make_plan(parts: Parts, key: Hashable) -> RankPlan:
    """Plan with the other ranks. Raises CheckpointError for a dtype or a value that cannot be saved."""
    plan = RankPlan(key)
    for folder, tensors in parts.items():
        write_through_dcp(_Listener(folder, plan), tensors)
    return plan


def _key_of(item: tuple[str, Any]) -> Hashable:
    name, value = item
    if isinstance(value, TensorShard):
        return name, value.tensor.dtype, value.tensor.shape, value.shape, value.offset
    return name, repr(value)


def _tensor(shard: TensorShard) -> Tensor:
    return shard.tensor if shard.read is None else shard.read()


class _Listener(Writer):
    """Takes down what a `Writer` would write."""

    def __init__(self, folder: str, plan: RankPlan) -> None:
        super().__init__(Path(folder))
        self.plan = plan

    def write_file(self, name: str, header: bytes, items: list[WriteItem], planner: SavePlanner) -> None:
        names = tuple((self.folder.name, item.index.fqn) for item in items)
        self.plan.files.append(FilePlan(f"{self.folder.name}/{name}", header, names))

    def write_index(self, index: Index) -> None:
        self.plan.indexes[f"{self.folder.name}/{INDEX}"] = index.render()
