"""`kenotron replay`: steps computed again equal the log to the last bit, and what does not is found and named."""

import json
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kenotron.config import dump
from kenotron.data import open_run
from kenotron.data.provenance import step_origins
from kenotron.launch.replaying import config_of_replay
from kenotron.observers.consistency import SLICES, bits_sum, slice_of, state_hash
from kenotron.text.hash_split import text_hash
from support.nursery import Nursery
from support.tiny_run import Shell, text_overrides, tiny_config, tiny_yaml, train_quietly

pytestmark = pytest.mark.budget(10, reason="trains a run and parts of it again")


@given(st.lists(st.integers(0, 900), min_size=1, max_size=6), st.integers(1, 20))
@example([65, 0], 1)  # a rank without rows of a weight
def test_slices_have_every_weight_once_with_its_number(lengths: list[int], most: int) -> None:
    tensors = list(torch.arange(sum(lengths)).split(lengths))
    parts = [each for number in range(SLICES) for each in slice_of(tensors, number)]
    assert [number for _, flat in parts for number in flat.tolist()] == list(range(sum(lengths)))
    assert all(first == int(flat[0]) for first, flat in parts)
    for first, flat in parts:
        with patch("kenotron.observers.consistency.PIECE", most):  # as of a model that is hashed in pieces
            assert bits_sum(flat, first) == sum(each * (2 * each + 1) for each in flat.tolist())


