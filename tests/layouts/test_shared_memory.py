"""Collectives in shared memory: right, on every rank the same bits, and ended by the failure of another rank."""

import gc
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kenotron.parallel import collectives, shared_memory
from kenotron.parallel.mesh import build_mesh
from kenotron.parallel.shared_memory import PLACE_BYTES, MemoryGroup, collectives_in_memory, share
from support.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create") or os.uname().machine != "x86_64", reason="sums are gloo's here"
)

LARGE = PLACE_BYTES // 4 * 2 + 5  # numbers of 4 bytes: three rounds, the last of five


def in_memory(ranks: int) -> MemoryGroup:
    memory = share(dist.group.WORLD, shared_memory.bytes_needed(ranks))
    return MemoryGroup(dist.group.WORLD, memory)


def summed(rank: int, ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of every rank's numbers, in memory and in float64."""
    numbers = torch.Generator().manual_seed(5)
    every = torch.randn(ranks, *shape, generator=numbers, dtype=torch.float64).mul(100).to(dtype)
    x = every[rank].clone()
    assert in_memory(ranks).sum(x) is x
    return x, every.to(torch.float64).sum(0)


@pytest.mark.cases(12)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (LARGE,)])
def test_a_sum_is_right_and_the_same_on_every_rank(ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = run_ranks(ranks, summed, ranks, shape, dtype)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 0.02, torch.int64: 0}[dtype]
    for mine, expected in found:
        assert mine.equal(found[0][0])
        torch.testing.assert_close(mine.to(torch.float64), expected, rtol=tolerance, atol=300 * tolerance)


def moved(rank: int, ranks: int, rows: int) -> None:
    """Gathered, scattered and broadcast: to the bit what it should be, in integers that bf16 and fp32 can add."""
    memory = in_memory(ranks)
    for dtype in (torch.float32, torch.bfloat16):
        every = torch.randint(0, 9, (ranks, ranks * rows, 3), generator=torch.Generator().manual_seed(7)).to(dtype)
        x = every[rank].clone()
        assert memory.gather(x).equal(every.flatten(0, 1))
        assert memory.reduce_scatter(x).equal(every.sum(0)[rank * rows : (rank + 1) * rows])
        assert x.equal(every[rank])
        assert memory.broadcast(x, ranks - 1) is x
        assert x.equal(every[-1])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("rows", [0, 1, LARGE // 3])
def test_gathering_scattering_and_broadcasting(ranks: int, rows: int) -> None:
    run_ranks(ranks, moved, ranks, rows)


def of_two(rank: int) -> None:
    """With two ranks rounding leaves no choice: gloo's sums, bit by bit; and of a transposed tensor."""
    total, numbers = in_memory(2), torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(64, 33, generator=numbers).to(dtype)
        expected = x.clone()
        dist.all_reduce(expected)
        assert total.sum(x.clone()).equal(expected)
        turned = x.clone().t()
        assert total.sum(turned).equal(expected.t())


def test_of_two_ranks_it_is_that_of_gloo() -> None:
    run_ranks(2, of_two)


def in_a_hurry(rank: int, ranks: int) -> int:
    """Sums one after the other while ranks are late in turns; how many were wrong."""
    total, wrong = in_memory(ranks), 0
    for number in range(300):
        if number % ranks == rank and number % 7 == 0:
            time.sleep(0.003)  # longer than a rank spins
        x = torch.full((1 + number % 5,), float(number * (rank + 1)))
        wrong += int((total.sum(x) != number * ranks * (ranks + 1) / 2).any())
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_writes_where_another_still_reads(ranks: int) -> None:
    assert run_ranks(ranks, in_a_hurry, ranks) == [0] * ranks


def left_alone(rank: int) -> str:
    """Rank 1 does not come."""
    import threading

    total = in_memory(2)
    if rank == 0:
        threading.Timer(0.2, shared_memory.abandon).start()
        try:
            total.sum(torch.ones(3))
        except dist.DistBackendError as error:
            (call,) = [call for call in shared_memory.last_calls() if call["waits"]]
            return f"{error}: {call['profiling_name']} {call['collective_seq_id']}"
    return ""


def test_a_wait_ends_when_it_is_abandoned() -> None:
    assert run_ranks(2, left_alone) == ["another rank has failed: all_reduce 1", ""]


def open_files() -> list[str]:
    """Those of this process that hold memory to share."""
    gc.collect()  # runs of jobs before
    links = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return [name for link in links if link.is_symlink() and "memfd:kenotron" in (name := os.readlink(link))]


def without_the_file(rank: int, where: str) -> tuple[bool, list[str], list[str]]:
    """The memory cannot be made on rank 0, or not be opened on rank 1, or rank 1 has another file of that number."""
    missing, link = Path("/missing"), os.readlink
    with pytest.MonkeyPatch.context() as patch:
        if where == "made" and rank == 0:
            patch.setattr(os, "memfd_create", lambda _: missing.read_bytes())
        if where == "opened" and rank == 1:
            patch.setattr(torch, "from_file", lambda *_, **__: missing.read_bytes())
        if where == "another" and rank == 1:
            patch.setattr(os, "readlink", lambda path: link(path).replace("kenotron", "other"))
        mesh = build_mesh({"tp": 2}, 2, "cpu")
        with collectives_in_memory(mesh):
            offered = list(collectives.in_memory)
            x = collectives.all_reduce(torch.ones(2), mesh.group("tp"))
    return bool((x == 2).all()), offered, open_files()


@pytest.mark.parametrize("where", ["made", "opened", "another"])
def test_where_memory_cannot_be_shared_gloo_sums_on_all_ranks(where: str) -> None:
    assert run_ranks(2, without_the_file, where) == [(True, [], [])] * 2


def groups_of(rank: int) -> tuple[int, int, list[str]]:
    """What is offered within, and afterwards, and which files stay open."""
    mesh = build_mesh({"dp_replicate": 2, "tp": 2}, 4, "cpu")
    with collectives_in_memory(mesh):
        within = len(collectives.in_memory)
        tp, gradient = mesh.group("tp"), mesh.group("gradient")
        assert float(collectives.all_reduce(torch.tensor(float(rank)), tp)) == (1, 1, 5, 5)[rank]
        wait = collectives.start_all_reduce(x := torch.tensor(float(rank)), gradient)
        wait()
        assert float(x) == (2, 4, 2, 4)[rank]
        largest = collectives.all_reduce(torch.tensor(float(rank)), tp, dist.ReduceOp.MAX)
        assert float(largest) == (1, 1, 3, 3)[rank]
    return within, len(collectives.in_memory), open_files()


def test_a_mesh_collectives_in_memory_while_it_is_asked_to() -> None:
    assert run_ranks(4, groups_of) == [(2, 0, [])] * 4


def interrupted(rank: int) -> list[str]:
    """Another rank fails while memory is shared; what is offered to the next run in this process."""
    mesh = build_mesh({"dp_replicate": 2, "tp": 2}, 4, "cpu")

    def fail_later(group: dist.ProcessGroup, size: int) -> torch.Tensor | None:
        if collectives.in_memory:
            raise dist.DistBackendError("another rank has failed")
        return share(group, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "share", fail_later)
        with pytest.raises(dist.DistBackendError), collectives_in_memory(mesh):
            pass
    return list(collectives.in_memory)


def test_nothing_is_offered_after_a_failure_while_memory_is_shared() -> None:
    assert run_ranks(4, interrupted) == [[]] * 4
