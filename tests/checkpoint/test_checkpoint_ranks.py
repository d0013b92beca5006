"""Several ranks write one checkpoint, and any other number of them reads it."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from kenotron.checkpoint.folders import newest_complete, verify
from kenotron.checkpoint.loading import load
from kenotron.checkpoint.reading import read_tensors
from kenotron.checkpoint.saving import save
from kenotron.config.errors import CheckpointError, PeerFailed
from support.checkpoint_states import assert_same, empty_like, flip_a_byte
from support.ranks import run_ranks

LAYOUT = {
    "rows.uneven": [Shard(0)],  # 5 rows: 3 and 2
    "rows.one": [Shard(0)],  # 1 row: the second rank has none
    "columns": [Shard(1)],
    "replicated": [Replicate()],
    "bf16": [Shard(0)],
}


def logical() -> dict[str, Any]:
    """The tensors as one process has them."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"rows.uneven": (5, 3), "rows.one": (1, 7), "columns": (4, 6), "replicated": (8,), "bf16": (6, 2)}
    tensors: dict[str, Any] = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["bf16"] = tensors["bf16"].bfloat16()
    tensors |= {"plain": torch.randn(3, generator=generator), "scalar": torch.tensor(42), "empty": torch.zeros(0, 4)}
    return tensors


def moments(rank: int) -> dict[str, Any]:
    """Optimizer state: some that every rank has, and some of its own, as pipeline stages have."""
    return {"state.shared.step": torch.tensor(7.0), f"state.stage{rank}.exp_avg": torch.full((3,), rank + 0.5)}


def sharded(tensors: dict[str, Any], layout: dict[str, list], shape: tuple[int, ...] = (2,)) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape)
    return tensors | {name: distribute_tensor(tensors[name], mesh, layout[name]) for name in layout}


def save_on_rank(rank: int, root: Path, step: int = 10, **kwargs: Any) -> Any:
    model = sharded(logical(), LAYOUT)
    arguments = {"state": {"rank": rank}, "config_yaml": f"rank: {rank}", "model_config": {}} | kwargs
    return save(root, step, model=model, optimizer=moments(rank), **arguments)


def load_on_rank(rank: int, path: Path, layouts: list[dict[str, list]], shape: tuple[int, ...] = (2,)) -> None:
    for layout in layouts:
        found = sharded(empty_like(logical()), layout, shape)
        optimizer = empty_like(moments(0) | moments(1))
        assert load(path, model=found, optimizer=optimizer) == {"rank": 0}
        assert_same(optimizer, moments(0) | moments(1))
        whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
        assert_same(whole, logical())


def save_twice(rank: int, root: Path) -> Any:
    save_on_rank(rank, root, 5)
    return save_on_rank(rank, root, 10)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    results = run_ranks(2, save_twice, root)
    assert results[0].path == results[1].path == root / "10"
    size = sum(file.stat().st_size for file in results[0].path.rglob("*") if file.is_file())
    assert results[0].bytes == results[1].bytes == size
    return root / "10"


def test_two_ranks_write_one_checkpoint_each_byte_once(saved: Path) -> None:
    assert verify(saved) == []
    assert (saved / "config.yaml").read_text() == "rank: 0"
    parts = [load_file(saved / "model" / f"rank{rank}.safetensors") for rank in range(2)]
    assert [part["rows.uneven"].shape[0] for part in parts] == [3, 2]
    assert sum(name in part for part in parts for name in ("replicated", "plain", "scalar")) == 3
    stored = sum(tensor.nbytes for part in parts for tensor in part.values())
    assert stored == sum(tensor.nbytes for tensor in logical().values())


def test_one_process_reads_what_two_ranks_wrote(saved: Path) -> None:
    found = empty_like(logical())
    optimizer = empty_like(moments(0) | moments(1))
    assert load(saved, model=found, optimizer=optimizer) == {"rank": 0}
    assert_same(found, logical())
    assert_same(optimizer, moments(0) | moments(1))
    assert_same(read_tensors(saved), logical())


def test_the_own_safetensors_reader_of_torch_joins_the_ranks_files(saved: Path) -> None:
    """An independent reader of the sharding notes in the files' headers; it knows nothing of our index."""
    found = empty_like(logical())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(saved / "model")), no_dist=True)
    assert_same(found, logical())


