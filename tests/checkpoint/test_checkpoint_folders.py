"""Which checkpoint is meant, which is newest, which may go."""

import math
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenotron.checkpoint.engine import Keep
from kenotron.checkpoint.folders import list_checkpoints, newest_complete, resolve
from kenotron.checkpoint.manifest import Manifest, render
from kenotron.checkpoint.retention import prune, to_prune
from kenotron.checkpoint.saving import save
from kenotron.config.errors import CheckpointError
from support.checkpoint_states import load_and_compare, save_step, weights


def save_tiny(root: Path, step: int) -> None:
    model = {"w": weights(0)["model.norm.weight"]}
    save(root, step, model=model, optimizer=None, state={}, config_yaml="", model_config={})


def claim(root: Path, step: int, saved_at: float, state: dict[str, float] | None = None) -> None:
    """A checkpoint of no files at all: enough for whoever looks only at manifests."""
    (root / str(step)).mkdir()
    (root / str(step) / "manifest.json").write_bytes(render(Manifest(step, saved_at, state or {}, {})))


def test_the_newest_is_the_one_saved_last_not_the_one_with_the_highest_step(tmp_path: Path) -> None:
    """A fresh run in a folder where an older one got further."""
    for step in (9, 100, 200, 10):
        save_tiny(tmp_path, step)
    assert (tmp_path / "latest.txt").read_bytes() == b"10"
    assert newest_complete(tmp_path) == resolve(tmp_path) == tmp_path / "10"
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [9, 100, 200, 10]


def test_a_clock_that_goes_backwards_does_not_change_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, now in ((10, 3000.0), (20, 2000.0), (30, 2000.0), (40, 5000.0)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        save_tiny(tmp_path, step)
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [10, 20, 30, 40]


def test_a_checkpoint_that_was_saved_but_not_yet_written_into_latest_is_found(tmp_path: Path) -> None:
    save_tiny(tmp_path, 10)
    save_tiny(tmp_path, 20)
    (tmp_path / "latest.txt").write_text("10\n")  # a newline at the end does no harm
    assert newest_complete(tmp_path) == tmp_path / "20"
    assert resolve(str(tmp_path)) == tmp_path / "10"
    (tmp_path / "latest.txt").unlink()
    assert newest_complete(tmp_path) == tmp_path / "20"
    assert resolve(tmp_path) == tmp_path / "20"


def test_a_step_folder_may_be_copied_and_renamed_and_still_be_named_directly(tmp_path: Path) -> None:
    save_step(tmp_path, 10)
    shutil.copytree(tmp_path / "10", tmp_path / "best")
    assert resolve(tmp_path / "best") == tmp_path / "best"
    shutil.copytree(tmp_path / "10", tmp_path / "30")
    assert newest_complete(tmp_path) == tmp_path / "10"
    (entry,) = (entry for entry in list_checkpoints(tmp_path) if entry.step == 30)
    assert "30 holds step 10" in (entry.problem or "")
    shutil.move(tmp_path, tmp_path.with_name("moved"))
    assert load_and_compare(resolve(tmp_path.with_name("moved"))) == 10


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("root/15", r"no checkpoint at .*root/15: .*root has 10, 20$"),
        ("root/latest", r"no checkpoint at .*root/latest: .*root has no 'latest'; did you mean 'latest.txt'\?$"),
        ("rot", r"no checkpoint at .*rot: .* has no 'rot'; did you mean 'root'\?$"),
        ("missing/deep/10", r"no checkpoint at .*: .* has no 'missing'$"),
        ("empty", r"empty is not a checkpoint: it has no complete checkpoint$"),
        ("root/10/model", r"model is not a checkpoint: it has no complete checkpoint$"),
        ("stale", r"stale/latest.txt names '30', which is missing; it has 10$"),
        ("garbage", r"garbage/latest.txt names 'x y', which is missing; it has 10$"),
        ("root/30.tmp-00000000", r"it is the unfinished save of a killed process$"),
        ("hf", r"hf is not a checkpoint: it is a Hugging Face model; `kenotron convert from-hf`"),
        ("nanotron", r"nanotron is not a checkpoint: it is a nanotron checkpoint"),
        ("of_nanotron", r"latest.txt names '10', it is a nanotron checkpoint; `kenotron convert from-nanotron`"),
        ("broken/10", r"broken/10/manifest.json is damaged"),
    ],
)
def test_an_argument_that_is_no_checkpoint_is_explained(tmp_path: Path, argument: str, message: str) -> None:
    save_tiny(tmp_path / "root", 10)
    for name in ("stale", "garbage", "broken"):
        shutil.copytree(tmp_path / "root", tmp_path / name)
    save_tiny(tmp_path / "root", 20)
    (tmp_path / "stale" / "latest.txt").write_text("30")
    (tmp_path / "garbage" / "latest.txt").write_text("x y")
    (tmp_path / "broken" / "10" / "manifest.json").write_text("{}")
    for folder in ("empty", "root/30.tmp-00000000", "hf", "nanotron"):
        (tmp_path / folder).mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "nanotron" / "checkpoint_metadata.json").write_text("{}")
    shutil.copytree(tmp_path / "nanotron", tmp_path / "of_nanotron" / "10")
    (tmp_path / "of_nanotron" / "latest.txt").write_text("10")
    with pytest.raises(CheckpointError, match=message) as error:
        resolve(tmp_path / argument)
    assert "\n" not in str(error.value)