def test_one_flipped_bit_of_any_weight_is_in_the_hash_of_its_slice(tmp_path: Path) -> None:
    run = train_quietly(tiny_config(tmp_path, "tokens.train_steps=1"))

    def hashes() -> list[int]:
        return [int(state_hash(run)) for run.step in range(SLICES)]

    before = hashes()
    assert len(set(before)) == SLICES
    for parameter in run.model.parameters():
        bits = parameter.data.view(-1).view(torch.int32)
        bits[len(bits) // 2] ^= 1
        assert sum(one != other for one, other in zip(before, hashes())) == 1
        bits[len(bits) // 2] ^= 1


def test_elements_that_change_places_change_the_hash() -> None:
    """By the formula: the bits of element i as an integer, times 2 i + 1."""
    piece = torch.tensor([1.0, 2.0, -3.0])
    bits = piece.view(torch.int32).tolist()
    assert int(bits_sum(piece, 5)) == sum(value * (2 * number + 1) for number, value in enumerate(bits, start=5))
    assert int(bits_sum(piece.flip(0), 5)) != int(bits_sum(piece, 5))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of nine steps with checkpoints at 4, 8 and 9."""
    folder = tmp_path_factory.mktemp("run")
    train_quietly(tiny_config(folder, "tokens.train_steps=9", "checkpoints.checkpoint_interval=4"))
    return folder


@pytest.mark.parametrize(("step", "first"), [(7, 5), (3, 1)])
def test_steps_computed_again_are_equal_bit_by_bit(step: int, first: int, run: Path, shell: Shell) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    code, said, error = shell("replay", run / "checkpoints", "--step", step)
    assert (code, error) == (0, "")
    assert said.endswith(f"steps {first} to {step}: every number is equal\n")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before


def test_steps_are_computed_with_the_settings_they_had(tmp_path: Path, shell: Shell) -> None:
    """A run of six steps that went on to nine, with another learning rate after the sixth."""
    schedule = "optimizer.learning_rate_scheduler"
    decay = ("checkpoints.checkpoint_interval=3", f"{schedule}.lr_decay_style=linear", f"{schedule}.min_decay_lr=0.001")
    train_quietly(tiny_config(tmp_path, "tokens.train_steps=6", *decay))
    train_quietly(tiny_config(tmp_path, "tokens.train_steps=9", *decay))
    checkpoints = str(tmp_path / "checkpoints")
    for step, first in ((8, 7), (5, 4)):
        code, said, _ = shell("replay", checkpoints, "--step", step)
        assert (code, said.splitlines()[-1]) == (0, f"steps {first} to {step}: every number is equal")
    for number in (3, 6):
        shutil.rmtree(tmp_path / "checkpoints" / str(number))
    code, said, _ = shell("replay", checkpoints, "--step", "5")
    assert (code, "the run later continued with another schedule" in said) == (1, True)


def test_a_replay_writes_to_no_store(tmp_path: Path) -> None:
    """It would upload the step, and `keep_last: 1` would remove the run's checkpoints there."""
    config = tiny_config(
        tmp_path,
        "s3_upload={upload_s3_path: s3://bucket/run, remove_after_upload: true}",
        f"general.benchmark_csv_path={tmp_path}/runs.csv",
        "profiler={wait: 1}",
        "checkpoints.checkpointing_engine=async",
    )
    assert config.upload_url == "s3://bucket/run"
    found = config_of_replay(config, tmp_path / "replay", 3, [])
    assert (found.upload_url, found.s3_upload, found.profiler, found.general.benchmark_csv_path) == (None,) * 4
    keys = ("checkpoints.checkpoints_path=s3://bucket/run", f"checkpoints.staging_path={tmp_path}/staged")
    straight = tiny_config(tmp_path, *keys)
    found = config_of_replay(straight, tmp_path / "replay", 3, ["profiler={detect_anomaly: true}"])
    assert (found.upload_url, found.checkpoints.staging_path) == (None, None)
    assert found.profiler is not None


def test_another_layout_agrees_up_to_rounding(run: Path, shell: Shell) -> None:
    accumulated = ("tokens.micro_batch_size=1", "tokens.batch_accumulation_per_replica=4")
    code, said, _ = shell("replay", run / "checkpoints", *accumulated, "--step", "6")
    assert (code, said.splitlines()[-1]) == (0, "steps 5 to 6: equal up to rounding")


def test_where_numbers_first_differ_is_named_with_the_documents_of_that_step(run: Path, shell: Shell) -> None:
    path = run / "logs" / "tiny" / "metrics.jsonl"
    text = path.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    lines[5]["state_hash"] += 1  # as if a bit had flipped in step 6
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, said, _ = shell("replay", run / "checkpoints", "--step", "7")
    path.write_text(text)
    assert code == 1
    assert f"step 6: state_hash was {lines[5]['state_hash']} and is {lines[5]['state_hash'] - 1}" in said
    assert "step 6 of stage 'only': 4 samples" in said
    assert "step 7" not in said


@pytest.mark.parametrize(
    ("override", "own"),
    [
        ("checkpoints.checkpoints_path={run}/checkpoints", "checkpoints.checkpoints_path"),
        ("s3_upload.upload_s3_path=s3://bucket/run", "s3_upload"),
        ("general.hooks=[]", "general.hooks"),
    ],
)
def test_an_override_cannot_lead_a_replay_to_the_runs_own_files(
    override: str, own: str, run: Path, shell: Shell
) -> None:
    """It trained in the run's folder, and its `keep_last: 1` removed the run's checkpoints."""
    code, _, error = shell("replay", run / "checkpoints", override.format(run=run), "--step", "3")
    assert (code, f"a replay sets {own} itself" in error) == (2, True)
    assert sorted(path.name for path in (run / "checkpoints").glob("[0-9]*")) == ["4", "8", "9"]


def test_anomaly_mode_is_the_same_layout(run: Path, shell: Shell) -> None:
    code, said, _ = shell("replay", run / "checkpoints", "profiler={detect_anomaly: true}", "--step", "5")
    assert (code, said.splitlines()[-1]) == (0, "steps 5 to 5: every number is equal")


def test_a_damaged_checkpoint_is_not_begun_at(run: Path, tmp_path: Path, shell: Shell) -> None:
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    weights = next((tmp_path / "checkpoints" / "8" / "model").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    code, said, error = shell("replay", tmp_path / "checkpoints", "--step", "9")
    assert code == 0
    assert "warning: skipping checkpoint 8: " in error
    assert "checkpoints/4\n" in said
    assert said.endswith("steps 5 to 9: every number is equal\n")


def test_steps_that_the_log_lacks_are_not_called_equal(run: Path, tmp_path: Path, shell: Shell) -> None:
    lines = (run / "logs" / "tiny" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("5\n" + lines[6])
    arguments = (str(run / "checkpoints"), "--step", "7", "--log-dir", str(tmp_path))
    code, said, _ = shell("replay", *arguments)
    line = "steps 5 to 7: every number is equal; the log has 1 of these 3 steps"
    assert (code, said.splitlines()[-1]) == (0, line)
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 7, "loss": 1.0}\n')
    code, _, error = shell("replay", *arguments)
    line = "expected lm_loss, grad_norm, state_hash, lr of steps 5 to 7, found none of them"
    assert (code, line in error) == (2, True)


def test_a_step_that_was_not_logged_is_refused(run: Path, shell: Shell) -> None:
    code, _, error = shell("replay", run / "checkpoints", "--step", "10")
    assert (code, "--step: expected a step of the log, which has 1 to 9, found 10" in error) == (2, True)
    assert shell("replay", run, "--step", "1")[0] == 2


def test_a_file_of_yaml_is_not_taken_for_a_run(tmp_path: Path, shell: Shell) -> None:
    code, _, error = shell("replay", tiny_yaml(tmp_path), "--step", "1")
    assert (code, "tiny.yaml is a file; expected a checkpoint, or a folder of checkpoints" in error) == (2, True)


def test_documents_of_small_texts_are_found_behind_a_checkpoint(tmp_path: Path, shell: Shell) -> None:
    """Each text holds out one that no fraction chose: the checkpoint says which, whatever came to the text since."""
    for name in ("a", "b"):
        lines = [json.dumps({"text": f"{name}{number} " * 60}) for number in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    files = (tmp_path / f"{name}.jsonl" for name in ("a", "b"))
    mixture = ", ".join(f"{{weight: 1, text_files: {file}}}" for file in files)
    text = (*text_overrides(tmp_path)[1:], f"data_stages.0.data.dataset={{mixture: [{mixture}]}}")
    keys = ("tokens.train_steps=4", "tokens.val_fraction=1e-9", "checkpoints.checkpoint_interval=2")
    config = tiny_config(tmp_path, *text, *keys)
    held_out = train_quietly(config).data.held_out_hashes()
    assert len(held_out) == 2
    new = min((f"c{number} " * 60 for number in range(60)), key=text_hash)
    assert text_hash(new) < min(int(each, 16) for each in held_out)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(json.dumps({"text": new}) + "\n")

    def named(held_out: list[str]) -> list[str]:
        with open_run(config, 4, lambda line: None, held_out=held_out) as data:
            return [f"{each.file} window {each.window}, tokens" for each in step_origins(data, 4)]

    assert named(held_out) != named([])
    (tmp_path / "run.yaml").write_text(dump(config))
    code, said, _ = shell("data", "which", tmp_path / "run.yaml", "--step", "4")
    assert (code, [line for line in named(held_out) if line not in said]) == (0, [])


@pytest.mark.slow
def test_a_run_of_two_ranks_is_replayed_on_its_layout_and_on_others(nursery: Nursery, tmp_path: Path) -> None:
    split = ("parallelism.dp=2", "tokens.micro_batch_size=2", "optimizer.zero_stage=1")
    keys = ("tokens.train_steps=6", "checkpoints.checkpoint_interval=4")
    trained = nursery.run("train", tiny_yaml(tmp_path), *split, *keys, folder=tmp_path)
    assert trained.code == 0, trained.stderr
    one = ("parallelism.dp=1", "tokens.micro_batch_size=4")
    for layout, agreement in (
        ((), "every number is equal"),
        (one[:1], "equal up to rounding"),
        ((*one, "parallelism.tp=2"), "equal up to rounding"),
        ((*one, "parallelism.pp=2"), "equal up to rounding"),
    ):
        done = nursery.run("replay", tmp_path / "checkpoints", *layout, "--step", "6", folder=tmp_path)
        assert done.code == 0, done.stdout
        assert done.stderr == "" or done.stderr.startswith("The global batch stays 4: ")
        assert f"steps 5 to 6: {agreement}" in done.stdout
