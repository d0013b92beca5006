"""Runs whose checkpoints go to a store: they resume from it anywhere, and no failure of the store ends them."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fsspec.implementations.memory import MemoryFileSystem

from kenotron.checkpoint.remote import RemoteCheckpoints, check_same_run, fetch_for_run
from kenotron.config import Config, InputError, dump, load
from kenotron.config.errors import CheckpointError, RunFailed
from kenotron.observers.uploads import STOPPED_WAIT_S, build_uploader
from kenotron.storage import fetching
from support.checkpoint_states import flip_a_byte
from support.tiny_run import Shell, losses, tiny_config, train_and_listen, train_quietly

URL = "memory://robots/run"
Machine = Callable[..., Config]
REMOTE = (f"checkpoints.checkpoints_path={URL}", "checkpoints.checkpoint_interval=2", "tokens.train_steps=4")
OTHER_RUN = f"{URL} holds the checkpoints of a different run from .*; name another URL, or if it is the same run, copy"


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.setattr(fetching, "FIRST_WAIT", 0.0)
    MemoryFileSystem.store.clear()
    yield MemoryFileSystem.store
    MemoryFileSystem.store.clear()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """The config of the run on a machine of its own: its folders are `<tmp_path>/<name>`."""

    def config(name: str, *overrides: str) -> Config:
        return tiny_config(tmp_path / name, *REMOTE, *overrides)

    return config


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of six steps without a break."""
    config = train_quietly(tiny_config(tmp_path_factory.mktemp("whole"), "tokens.train_steps=6")).config
    return losses(config)


def steps_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*") if path.name.isdigit())


def complete() -> list[int]:
    return [entry.step for entry in RemoteCheckpoints(URL).all() if entry.manifest]


def test_another_machine_goes_on_from_the_store(machine: Machine, whole: list[float]) -> None:
    first = train_quietly(machine("a")).config
    assert complete() == [2, 4]
    staged = Path(first.logging.log_dir) / "remote" / "memory" / "robots" / "run"
    assert steps_of(staged) == ["2", "4"]
    second = machine("b", "tokens.train_steps=6", f"checkpoints.staging_path={staged}/staged")
    said = train_and_listen(second)[1]
    assert f"Fetching {URL}/4: " in said
    assert losses(first) + losses(second) == whole
    assert steps_of(staged / "staged") == ["4", "6"]
    assert complete() == [2, 4, 6]
    assert f"checkpoints_path: {URL}\n" in (staged / "staged" / "6" / "config.yaml").read_text()


def test_a_damaged_checkpoint_is_passed_over(machine: Machine, whole: list[float], bucket: Any, capsys: Any) -> None:
    train_quietly(machine("a", "tokens.train_steps=6"))
    name = next(name for name in bucket if "/6/model" in name and name.endswith(".safetensors"))
    flip_a_byte(bucket[name])
    again = machine("b", "tokens.train_steps=6")
    said = train_and_listen(again)[1]
    assert f"Fetching {URL}/4: " in said
    assert f"warning: skipping checkpoint 6: memory:/{name} is damaged" in capsys.readouterr().err
    assert losses(again) == whole[4:]
    assert RemoteCheckpoints(URL).verify(6) == []  # sent again, whole


def test_with_every_checkpoint_damaged_none_is_replaced(machine: Machine, bucket: dict[str, Any]) -> None:
    train_quietly(machine("a", "tokens.train_steps=6"))
    for name in [name for name in bucket if "/model/" in name and name.endswith(".safetensors")]:
        flip_a_byte(bucket[name])
    before = sorted(bucket)
    with pytest.raises(InputError, match=f"^no checkpoint at {URL} is intact, as warned above"):
        train_quietly(machine("b", "tokens.train_steps=6"))
    assert sorted(bucket) == before


def test_local_damage_is_mended_from_the_store(machine: Machine, whole: list[float]) -> None:
    config = train_quietly(machine("a")).config
    assert "Fetching" not in train_and_listen(machine("a"))[1]  # what is here already
    flip_a_byte(next((config.checkpoint_folder / "4" / "model").glob("*.safetensors")))
    config = machine("a", "tokens.train_steps=6")
    assert f"Fetching {URL}/4: " in train_and_listen(config)[1]
    assert losses(config) == whole


@pytest.mark.parametrize("named", [f"{URL}/2", URL])
def test_a_run_starts_at_a_stores_checkpoint(machine: Machine, whole: list[float], tmp_path: Path, named: str) -> None:
    train_quietly(machine("a", "tokens.train_steps=2"))
    local = (f"checkpoints.checkpoints_path={tmp_path}/own", f"checkpoints.resume_checkpoint_path={named}")
    config = train_quietly(machine("b", *local)).config
    assert losses(config) == whole[2:4]
    MemoryFileSystem.store.clear()
    config = machine("b", *local, "tokens.train_steps=6")
    train_quietly(config)  # its own checkpoints come first: the store is not asked
    assert losses(config) == whole[2:]


