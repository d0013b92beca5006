"""The mesh: axes are declared once, and every group of axes is a process group, a degree and a rank."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from kenotron.config.errors import InputError
from kenotron.parallel.mesh import AXES, GROUPS, NAMES, Mesh, axes_of, build_mesh
from support.ranks import run_ranks

DEGREES = {"pp": 2, "dp_shard": 2, "tp": 2}


def test_every_group_is_declared_by_an_axis_and_every_axis_names_declared_groups():
    assert {group for axis in AXES for group in axis.groups} == GROUPS.keys() - {"world"}
    assert axes_of("world") == NAMES == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert axes_of("loss") == ("pp", "dp_replicate", "dp_shard", "cp")
    assert axes_of("tp") == ("tp",)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(KeyError, match=r"expected an axis \(pp, .*\) or a group \(batch, .*\), found 'losses'"):
        Mesh().group("losses")


def test_one_rank_is_in_no_group():
    mesh = Mesh()
    for name in (*NAMES, *GROUPS):
        assert (mesh.degree(name), mesh.rank(name), mesh.group(name), mesh.submesh(name)) == (1, 0, None, None)
    assert mesh.is_first


def test_degrees_must_multiply_to_the_number_of_ranks():
    with pytest.raises(InputError, match=r"pp 1 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 1 = 2 ranks, but 3"):
        build_mesh({"dp_shard": 2}, 3, "cpu")


def questions(rank: int) -> dict[str, tuple[int, int, list[int]]]:
    mesh = build_mesh(DEGREES, 8, "cpu")
    answers = {}
    for name in (*NAMES, *GROUPS):
        group = mesh.group(name)
        members = [rank] if group is None else dist.get_process_group_ranks(group)
        assert members[mesh.rank(name)] == rank
        sums = torch.tensor([float(mesh.represents("batch", name))])
        if group is not None:
            dist.all_reduce(sums, group=group)
        answers[name] = mesh.degree(name), int(sums), members
    return answers


def test_groups_are_rows_of_the_grid_and_ranks_their_row_major_numbers():
    for rank, answers in enumerate(run_ranks(8, questions)):
        coordinates = dict(zip(DEGREES, (rank // 4, rank // 2 % 2, rank % 2)))
        for name, (degree, representatives, members) in answers.items():
            larger = [axis for axis in axes_of(name) if axis in DEGREES]
            places = product(*([0, 1] if axis in larger else [coordinates[axis]] for axis in DEGREES))
            assert members == [4 * pp + 2 * dp + tp for pp, dp, tp in places], name
            assert degree == len(members)
            assert name != "loss" or representatives == 2, "one for each of the two batches"


def members_of_experts(rank: int) -> dict[str, list[int]]:
    mesh = build_mesh({"dp_shard": 4, "expert_replicas": 2, "ep": 2, "tp": 2}, 8, "cpu")
    groups = {name: mesh.group(name) for name in ("gradient", "expert_replicas", "ep", "tp")}
    members = {name: dist.get_process_group_ranks(group) for name, group in groups.items() if group is not None}
    assert all(members[name][mesh.rank(name)] == rank for name in members)
    return members


def test_experts_count_the_ranks_of_gradient_once_more() -> None:
    for rank, members in enumerate(run_ranks(8, members_of_experts)):
        replica, number, tp = rank // 4, rank // 2 % 2, rank % 2
        assert members["gradient"] == [2 * dp + tp for dp in range(4)]
        assert members["ep"] == [4 * replica + tp, 4 * replica + 2 + tp]
        assert members["expert_replicas"] == [2 * number + tp, 4 + 2 * number + tp]
        assert members["tp"] == [rank - tp, rank - tp + 1]
