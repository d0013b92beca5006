"""`checkpoints.local` on several machines, each with a disk of its own: parts, which become a durable checkpoint.

A machine is some of the ranks, and its disk a folder.
"""

import io
import shutil
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kenotron.checkpoint import durable, local, manifest
from kenotron.checkpoint.folders import verify
from kenotron.checkpoint.local import LocalTier
from kenotron.config.errors import CheckpointError
from kenotron.launch.training import train
from kenotron.parallel.mesh import axes, build_mesh
from support.checkpoint_states import flip_a_byte
from support.ranks import ROUNDING, run_ranks
from support.tiny_run import losses, tiny_config
from training.test_local_checkpoints import keys, local_steps, same_run

LAYOUT = ("parallelism.dp=2", "tokens.micro_batch_size=2", "optimizer.zero_stage=1")


def train_on_machine(rank: int, folder: Path, disks: list[str], more: tuple[str, ...], fails: bool) -> str:
    """What one of the ranks said, of which as many are on each machine; `disks`: the folder of each machine."""
    ranks_on_machine = torch.distributed.get_world_size() // len(disks)
    machine, local_rank = divmod(rank, ranks_on_machine)
    variables = {"RANK": rank, "WORLD_SIZE": len(disks) * ranks_on_machine, "LOCAL_RANK": local_rank}
    failing = ["general.hooks=[training.test_local_checkpoints.AllFail]"] if fails else []
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said := io.StringIO()):
        for name, value in {**variables, "LOCAL_WORLD_SIZE": ranks_on_machine}.items():
            patch.setenv(name, str(value))
        where = f"checkpoints.local.path={folder / disks[machine]}"
        made = tiny_config(folder, *LAYOUT, *keys(folder), where, *failing, *more)
        expected: Any = pytest.raises(RuntimeError, match="all fail") if fails else nullcontext()
        with expected:
            train(made, build_mesh(axes(made), made.parallelism.world_size, "cpu"), torch.device("cpu"))
    return said.getvalue()


def fail(folder: Path, *more: str, disks: tuple[str, ...] = ("one", "other")) -> None:
    """Two machines, each of one rank, end by an error in step 7, after the local checkpoint of step 6."""
    run_ranks(2, train_on_machine, folder, list(disks), more, True)


def resume(folder: Path, *more: str, disks: tuple[str, ...] = ("one", "other"), ranks: int = 2) -> str:
    """Go on; what rank 0 said."""
    return run_ranks(ranks, train_on_machine, folder, list(disks), more, False)[0]


def goes_on(folder: Path, first: int, whole: Path, *more: str, **machines: Any) -> str:
    """What the run said that goes on with step `first` and ends as one without faults."""
    said = resume(folder, *more, **machines)
    assert f"Training from step {first} to" in said
    same_run(folder, whole)
    return said


def parts(folder: Path) -> list[str]:
    """The parts of local checkpoints, as disk/part/step."""
    found = [path for path in folder.glob("*/run-*/*/*") if path.name.isdigit()]
    return sorted(f"{path.parts[-4]}/{path.parts[-2]}/{path.name}" for path in found)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the same layout without faults and without local checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    resume(folder, "checkpoints.local=null")
    return folder


@pytest.mark.budget(20, reason="two ranks, two runs")
def test_each_machine_keeps_its_part_and_the_run_goes_on_from_all_of_them(tmp_path: Path, whole: Path) -> None:
    fail(tmp_path)
    assert parts(tmp_path) == ["one/0of2/6", "other/1of2/6"]
    said = goes_on(tmp_path, 7, whole)
    durable_one = tmp_path / "checkpoints" / "6"
    assert f"Copying the parts of the local checkpoint of step 6 to {durable_one}" in said
    assert verify(durable_one) == []
    assert not {"durable_step", "save"} & manifest.read_manifest(durable_one).state.keys()
    assert [*tmp_path.glob("o*/*")] == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["async", "datastates"])