def test_retention_holds_in_the_store_and_local_copies_can_go(machine: Machine) -> None:
    keep = ("checkpoints.keep_last=1", "checkpoints.keep_every=4", "checkpoints.remove_after_upload=true")
    config = train_quietly(machine("a", *keep, "checkpoints.checkpoint_interval=1", "tokens.train_steps=6")).config
    assert complete() == [4, 6]
    assert steps_of(config.checkpoint_folder) == []


def test_the_best_checkpoint_stays_in_the_store(machine: Machine) -> None:
    keep = ("checkpoints.keep_best=true", "tokens.limit_val_batches=2", "tokens.val_check_interval=1")
    worse = "optimizer.learning_rate_scheduler.learning_rate=0.1"  # the loss rises from the first step on
    train_quietly(machine("a", *keep, worse, "checkpoints.keep_last=1", "checkpoints.checkpoint_interval=1"))
    assert complete() == [1, 4]


def s3_upload(remove: str, workers: str = "null", concurrency: str = "null", path: str = "null") -> str:
    """nanotron's section."""
    transfer = f"s5cmd_numworkers: {workers}, s5cmd_concurrency: {concurrency}, s5cmd_path: {path}"
    return f"s3_upload={{upload_s3_path: '{URL}', remove_after_upload: {remove}, {transfer}}}"


def test_nanotrons_section_uploads_a_local_folder(machine: Machine, tmp_path: Path, whole: list[float]) -> None:
    local = (s3_upload("true", "3", "7", "/opt/s5cmd"), f"checkpoints.checkpoints_path={tmp_path}/own")
    config = machine("a", *local)
    uploader, _ = build_uploader(config, URL)
    assert (uploader.files_at_once, uploader.store._parts_at_once, uploader.remove) == (3, 7, True)
    _, said = train_and_listen(config)
    assert complete() == [2, 4]
    assert steps_of(tmp_path / "own") == []  # remove_after_upload
    assert f"Checkpoint: {URL}/4. Next:\n" in said
    assert f"kenotron generate {URL}/4 --prompt" in said
    assert f"kenotron convert to-hf {URL}/4 {tmp_path}/own/4-hf\n" in said
    shutil.rmtree(tmp_path / "own")
    config = machine("a", *local, "tokens.train_steps=6", "s3_upload.remove_after_upload=false")
    _, said = train_and_listen(config)
    assert f"Checkpoint: {tmp_path}/own/6. Next:\n" in said
    assert losses(config) == whole
    assert steps_of(tmp_path / "own") == ["4", "6"]


def test_the_next_start_uploads_what_a_store_refused(machine: Machine, monkeypatch: Any, whole: list[float]) -> None:
    config = machine("a")
    put = MemoryFileSystem.put_file

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no route to the store")

    monkeypatch.setattr(MemoryFileSystem, "put_file", refuse)
    expected = rf"not uploaded to {URL}: checkpoint 2, 4 \({URL}/4/.*: cannot be written, tried 5 times \(OSError: no"
    with pytest.raises(RunFailed, match=expected) as caught:
        train_quietly(config)
    assert f"kenotron checkpoint upload {config.checkpoint_folder} {URL}" in str(caught.value)
    assert losses(config) == whole[:4]
    assert complete() == []
    assert steps_of(config.checkpoint_folder) == ["2", "4"]
    monkeypatch.setattr(MemoryFileSystem, "put_file", put)
    train_quietly(config)  # finished before: nothing is trained, and the rest is uploaded
    assert complete() == [2, 4]


