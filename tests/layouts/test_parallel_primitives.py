"""The primitives of parallelism: nothing is wrapped on one rank, sums over ranks are right, docs/primitives.md runs."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kenotron.models.decoder import Decoder
from kenotron.parallel.collectives import any_rank, copy_to, sum_over_ranks
from kenotron.parallel.mesh import Mesh, build_mesh
from support.layout_runs import Problem, prepared
from support.pages import read_page
from support.ranks import run_ranks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_one_rank_nothing_is_wrapped(dtype: str, tmp_path: Path) -> None:
    """The trained model is the model file's own: no module of another class, no hook, no DTensor, no process group."""
    config = Problem("plain", (f"model.dtype={dtype}", "optimizer.zero_stage=3")).config("", tmp_path)
    with prepared(config, Mesh()) as run:
        with torch.device("meta"):
            plain = Decoder(config.model.architecture)
        assert run.pipeline is None
        assert run.mesh.device_mesh is None
        assert not torch.distributed.is_initialized()
        assert [type(module) for module in run.model.modules()] == [type(module) for module in plain.modules()]
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        assert not any(getattr(module, name) for module in run.model.modules() for name in hooks)
        assert all(type(parameter) is torch.nn.Parameter for parameter in run.model.parameters())
        assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
        assert not hasattr(run.model, "gradient_buckets")


def gradients_beside_a_copy(rank: int) -> list[list[float]]:
    x, z = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    upstream = torch.full((3,), rank + 1.0)
    (z + copy_to(x, dist.group.WORLD)).backward(upstream)
    return [x.grad.tolist(), z.grad.tolist(), upstream.tolist()]


def test_the_sum_of_a_copys_gradients_leaves_those_beside_it_alone() -> None:
    """Autograd gives both terms of a sum one tensor."""
    for rank, found in enumerate(run_ranks(2, gradients_beside_a_copy)):
        assert found == [[3.0] * 3, [rank + 1.0] * 3, [rank + 1.0] * 3]


def host_numbers(rank: int) -> tuple[list[int], list[bool]]:
    mesh, cpu = build_mesh({"dp_shard": 2, "tp": 2}, 4, "cpu"), torch.device("cpu")
    sums = [sum_over_ranks(2**40 + rank, group, cpu) for group in (mesh.group("world"), mesh.group("batch"))]
    return sums, [any_rank(rank == 3, 4, cpu), any_rank(False, 4, cpu)]


def test_hosts_sum_their_numbers_over_the_ranks_of_a_group() -> None:
    for rank, (sums, votes) in enumerate(run_ranks(4, host_numbers)):
        assert sums == [4 * 2**40 + 6, 2 * 2**40 + sum(range(rank % 2, 4, 2))]
        assert votes == [True, False]


def run_page(rank: int, text: str) -> int:
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {"__name__": "primitives"}
    for block in blocks:
        exec(block, names)
    return len(blocks)


def test_every_example_of_the_page_runs_and_proves_its_point() -> None:
    assert run_ranks(2, run_page, read_page("primitives.md")) == [6, 6]