OTHER_DIMENSIONS = {"rows.uneven": [Shard(1)], "columns": [Shard(0)], "plain": [Shard(0)], "bf16": [Replicate()]}
MORE_RANKS = {"rows.uneven": [Shard(0)], "columns": [Shard(1)], "replicated": [Shard(0)], "plain": [Shard(0)]}
TWO_AXES = {"rows.uneven": [Shard(0), Shard(1)], "columns": [Replicate(), Shard(0)], "bf16": [Shard(0), Shard(0)]}


@pytest.mark.parametrize(
    ("shape", "layouts"),
    [((2,), [LAYOUT, OTHER_DIMENSIONS]), ((3,), [MORE_RANKS]), ((2, 2), [TWO_AXES])],
    ids=["two", "three", "two-by-two"],
)
def test_any_other_layout_reads_it(saved: Path, shape: tuple[int, ...], layouts: list[dict]) -> None:
    run_ranks(torch.Size(shape).numel(), load_on_rank, saved, layouts, shape)


def stages_change_places(rank: int, root: Path) -> str:
    model = {f"stage{rank}": torch.full((2,), float(rank))}
    save(root, 1, model=model, optimizer=None, state={}, config_yaml="", model_config={})
    other = {f"stage{1 - rank}": torch.full((2,), 9.0)}
    load(root / "1", model=other, optimizer=None)
    assert_same(other, {f"stage{1 - rank}": torch.full((2,), 1.0 - rank)})
    with pytest.raises(CheckpointError) as error:
        load(root / "1", model=model if rank == 0 else {}, optimizer=None)
    return str(error.value)


def test_ranks_with_different_names_write_together_as_pipeline_stages_do(tmp_path: Path) -> None:
    first, second = run_ranks(2, stages_change_places, tmp_path)
    assert_same(read_tensors(tmp_path / "1"), {"stage0": torch.zeros(2), "stage1": torch.ones(2)})
    assert "has 'stage1', which this run does not have" in first
    assert first == second


def fail_on_one(rank: int, root: Path, failing: int) -> str:
    write = os.write

    def full(handle: int, data: memoryview) -> int:
        if rank == failing and "rank" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(28, "No space left on device")
        return write(handle, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(CheckpointError if rank == failing else PeerFailed) as error:
            save_on_rank(rank, root, 20)
    return str(error.value)


def test_a_full_disk_on_one_rank_stops_all_and_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    for failing in (0, 1):
        root = tmp_path / str(failing)
        shutil.copytree(saved.parent, root)
        for rank, message in enumerate(run_ranks(2, fail_on_one, root, failing)):
            assert message.startswith("cannot write" if rank == failing else f"rank {failing}: cannot write")
            assert "No space left on device" in message
        assert sorted(path.name for path in root.iterdir()) == [".lock", "10", "5", "latest.txt"]
        assert newest_complete(root) == root / "10"


DAMAGED = ("model/rank0.safetensors", "model/rank1.safetensors", "optimizer/index.json")


def find_damage(rank: int, roots: dict[str, Path]) -> dict[str, tuple]:
    found = {}
    for name, root in roots.items():
        lines: list[str] = []
        newest = newest_complete(root, lines.append)
        with pytest.raises(CheckpointError) as error:
            load_on_rank(rank, root / "10", [LAYOUT])
        found[name] = (str(newest), str(error.value), lines)
    return found


def test_all_ranks_agree_about_damage_though_each_reads_a_share(saved: Path, tmp_path: Path) -> None:
    roots = {name: tmp_path / str(number) for number, name in enumerate(DAMAGED)}
    for name, root in roots.items():
        shutil.copytree(saved.parent, root)
        flip_a_byte(root / "10" / name)
    first, second = run_ranks(2, find_damage, roots)
    for name, (newest, message, lines) in first.items():
        assert second[name] == (newest, message, [])  # rank 0 alone reports it
        assert newest == str(roots[name] / "5")
        assert f"10/{name} is damaged" in message
        assert lines == [f"skipping checkpoint 10: {message}"]


def misfit_on_one(rank: int, path: Path) -> str:
    model = sharded(empty_like(logical()), LAYOUT)
    if rank == 1:
        model["plain"] = torch.zeros(4)
    with pytest.raises(CheckpointError if rank == 1 else PeerFailed) as error:
        load(path, model=model, optimizer=None)
    return str(error.value)


def test_a_shape_that_does_not_fit_on_one_rank_is_an_error_on_all(saved: Path) -> None:
    first, second = run_ranks(2, misfit_on_one, saved)
    assert "'plain' has shape [3] in the checkpoint and [4] in this run" in second
    assert first == f"rank 1: {second}"