def test_a_run_stopped_before_its_first_step_waits_briefly(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []
    monkeypatch.setattr("kenotron.observers.uploads.finish", lambda made, lines, seconds=None: waits.append(seconds))
    train_quietly(machine("a", "general.hooks=[training.test_local_checkpoints.StopsAtOnce]"))
    assert waits == [STOPPED_WAIT_S]


def test_a_store_that_cannot_be_used_is_known_at_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("Access Denied")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", refuse)
        with pytest.raises(InputError, match=rf"{URL}/\.kenotron: cannot be written \(PermissionError: Access"):
            train_quietly(machine("a"))
    train_quietly(machine("a"))
    with pytest.raises(InputError, match=f"--fresh: {URL} holds checkpoints, which are left as they are"):
        train_quietly(machine("b"), fresh=True)


def local_run(folder: Path, *overrides: str) -> Config:
    return tiny_config(folder, "checkpoints.checkpoint_interval=2", "tokens.train_steps=4", *overrides)


UPLOADED = s3_upload("false")


def test_a_store_of_another_run_is_refused(machine: Machine, tmp_path: Path, bucket: Any, shell: Shell) -> None:
    train_quietly(machine("a"))
    other = train_quietly(local_run(tmp_path / "b")).config
    before = {name: file.getvalue() for name, file in bucket.items()}
    with pytest.raises(InputError, match=OTHER_RUN):
        train_quietly(local_run(tmp_path / "b", UPLOADED, "checkpoints.keep_last=1", "tokens.train_steps=8"))
    code, _, errors = shell("checkpoint", "upload", other.checkpoint_folder, URL)
    assert code
    assert "a different run" in errors
    assert {name: file.getvalue() for name, file in bucket.items()} == before
    own = other.checkpoint_folder / ".run"
    own.unlink()  # as of a folder whose files were copied by `*`, or of an average
    with pytest.raises(InputError, match=OTHER_RUN):
        check_same_run(RemoteCheckpoints(URL), other.checkpoint_folder, None)
    third = local_run(tmp_path / "c", "tokens.train_steps=1")  # no step of it is in the store
    train_quietly(third)
    (third.checkpoint_folder / ".run").unlink()
    with pytest.raises(InputError, match=OTHER_RUN):
        check_same_run(RemoteCheckpoints(URL), third.checkpoint_folder, None)
    own.write_bytes(before["/robots/run/.run"])  # as the message says
    train_quietly(local_run(tmp_path / "b", UPLOADED, "tokens.train_steps=6"))
    assert complete() == [2, 4, 6]


def test_a_folder_with_a_checkpoint_of_the_store_is_of_its_run(machine: Machine, tmp_path: Path) -> None:
    mine = train_quietly(machine("a")).config.checkpoint_folder
    copied = tmp_path / "copied"  # without an id
    shutil.copytree(mine / "2", copied / "2")
    check_same_run(RemoteCheckpoints(URL), copied, None)
    assert (copied / ".run").read_text() == RemoteCheckpoints(URL).store.read(".run").decode()


def test_a_store_without_an_id_gets_that_of_its_run(machine: Machine) -> None:
    """`--fresh` removes the store's id; the run may be killed when its first upload is no longer here."""
    config = train_quietly(machine("a")).config
    remote = RemoteCheckpoints(URL)
    own = remote.store.read(".run").decode()
    remote.store.delete(".run")
    remote.remove(4, remote.manifest(4)[0])
    shutil.rmtree(config.checkpoint_folder / "2")
    check_same_run(remote, config.checkpoint_folder, own)
    assert remote.store.read(".run").decode() == own


def test_a_run_goes_on_with_its_store_from_either_side(tmp_path: Path, whole: list[float]) -> None:
    """A local run gets a store, another machine takes it up, and so does the first again."""
    train_quietly(local_run(tmp_path / "a", "tokens.train_steps=2", "checkpoints.checkpoint_interval=1"))
    train_quietly(local_run(tmp_path / "a", UPLOADED, "tokens.train_steps=3"))
    other = train_quietly(local_run(tmp_path / "b", UPLOADED, "tokens.train_steps=5")).config
    last = train_quietly(local_run(tmp_path / "a", UPLOADED, "tokens.train_steps=6")).config
    assert losses(other) == whole[3:5]
    assert losses(last)[-1] == whole[5]


def test_what_a_fresh_run_resumes_from_is_fetched_nonetheless(machine: Machine, tmp_path: Path) -> None:
    train_quietly(machine("a"))
    train_quietly(local_run(tmp_path / "b"))
    named = f"checkpoints.resume_checkpoint_path={URL}/2"
    again = local_run(tmp_path / "b", named, "checkpoints.load_mode=model_only")
    fetch_for_run(again, fresh=True)
    assert (again.resume_folder / "manifest.json").is_file()


@pytest.mark.parametrize("folder", ["in the store", "here"])
def test_a_branch_is_uploaded_elsewhere(
    folder: str, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    monkeypatch.setenv("KENOTRON_CACHE", str(tmp_path / "cache"))
    if folder == "here":
        parent = local_run(tmp_path / "a", s3_upload("true"))
    else:
        parent = machine("a", f"checkpoints.staging_path={tmp_path}/staged")
    train_quietly(parent)
    (tmp_path / "my.yaml").write_text(dump(parent))
    code, said, _ = shell("branch", f"{tmp_path}/my.yaml", "--at", "2", "--cooldown", "3", "--name", "cool")
    assert code == 0
    config = load(yaml.safe_load(said), [f"logging.log_dir={tmp_path}/b"])
    assert config.upload_url == f"{URL}-cool"
    run = train_quietly(config)
    assert (run.step, losses(config)[0]) == (5, losses(parent)[2])
    assert [entry.step for entry in RemoteCheckpoints(f"{URL}-cool").all()] == [4, 5]
    assert complete() == [2, 4]
    assert steps_of(tmp_path / "staged") == (["2", "4"] if folder == "in the store" else [])


def test_checkpoints_that_cannot_be_removed_do_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: object) -> None:
        raise CheckpointError("cannot remove 2: Operation not permitted")

    monkeypatch.setattr("kenotron.checkpoint.retention.prune", cannot)
    config = local_run(tmp_path / "a", "checkpoints.keep_last=1")
    _, said = train_and_listen(config)
    assert "cannot remove 2: Operation not permitted" in said
    assert steps_of(config.checkpoint_folder) == ["2", "4"]