STEPS = st.integers(0, 60)
KEEP = st.builds(
    Keep, st.integers(1, 5), st.none() | st.integers(1, 20), st.frozensets(STEPS, max_size=3), st.booleans()
)


@given(st.lists(STEPS, unique=True, max_size=12), KEEP, STEPS, st.permutations(range(61)))
def test_retention_keeps_what_it_names_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], keep: Keep, damaged: int, losses: list[int]
) -> None:
    """Steps that 7 divides had no validation, and the loss of every eleventh is not finite."""
    root = tmp_path_factory.mktemp("retention")
    val = {step: math.inf if step % 11 == 0 else float(losses[step]) for step in steps if step % 7}
    for order, step in enumerate(steps):
        claim(root, step, saved_at=1000.0 + order, state={"val_loss": val[step]} if step in val else {})
    if damaged not in steps:
        (root / str(damaged)).mkdir()
    expected = set(steps[-keep.last :]) | (keep.protected & set(steps))
    expected |= {step for step in steps if keep.every and step % keep.every == 0}
    if keep.best:
        expected |= {step for step in val if val[step] == min(val.values()) < math.inf}
    removed = {int(path.name) for path in prune(root, keep)}
    foreign = {damaged} - set(steps)
    assert {int(path.name) for path in root.iterdir()} == expected | foreign
    assert removed == set(steps) - expected
    if steps:
        assert newest_complete(root) == root / str(steps[-1])
    assert prune(root, keep) == []
    shutil.rmtree(root)


def test_without_keep_last_everything_stays(tmp_path: Path) -> None:
    for step in range(5):
        claim(tmp_path, step, saved_at=float(step))
    assert to_prune(tmp_path, Keep(None, 2)) == []
    assert prune(tmp_path, Keep(None)) == []


def test_the_newest_complete_checkpoint_stays_when_newer_ones_are_damaged(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save_tiny(tmp_path, step)
    (tmp_path / "30" / "manifest.json").write_text("[]")
    (tmp_path / "40" / "config.yaml").unlink()
    assert [path.name for path in prune(tmp_path, Keep(1))] == ["10"]
    assert newest_complete(tmp_path) == tmp_path / "20"


def test_the_one_that_latest_names_stays(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_tiny(tmp_path, step)
    (tmp_path / "latest.txt").write_text("10")
    assert [path.name for path in prune(tmp_path, Keep(1))] == ["20"]


@pytest.mark.parametrize("keep", [Keep(0), Keep(1, every=0), Keep(-1)])
def test_retention_of_less_than_one_is_refused(tmp_path: Path, keep: Keep) -> None:
    with pytest.raises(CheckpointError, match=r"keep_(last|every) must be at least 1; found (0|-1)"):
        prune(tmp_path, keep)
