"""`kn.compare`, `kn.replay` and `kn.submit` say in Python what the commands print."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import kenotron as kn
from kenotron.config import InputError
from support.tiny_run import Shell, tiny_config, tiny_yaml, train_quietly

GENERIC = ("--gpus-per-node", "2", "--time", "1:00:00", "--dry-run")


def without_times(script: str) -> str:
    return re.sub(r"\d{8}_\d{6}", "TIME", script)


def test_a_job_of_python_is_that_of_the_command(tmp_path: Path, shell: Shell) -> None:
    file = tiny_yaml(tmp_path)
    said: list[str] = []
    options = {"gpus_per_node": 2, "sbatch": {"time": "1:00:00"}, "dry_run": True, "say": said.append}
    found = kn.submit(file, ["parallelism.dp=2"], **options)
    code, printed, told = shell("submit", file, "parallelism.dp=2", *GENERIC)
    assert (code, without_times(printed)) == (0, without_times(found.script))
    assert told.splitlines() == said
    assert (found.jobs, found.where) == ([], "1 node x 2 ranks")
    assert not found.folder.exists()
    with pytest.raises(InputError, match=r"parallelism: dp 1 .* needs 1 rank, but 1 node of 2 have 2"):
        kn.submit(file, gpus_per_node=2, dry_run=True)


def test_a_replay_says_what_is_equal_and_what_is_not(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "tokens.train_steps=6", "checkpoints.checkpoint_interval=4")
    train_quietly(config)
    found = kn.replay(tmp_path / "checkpoints", 6, say=lambda line: None)
    assert found is not None
    assert (found.first, found.last, found.compared, found.rounding, found.equal) == (5, 6, 2, 0.0, True)
    (log,) = Path(config.logging.log_dir).rglob("metrics.jsonl")
    log.write_text(re.sub(r'("iteration": 6, .*"lm_loss": )[0-9.]+', r"\g<1>1.5", log.read_text()))
    found = kn.replay(tmp_path / "checkpoints", 6, say=lambda line: None)
    assert found is not None
    assert not found.equal
    assert [line.split(" and is ")[0] for line in found.differences] == ["step 6: lm_loss was 1.5"]
    assert found.reads[0].startswith("step 6 of stage ")


def test_a_comparison_is_returned(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "tokens.train_steps=2")
    said: list[str] = []
    accumulated = ["tokens.micro_batch_size=2", "tokens.batch_accumulation_per_replica=2"]
    comparison = kn.compare(config, accumulated, steps=2, say=said.append)
    assert comparison.agrees
    assert {(number.name, number.step) for number in comparison.numbers} == {
        (name, step) for name in ("lm_loss", "grad_norm") for step in (1, 2)
    }
    assert said[0] == "run 1 of 5: as it is, 2 steps on 1 rank"
    with pytest.raises(InputError, match=r"expected at most tokens\.train_steps 2, found 3"):
        kn.compare(config, accumulated, steps=3)


def test_a_second_file_is_a_complete_config_or_lies_over_the_first(tmp_path: Path, shell: Shell) -> None:
    whole, layout = tiny_yaml(tmp_path), tmp_path / "layout.yaml"
    layout.write_text("parallelism: {tp: 3}\ntokens: {micro_batch_size: 2, batch_accumulation_per_replica: 2}\n")
    refusal = "layout.yaml:1: parallelism.tp: expected a divisor of num_attention_heads"
    assert refusal in shell("compare", whole, layout)[2]
    other = tmp_path / "other.yaml"
    other.write_text(re.sub(r"\n *seed: 7\b", "", whole.read_text()))
    assert "error: general.seed: 7 and 42 are different runs" in shell("compare", whole, other)[2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda file: kn.compare(file, "parallelism.tp=2"), "overrides: expected a list such as"),
        (lambda file: kn.replay(file, 1, "parallelism.tp=2"), "overrides: expected a list such as"),
        (lambda file: kn.submit(file, "parallelism.tp=2", dry_run=True), "overrides: expected a list such as"),
        (lambda file: kn.compare(file, ["parallelism.tp=2"], steps="a"), "steps: expected an integer of 1 or more, f"),
        (lambda file: kn.compare(file, ["parallelism.tp=2"], steps=0), "steps: expected an integer of 1 or more, f"),
        (lambda file: kn.replay(file, step="a"), "step: expected an integer of 1 or more, found 'a'"),
        (lambda file: kn.replay(file, step=2.0), "step: expected an integer of 1 or more, found 2.0"),
    ],
)
def test_a_wrong_argument_is_named(call: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        call(tiny_yaml(tmp_path))
