"""`checkpoints.local` on several machines, each with a disk of its own: parts, fetched from whoever holds them.

A machine is some of the ranks, and its disk a folder.
"""

from __future__ import annotations

import io
import shutil
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kenotron as kn
from kenotron.checkpoint import durable, machines, manifest
from kenotron.checkpoint.folders import verify
from kenotron.checkpoint.local import LocalTier
from kenotron.launch.training import train
from kenotron.parallel.mesh import axes, build_mesh
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
    said = resume(tmp_path)
    assert "Training from step 7 to" in said
    assert "Fetching " in said
    same_run(tmp_path, whole)
    assert [*tmp_path.glob("o*/*")] == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["async", "datastates"])
def test_the_other_engines_save_parts_too(engine: str, tmp_path: Path, whole: Path) -> None:
    name = f"checkpoints.checkpointing_engine={engine}"
    waits = "general.hooks=[training.test_local_checkpoints.AllFail, support.user_parts.WaitsForTheWriter]"
    fail(tmp_path, name, waits)
    assert {"one/0of2/6", "other/1of2/6"} <= set(parts(tmp_path))
    assert "Training from step 7 to" in resume(tmp_path, name)
    same_run(tmp_path, whole)
    assert verify(tmp_path / "checkpoints" / "8") == []


@pytest.mark.slow
def test_a_lost_machine_costs_the_steps_since_the_durable_checkpoint(tmp_path: Path, whole: Path) -> None:
    fail(tmp_path)
    (tmp_path / "other").rename(tmp_path / "lost")  # at once: what has ended may still be removing an old part
    said = resume(tmp_path)
    assert "warning: skipping checkpoint 6: no machine has its part 1 of 2" in said
    assert "Training from step 5 to" in said
    same_run(tmp_path, whole)


@pytest.mark.budget(20, reason="two ranks, two runs")
@pytest.mark.parametrize("lost", ["one", pytest.param("other", marks=pytest.mark.slow)])
def test_a_lost_machine_costs_nothing_where_the_next_one_has_a_copy(lost: str, tmp_path: Path, whole: Path) -> None:
    copies = "checkpoints.local.copy_to_next_machine=true"
    fail(tmp_path, copies, f"general.hooks=[training.test_local_checkpoints.AllFail, {__name__}.WaitsForCopies]")
    of_five, of_six = ([f"{disk}/{part}of2/{step}" for disk in ("one", "other") for part in (0, 1)] for step in (5, 6))
    assert parts(tmp_path) == sorted([*of_five, *of_six])  # those of 5 go when 7 is saved
    shutil.rmtree(tmp_path / lost)
    said = resume(tmp_path, copies)
    assert "Training from step 7 to" in said
    assert "skipping" not in said
    same_run(tmp_path, whole)
    assert [*tmp_path.glob("o*/*")] == []


class WaitsForCopies(kn.Hook):
    """No step begins before the last local checkpoint is copied."""

    priority = -60

    def after_step(self, run: Any, result: Any) -> None:
        if run.local.copy.ident:
            run.local.copy.join()


class CopiesFailInSix(WaitsForCopies):
    """The copy of step 6 finds no room."""

    def after_step(self, run: Any, result: Any) -> None:
        super().after_step(run, result)
        if run.step == 6:
            for copy in run.local.run_folder.glob("*/6"):
                if copy.parent != run.local.root:
                    shutil.rmtree(copy)
            run.local.problem = "no room"
        if run.step == 7:
            raise RuntimeError("all fail")  # after the save


@pytest.mark.slow
def test_what_was_copied_stays_until_something_newer_is(tmp_path: Path, whole: Path) -> None:
    copies = "checkpoints.local.copy_to_next_machine=true"
    run_ranks(2, fails_with_copies, tmp_path, copies)
    assert {path.rpartition("/")[2] for path in parts(tmp_path)} >= {"5", "6", "7"}
    for path in tmp_path.glob("*/run-*/*/7"):
        shutil.rmtree(path)
    shutil.rmtree(tmp_path / "other")
    said = resume(tmp_path, copies)
    assert "warning: skipping checkpoint 6: no machine has its part 1 of 2" in said
    assert "Training from step 6 to" in said


def fails_with_copies(rank: int, folder: Path, copies: str) -> None:
    more = (copies, f"general.hooks=[{__name__}.CopiesFailInSix]")
    with pytest.raises(RuntimeError, match="all fail"):
        train_on_machine(rank, folder, ["one", "other"], more, False)


