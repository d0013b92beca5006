"""Who writes what: every block once, by a rank that holds it, with the load spread."""

import json
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kenotron.checkpoint.write_plan import Block, Planner, held_blocks, share_out
from kenotron.config.errors import CheckpointError, PeerFailed
from kenotron.kernels.tensor_shard import TensorShard
from support.ranks import run_ranks


def blocks_of(name: str, rows: int, columns: int, row_parts: int, column_parts: int) -> list[Block]:
    """A tensor of rows x columns equal parts, in a grid of row_parts x column_parts."""
    shape = (rows * row_parts, columns * column_parts)
    return [
        Block("model", name, torch.float32, shape, (row * rows, column * columns), (rows, columns))
        for row, column in product(range(row_parts), range(column_parts))
    ]


@st.composite
def layouts(draw: st.DrawFn) -> list[list[Block]]:
    """For every rank the blocks that it holds; each has at least one holder."""
    ranks = draw(st.integers(1, 6))
    held: list[list[Block]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(0, 5))):
        for block in blocks_of(f"w{number}", *(draw(st.integers(1, 4)) for _ in range(4))):
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                held[rank].append(block)
    return held


@given(layouts())
def test_every_block_is_written_once_by_a_rank_that_holds_it(held: list[list[Block]]) -> None:
    written = share_out(held)
    assert all(set(mine) <= set(there) for mine, there in zip(written, held, strict=True))
    assert Counter(block for mine in written for block in mine) == Counter({b for there in held for b in there})


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 5))
def test_replicas_are_spread(sizes: list[int], ranks: int) -> None:
    """No rank has more than the mean and one block above it (Graham 1969, list scheduling)."""
    blocks = [block for number, size in enumerate(sizes) for block in blocks_of(f"w{number}", size, 1, 1, 1)]
    loads = [sum(block.bytes for block in mine) for mine in share_out([blocks] * ranks)]
    assert max(loads) <= sum(loads) / ranks + max(block.bytes for block in blocks)


def test_what_one_rank_alone_holds_counts_before_replicas_are_given_out() -> None:
    (alone,) = blocks_of("alone", 100, 1, 1, 1)
    shared = [blocks_of(f"shared{number}", 10, 1, 1, 1)[0] for number in range(10)]
    assert share_out([[alone, *shared], shared]) == [[alone], shared]


@pytest.mark.parametrize("dropped", [0, 3])
def test_a_block_that_no_rank_holds_is_an_error(dropped: int) -> None:
    blocks = blocks_of("w", 2, 2, 2, 2)
    del blocks[dropped]
    with pytest.raises(CheckpointError, match="model: the blocks of 'w' on all ranks do not add up to the tensor"):
        share_out([blocks])


def test_blocks_that_overlap_are_an_error() -> None:
    other = Block("model", "w", torch.float32, (4, 4), (1, 0), (2, 4))
    with pytest.raises(CheckpointError, match="'w'"):
        share_out([blocks_of("w", 2, 4, 2, 1), [other]])


def test_a_block_without_elements_is_not_written_unless_its_tensor_is_empty() -> None:
    rows = {"empty": 0, "none of them here": 3}
    shards = {name: TensorShard(torch.zeros(0, 4), (count, 4), (count, 0)) for name, count in rows.items()}
    assert [block.name for block in held_blocks({"model": shards})] == ["empty"]


def test_a_folder_without_tensors_has_an_index() -> None:
    """As that of an optimizer that keeps nothing, once it has made a step."""
    planner, model = Planner(), {"w": TensorShard.full(torch.zeros(2))}
    assert list(planner.plan({"model": model}).indexes) == ["model/index.json"]
    assert list(planner.plan({"model": model, "optimizer": {}}).indexes) == ["model/index.json", "optimizer/index.json"]


def refused(rank: int) -> str:
    tensor = torch.zeros(2, dtype=(torch.int8, torch.cfloat)[rank])
    with pytest.raises((CheckpointError, PeerFailed)) as error:
        Planner().plan({"model": {f"of{rank}": TensorShard.full(tensor)}})
    return str(error.value)


def test_a_dtype_that_one_rank_cannot_save_is_an_error_on_all() -> None:
    first, second = run_ranks(2, refused)
    assert first.startswith("tensors of dtype complex64 cannot be saved")
    assert second == f"rank 0: {first}"


def plans(rank: int) -> tuple[list[Any], list[str]]:
    """What changes when one rank alone holds another block: a new plan on both."""
    planner = Planner()

    def plan(size: int) -> Any:
        shard = TensorShard(torch.zeros(size), (10,), (10 - size if rank else 0,))
        return planner.plan({"model": {"w": shard}})

    first, again = plan(5), plan(5)
    assert again is first
    other = plan(6 if rank else 4)
    try:
        plan(5 if rank else 4)
    except (CheckpointError, PeerFailed) as error:
        message = str(error)
    return [first.indexes, other.indexes], [message, *(file.name for file in other.files)]


def test_all_ranks_plan_again_when_one_of_them_holds_something_else() -> None:
    (indexes, of_first), (none, of_second) = run_ranks(2, plans)
    lengths = []
    for index in indexes:
        chunks = json.loads(index["model/index.json"])["tensors"]["w"]["chunks"]
        lengths.append([(chunk["file"], chunk["offset"], chunk["shape"]) for chunk in chunks])
    assert lengths == [
        [("rank0.safetensors", [0], [5]), ("rank1.safetensors", [5], [5])],
        [("rank0.safetensors", [0], [4]), ("rank1.safetensors", [4], [6])],
    ]
    assert none == [{}, {}]
    assert of_first[1:] == ["model/rank0.safetensors"]
    assert of_second[1:] == ["model/rank1.safetensors"]
    assert "do not add up" in of_first[0]
    assert of_second[0] == f"rank 0: {of_first[0]}"