def test_the_other_engines_save_parts_too(engine: str, tmp_path: Path, whole: Path) -> None:
    name = f"checkpoints.checkpointing_engine={engine}"
    waits = "general.hooks=[training.test_local_checkpoints.AllFail, support.user_parts.WaitsForTheWriter]"
    fail(tmp_path, name, waits)
    assert {"one/0of2/6", "other/1of2/6"} <= set(parts(tmp_path))
    goes_on(tmp_path, 7, whole, name)
    assert verify(tmp_path / "checkpoints" / "8") == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["a lost machine", "a damaged part"])
def test_a_part_that_is_lost_or_damaged_is_named(fault: str, tmp_path: Path, whole: Path) -> None:
    """It costs the steps since the durable checkpoint."""
    fail(tmp_path)
    if fault == "a lost machine":
        (tmp_path / "other").rename(tmp_path / "lost")  # at once: what has ended may still be removing an old part
        problem = "no machine has its part 1 of 2"
    else:
        problem = f"{flip_a_byte(next(tmp_path.glob('other/run-*/1of2/6/model/rank1.safetensors')))} is damaged"
    assert f"warning: skipping checkpoint 6: {problem}" in goes_on(tmp_path, 5, whole)


def files_of(rank: int, folder: Path) -> bytes:
    """A file of the newest local checkpoint, made durable."""
    disk = folder / ("one", "other")[rank]
    made = tiny_config(folder, *LAYOUT, *keys(folder), f"checkpoints.local.path={disk}")
    path = LocalTier(made, (0, 1), print, print).newest(None)
    assert path == folder / "checkpoints" / "6"
    return (path / "model" / "rank0.safetensors").read_bytes()


def test_two_saves_of_one_step_are_not_one_checkpoint(tmp_path: Path) -> None:
    """A run was on one machine, then on another, and then on both, which have not the same."""
    fail(tmp_path, disks=("other",))
    (other,) = tmp_path.glob("other/run-*/6")
    one = tmp_path / "one" / other.parent.name / "6"
    shutil.copytree(other, one)
    victim = flip_a_byte(one / "model" / "rank0.safetensors")
    content = victim.read_bytes()
    was = manifest.read_manifest(one)
    records = was.files | {"model/rank0.safetensors": durable.hash_file(victim)}
    again = replace(was, saved_at=was.saved_at + 100, files=records)
    (one / "manifest.json").write_bytes(manifest.render(again))
    assert run_ranks(2, files_of, tmp_path) == [content, content]  # that was saved last


@pytest.mark.slow
@pytest.mark.parametrize(
    ("disks", "ranks", "layout"),
    [
        (("other", "one"), 2, ()),  # the machines changed places
        (("one", "other"), 4, ("parallelism.dp=4", "tokens.micro_batch_size=1")),
        (("one", "new", "other", "newer"), 4, ("parallelism.pp=2",)),
    ],
    ids=["swapped", "two ranks each", "four machines"],
)
def test_another_layout_goes_on_from_the_parts(
    disks: tuple[str, ...], ranks: int, layout: tuple[str, ...], tmp_path: Path, whole: Path
) -> None:
    fail(tmp_path)
    said = resume(tmp_path, *layout, disks=disks, ranks=ranks)
    assert "Training from step 7 to" in said
    assert losses(tiny_config(tmp_path)) == pytest.approx(losses(tiny_config(whole)), rel=ROUNDING)


@pytest.mark.slow
def test_machines_may_share_the_folder(tmp_path: Path, whole: Path) -> None:
    fail(tmp_path, disks=("burst", "burst"))
    goes_on(tmp_path, 7, whole, disks=("burst", "burst"))


@pytest.mark.slow
def test_one_machine_goes_on_from_parts_of_two_and_the_other_way_round(tmp_path: Path, whole: Path) -> None:
    fail(tmp_path / "to one")
    shutil.copytree(tmp_path / "to one" / "other", tmp_path / "to one" / "one", dirs_exist_ok=True)
    goes_on(tmp_path / "to one", 7, whole, disks=("one",))
    fail(tmp_path / "to two", disks=("one",))
    assert local_steps(tmp_path / "to two") == []
    goes_on(tmp_path / "to two", 7, whole)


def test_what_was_not_copied_as_it_was_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"12345")
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/6/weights is not what {tmp_path}/weights was when"):
        local._copy(tmp_path, tmp_path / "6", {"weights": durable.FileRecord(5, "0" * 16)})
