"""`kenotron branch`, and the commands of docs/checkpoints.md around it."""

import contextlib
import hashlib
import io
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

import kenotron as kn
from kenotron.cli import main
from support.pages import blocks, read_page, sections
from support.tiny_run import Shell, losses, metrics, tiny_dict, train_quietly

PEAK, FLOOR = 0.01, 0.001
PAGE = sections(read_page("checkpoints.md"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder of a user, with my.yaml, whose rate falls from step 5 on, trained for 8 steps."""
    content = tiny_dict(Path())
    content["checkpoints"] = {"checkpoints_path": "checkpoints/my_run", "checkpoint_interval": 2}
    content["tokens"]["train_steps"] = 8
    schedule = {"learning_rate": PEAK, "lr_warmup_steps": 2, "lr_decay_style": "linear", "min_decay_lr": FLOOR}
    content["optimizer"]["learning_rate_scheduler"] = schedule | {"lr_decay_starting_step": 4}
    folder = tmp_path_factory.mktemp("trained")
    (folder / "my.yaml").write_text(yaml.safe_dump(content))
    with contextlib.chdir(folder):
        train_quietly(kn.load("my.yaml"))
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, where a test stands."""
    monkeypatch.chdir(shutil.copytree(trained, tmp_path / "user"))
    return Path.cwd()


def typed(line: str) -> str:
    """What a command printed; `> file` is where it goes, too."""
    command, _, file = line.partition(" > ")
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as ended:
        main(shlex.split(command)[1:])
    assert not ended.value.code, line
    if file:
        Path(file).write_text(said.getvalue())
    return said.getvalue()


def content_of(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("at", "peak"), [(4, PEAK), (6, FLOOR + (PEAK - FLOOR) / 2)])
def test_a_branch_anneals_from_the_rate_of_its_step_and_leaves_its_parent_alone(
    at: int, peak: float, folder: Path
) -> None:
    before = content_of(folder / "checkpoints" / "my_run") | content_of(folder / "logs" / "tiny")
    typed(f"kenotron branch my.yaml --at {at} --cooldown 4 --name cool logging.iteration_step_info_interval=2 > c.yaml")
    config = kn.load("c.yaml")
    assert config.logging.iteration_step_info_interval == 2
    train_quietly(config)
    lines = metrics(config)
    assert [line["iteration"] for line in lines] == [at + 1, at + 2, at + 3, at + 4]
    assert [line["lr"] for line in lines] == pytest.approx([peak * (1 - math.sqrt(t / 4)) for t in (1, 2, 3, 4)])
    assert losses(config)[0] == losses(kn.load("my.yaml"))[at]  # the same weights and samples as the parent's
    assert config.checkpoints.checkpoints_path == "checkpoints/my_run-cool"
    assert content_of(folder / "checkpoints" / "my_run") | content_of(folder / "logs" / "tiny") == before


def test_a_branch_of_a_branch_begins_at_the_rate_that_it_had(folder: Path) -> None:
    """The schedule of the first one counts from step 4: at step 6 it is half over."""
    typed("kenotron branch my.yaml --at 4 --cooldown 4 --name cool > c.yaml")
    train_quietly(kn.load("c.yaml"))
    typed("kenotron branch c.yaml --at 6 --cooldown 2 --name colder > d.yaml")
    rate = kn.load("d.yaml").optimizer.learning_rate_scheduler.learning_rate
    assert rate == pytest.approx(PEAK * (1 - math.sqrt(2 / 4)))


def test_a_run_that_began_without_optimizer_state_has_branches(folder: Path) -> None:
    content = yaml.safe_load((folder / "my.yaml").read_text())
    content["checkpoints"]["load_optimizer"] = content["checkpoints"]["load_lr_scheduler"] = False
    (folder / "my.yaml").write_text(yaml.safe_dump(content))
    typed("kenotron branch my.yaml --at 4 --cooldown 4 --name cool > c.yaml")
    config = kn.load("c.yaml").checkpoints
    assert (config.load_mode, config.load_optimizer, config.load_lr_scheduler) == ("cooldown", True, True)


def test_a_run_of_several_files_has_branches(folder: Path) -> None:
    """The last file of them may well be what names the folder of its checkpoints."""
    content = yaml.safe_load((folder / "my.yaml").read_text())
    later = {"checkpoints": content.pop("checkpoints"), "logging": {"iteration_step_info_interval": 3}}
    content["model"].pop("dtype", None)
    content["precision"] = "bf16-mixed"  # over which the second file lays a dtype
    later["model"] = {"dtype": "float32"}
    (folder / "first.yaml").write_text(yaml.safe_dump(content))
    (folder / "later.yaml").write_text(yaml.safe_dump(later))
    said = typed("kenotron branch first.yaml later.yaml --at 4 --cooldown 4 --name cool general.seed=7 > c.yaml")
    assert "made by: kenotron branch first.yaml later.yaml\n" in said
    config = kn.load("c.yaml")
    assert config.checkpoints.checkpoints_path == "checkpoints/my_run-cool"
    assert (config.logging.iteration_step_info_interval, config.general.seed) == (3, 7)
    assert config.model.dtype == "float32"


def test_a_step_without_a_checkpoint_and_a_wrong_style_are_one_line(folder: Path, shell: Shell) -> None:
    for options, message in [
        ("--at 4 --name tiny", "--name: expected a name other than the run's own, found 'tiny'"),
        ("--at 5", "--at: no checkpoint at checkpoints/my_run/5: checkpoints/my_run has 2, 4, 6, 8"),
        ("--at 4 --style fast", "lr_decay_style: expected one of linear, cosine"),
        ("--at 4 tokens.steps=3", "unknown key 'tokens.steps'"),
    ]:
        code, out, error = shell("branch", "my.yaml", "--cooldown", "4", "--name", "cool", *options.split())
        assert (code, out, error.count("\n")) == (2, "", 1)
        assert message in error


def test_a_branch_begins_before_the_decay_has_ended(folder: Path, shell: Shell) -> None:
    zero = ["checkpoints.checkpoints_path=checkpoints/zero", "optimizer.learning_rate_scheduler.min_decay_lr=0"]
    train_quietly(kn.load("my.yaml", [*zero, "general.run=zero"]))
    (folder / "checkpoints" / "my_run").rename("replaced")
    (folder / "checkpoints" / "zero").rename("checkpoints/my_run")
    line = "error: --at: the learning rate is 0 at step 8; expected a step before its decay has ended\n"
    assert shell("branch", "my.yaml", "--at", "8", "--cooldown", "4", "--name", "cool") == (2, "", line)


def test_the_commands_of_the_page_run(folder: Path) -> None:
    numbers = {"2000": "6", "200": "2", "500": "5"}
    for block in blocks(PAGE["Cooldowns from one run"], "bash"):
        for line in block.splitlines():
            typed(re.sub(r"\b(\d+)\b", lambda found: numbers.get(found[1], found[1]), line))
    made = {path.name: path for path in (folder / "checkpoints").iterdir()}
    assert {"my_run-cool-2", "my_run-cool-5"} < set(made)
    assert (made["my_run-cool-5"] / "latest.txt").read_text() == "11"