def files_of(rank: int, folder: Path) -> list[bytes]:
    """What this rank's machine has of the newest local checkpoint, after all was fetched."""
    disk = folder / ("one", "other")[rank]
    made = tiny_config(folder, *LAYOUT, *keys(folder), f"checkpoints.local.path={disk}")
    tier = LocalTier(made, machines.Machines((0, 1), rank), print, print)
    path = tier.newest(None)
    assert path is not None
    names = {"model/rank0.safetensors", "model/rank1.safetensors"}
    tier.fetch(names)
    found = [(path / name).read_bytes() for name in sorted(names)]
    tier.loaded()
    return found


def test_two_saves_of_one_step_are_not_one_checkpoint(tmp_path: Path) -> None:
    """A run was on one machine, then on another, and then on both, which have not the same."""
    fail(tmp_path, disks=("one",))
    (one,) = tmp_path.glob("one/run-*/6")
    other = tmp_path / "other" / one.parent.name / "6"
    shutil.copytree(one, other)
    victim = other / "model" / "rank0.safetensors"
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    was = manifest.read_manifest(other)
    records = was.files | {"model/rank0.safetensors": durable.hash_file(victim)}
    again = replace(was, saved_at=was.saved_at + 100, files=records)
    (other / "manifest.json").write_bytes(manifest.render(again))
    first, second = run_ranks(2, files_of, tmp_path)
    assert first == second
    assert first[0] == content  # that was saved last


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
    for copies in ("false", "true"):
        folder = tmp_path / copies
        more = f"checkpoints.local.copy_to_next_machine={copies}"
        fail(folder, more, disks=("burst", "burst"))
        said = resume(folder, more, disks=("burst", "burst"))
        assert "Training from step 7 to" in said
        assert "Fetching" not in said
        same_run(folder, whole)


@pytest.mark.slow
def test_one_machine_goes_on_from_parts_of_two_and_the_other_way_round(tmp_path: Path, whole: Path) -> None:
    fail(tmp_path / "to one")
    shutil.copytree(tmp_path / "to one" / "other", tmp_path / "to one" / "one", dirs_exist_ok=True)
    assert "Training from step 7 to" in resume(tmp_path / "to one", disks=("one",))
    fail(tmp_path / "to two", disks=("one",))
    assert local_steps(tmp_path / "to two") == []
    assert "Training from step 7 to" in resume(tmp_path / "to two")
    for name in ("to one", "to two"):
        same_run(tmp_path / name, whole)


@pytest.mark.slow
def test_a_damaged_part_is_named_unless_there_is_a_copy_of_it(tmp_path: Path, whole: Path) -> None:
    fail(tmp_path)
    (victim,) = tmp_path.glob("other/run-*/1of2/6/model/rank1.safetensors")
    shutil.copytree(victim.parents[1], tmp_path / "copy")
    content = bytearray(victim.read_bytes())
    content[-5] ^= 1
    victim.write_bytes(content)
    said = resume(tmp_path)
    assert f"warning: skipping checkpoint 6: {victim} is damaged" in said
    assert "Training from step 5 to" in said
    same_run(tmp_path, whole)


def test_what_arrives_damaged_is_refused(tmp_path: Path) -> None:
    record = machines.FileRecord(5, "0" * 16)
    sink = machines._Sink([(tmp_path / "weights", record)])
    sink.take(torch.zeros(5, dtype=torch.uint8))
    assert sink.close() == f"{tmp_path}/weights did not arrive as it was sent"


def test_a_part_without_files_is_copied_too(tmp_path: Path) -> None:
    text = manifest.render(manifest.Manifest(6, 1.0, {}, {}))
    assert machines._FolderSink(tmp_path / "1of2" / "6", text).close() is None
    assert manifest.read_manifest(tmp_path / "1of2" / "6").step == 6


def pass_on_what_was_removed(rank: int, folder: Path) -> str | None:
    """Each rank is a machine with a part of its own; a file of rank 0's is gone."""
    text = f"part {rank}".encode()
    mine = folder / f"{rank}" / f"{rank}of2" / "6"
    mine.mkdir(parents=True)
    record = durable.write_file(mine / "weights", text)
    durable.write_file(mine / "manifest.json", manifest.render(manifest.Manifest(6, 1.0, {}, {"weights": record})))
    if rank == 0:
        (mine / "weights").unlink()
    both = machines.Machines((0, 1), rank)
    assert both.group
    return both.pass_on(mine, (mine / "manifest.json").read_bytes(), mine.parent.parent / f"{1 - rank}of2" / "6")


def test_what_arrives_is_kept_or_removed_where_the_own_part_cannot_be_read(tmp_path: Path) -> None:
    problems = run_ranks(2, pass_on_what_was_removed, tmp_path)
    assert str(problems[0]).startswith(f"cannot read {tmp_path}/0/0of2/6/weights: ")
    assert str(problems[1]).endswith("did not arrive as it was sent")
    assert verify(tmp_path / "0" / "1of2" / "6") == []
    assert list(tmp_path.glob("*/*/*.tmp-*")) == []
