"""The mesh: axes are declared once, and every group of axes is a process group, a degree and a rank."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml
from torch.testing._internal.distributed.fake_pg import FakeStore

import kenotron as kn
from kenotron.config.errors import InputError
from kenotron.parallel.mesh import AXES, GROUPS, NAMES, Mesh, axes, axes_of, build_mesh
from support.layout_runs import SHORT
from support.tiny_run import tiny_dict

DEGREES = {"pp": 2, "dp_shard": 2, "tp": 2}


def test_every_group_is_declared_by_an_axis_and_every_axis_names_declared_groups():
    assert {group for axis in AXES for group in axis.groups} == GROUPS.keys() - {"world"}
    assert axes_of("world") == NAMES == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert axes_of("loss") == ("pp", "dp_replicate", "dp_shard", "cp")
    assert axes_of("tp") == ("tp",)


def test_one_rank_is_in_no_group():
    mesh = Mesh()
    for name in (*NAMES, *GROUPS):
        assert (mesh.degree(name), mesh.rank(name), mesh.group(name), mesh.submesh(name)) == (1, 0, None, None)
    assert mesh.is_first


def test_degrees_must_multiply_to_the_number_of_ranks():
    with pytest.raises(InputError, match=r"pp 1 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 1 = 2 ranks, but 3"):
        build_mesh({"dp_shard": 2}, 3, "cpu")


def meshes(degrees: dict[str, int]) -> Iterator[Mesh]:
    """What each of eight ranks makes of the degrees: groups of processes that are not there."""
    for rank in range(8):
        dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
        yield build_mesh(degrees, 8, "cpu")
        dist.destroy_process_group()


def members(mesh: Mesh, name: str) -> list[int]:
    """The ranks of this rank's group."""
    group = mesh.group(name)
    found = [mesh.rank("world")] if group is None else dist.get_process_group_ranks(group)
    assert found[mesh.rank(name)] == mesh.rank("world")
    return found


def test_groups_are_rows_of_the_grid_and_ranks_their_row_major_numbers() -> None:
    represent = []
    for rank, mesh in enumerate(meshes(DEGREES)):
        coordinates = dict(zip(DEGREES, (rank // 4, rank // 2 % 2, rank % 2)))
        for name in (*NAMES, *GROUPS):
            larger = [axis for axis in axes_of(name) if axis in DEGREES]
            places = product(*([0, 1] if axis in larger else [coordinates[axis]] for axis in DEGREES))
            assert members(mesh, name) == [4 * pp + 2 * dp + tp for pp, dp, tp in places], name
            assert mesh.degree(name) == len(members(mesh, name))
        if mesh.represents("batch", "loss"):
            represent.append(mesh.rank("tp"))
    assert sorted(represent) == [0, 0, 1, 1], "of each loss group, one for each of the two batches"


MIXTRAL = yaml.safe_load("""{is_mixtral_config: true, num_local_experts: 8, hidden_size: 4096,
    intermediate_size: 14336, num_attention_heads: 32, num_hidden_layers: 2, vocab_size: 64}""")


@pytest.mark.parametrize(
    ("layout", "replicate", "shard"),
    [
        ("dp=96 zero=3", 3, 32),  # 32 divides a width of 14336; 96 would each gather 96 experts
        ("dp=64 zero=3", 1, 1),  # as other weights
        ("dp=36 zero=1", 4, 9),  # one expert a rank, as of 36, which would gather 36 in the place of 9
        ("dp=12 zero=1", 1, 1),  # groups of 4 would hold two experts a rank, 12 hold one
        ("dp=96 zero=0", 1, 1),
        ("dp=96 shard=48 zero=hybrid", 6, 16),
        ("dp=48 cp=2 zero=2", 3, 32),
        ("dp=48 ep=4 tp=4 zero=3", 3, 4),  # of 12 that hold two experts
        ("dp=48 ep=4 zero=0", 12, 1),
    ],
)
def test_experts_are_split_where_a_rank_holds_least(layout: str, replicate: int, shard: int, tmp_path: Path) -> None:
    given = tiny_dict(tmp_path)
    given["model"]["model_config"] = MIXTRAL
    pairs = (part.split("=") for part in layout.split())
    degrees = axes(kn.load(given, [f"{SHORT[name]}={value}" for name, value in pairs]))
    assert (degrees["expert_replicate"], degrees["expert_shard"]) == (replicate, shard)


def test_experts_count_the_ranks_of_gradient_once_more() -> None:
    for rank, mesh in enumerate(meshes({"dp_shard": 4, "expert_shard": 2, "ep": 2, "tp": 2})):
        replica, number, tp = rank // 4, rank // 2 % 2, rank % 2
        assert members(mesh, "gradient") == [2 * dp + tp for dp in range(4)]
        assert members(mesh, "ep") == [4 * replica + tp, 4 * replica + 2 + tp]
        for name in ("expert_shard", "expert_gradient"):
            assert members(mesh, name) == [2 * number + tp, 4 + 2 * number + tp]
        assert members(mesh, "tp") == [rank - tp, rank - tp + 1]
