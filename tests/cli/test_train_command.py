"""`kenotron train` as a shell sees it: exit codes, what stands on stdout and stderr, overrides, folders."""

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from kenotron.cli.nanotron_scripts import run_train
from support.nursery import Nursery
from support.tiny_run import (
    KENOTRON,
    REPOSITORY,
    Shell,
    command,
    environment,
    tiny_config,
    tiny_dict,
    tiny_yaml,
    train_quietly,
    wait_until,
    write_texts,
)


def of_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = environment(folder)
    command = [KENOTRON[0], *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)


def relative_yaml(folder: Path) -> Path:
    """A config whose folders are relative, as a user writes it."""
    content = tiny_dict(folder)
    content["checkpoints"]["checkpoints_path"] = "checkpoints"
    del content["logging"]["log_dir"]
    file = folder / "my.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.mark.slow
@pytest.mark.budget(10, reason="a process that imports torch, TensorBoard and the profiler, as a user's first does")
def test_a_fresh_process_with_everything_on_says_nothing_on_stderr(tmp_path: Path) -> None:
    """bf16, text, TensorBoard, validation, samples, profiler: no library prints anything besides."""
    content = tiny_dict(tmp_path)
    content["model"] |= {"dtype": "bfloat16", "document_masking": True}
    content["model"]["model_config"] |= {"vocab_size": 300, "eos_token_id": 0}
    content["optimizer"]["optimizer_factory"] = {"name": "muon", "adam_eps": 1e-8}
    content["logging"] |= {"tensorboard": True, "sample_prompts": ["The sum"]}
    content["tokens"] |= {"train_steps": 8, "val_check_interval": 4, "limit_val_batches": -1, "val_fraction": 0.1}
    content["tokenizer"] = {"train": {"vocab_size": 300}}
    content["profiler"] = {"profiler_export_path": str(tmp_path / "traces"), "skip_first": 0, "repeat": 2}
    content["profiler"]["export_chrome_trace"] = True
    content["data_stages"][0]["data"]["dataset"] = {"text_files": write_texts(tmp_path)}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(content))
    process = command("train", "my.yaml", folder=tmp_path, KENOTRON_CACHE=str(tmp_path / "cache"))
    assert (process.returncode, process.stderr) == (0, "")
    assert "[INFO" not in process.stdout
    assert len(list((tmp_path / "traces").rglob("*.pt.trace.json"))) == 2


def test_the_first_line_comes_before_torch(tmp_path: Path) -> None:
    tiny_yaml(tmp_path)
    code = "import sys; sys.modules['torch'] = None; from kenotron.cli import main; main(['train', 'tiny.yaml'])"
    process = of_python(tmp_path, "-c", code)
    assert "import of torch halted" in process.stderr
    assert process.stdout == "project: tests\n"


def test_a_run_from_another_folder_puts_its_files_there(tmp_path: Path, nursery: Nursery) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    file = relative_yaml(tmp_path)
    finished = nursery.run("train", file, folder=elsewhere)
    assert (finished.code, finished.stderr) == (0, "")
    assert (elsewhere / "checkpoints" / "3" / "manifest.json").exists()
    assert (elsewhere / "logs" / "tiny" / "metrics.jsonl").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "my.yaml"]


@pytest.mark.slow
def test_run_train_takes_the_seeds_spelling_and_overrides(tmp_path: Path, nursery: Nursery) -> None:
    assert nursery.run("train", relative_yaml(tmp_path), folder=tmp_path).code == 0
    process = of_python(tmp_path, str(REPOSITORY / "run_train.py"), "--config-file=my.yaml", "tokens.train_steps=5")
    assert (process.returncode, process.stderr) == (0, "")
    assert (tmp_path / "checkpoints" / "latest.txt").read_text().strip() == "5"
    assert "start_iteration_step: 3 " in process.stdout


INTERVAL = "--sanity-check-dataloader-interval"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["my.yaml"], "the following arguments are required: --config-file"),
        (
            ["--config-file", "my.yaml", INTERVAL, "5"],
            f"{INTERVAL} is not supported: `kenotron data which my.yaml --step N` prints samples",
        ),
    ],
)
def test_run_train_names_its_own_flags(arguments: list[str], line: str, shell: Shell) -> None:
    code, _, said = shell(*arguments, command=run_train)
    assert (code, said.endswith(f"run_train.py: error: {line}\n")) == (2, True)


@pytest.mark.parametrize("text", [True, False])
def test_the_end_of_a_run_names_commands_that_work(text: bool, tmp_path: Path, nursery: Nursery) -> None:
    content = tiny_dict(tmp_path)
    if text:
        content["tokenizer"] = {"train": {"vocab_size": 300}}
        content["model"]["model_config"] |= {"vocab_size": 300, "eos_token_id": 0, "max_position_embeddings": 200}
        content["data_stages"][0]["data"]["dataset"] = {"text_files": write_texts(tmp_path)}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(content))
    said = nursery.run("train", "my.yaml", folder=tmp_path).stdout
    lines = [line.strip() for line in said.partition(". Next:\n")[2].splitlines()]
    lines = [line for line in lines if line.split()[0].endswith("kenotron")]
    assert [line.split()[1] for line in lines] == ["generate", "convert", "report"]

    for line in lines if text else lines[:1]:
        finished = nursery.run(*shlex.split(line)[1:], folder=tmp_path)
        assert finished.code == 0, line
        if text:
            assert finished.stderr.startswith("no --prompt: ") if line == lines[0] else finished.stderr == "", line
    assert (tmp_path / "checkpoints" / "3-hf" / "model.safetensors").exists() == text


# ---- what was wrong is said in one line, and exit code 2 ---------------------------------------------------


def test_wrong_input_is_one_error_line_and_exit_code_2(tmp_path: Path, nursery: Nursery) -> None:
    hook = "general.hooks=[support.user_parts.Spi]"
    finished = nursery.run("train", tiny_yaml(tmp_path), hook, folder=tmp_path)
    assert finished.code == 2, finished.stderr
    assert re.fullmatch(r"error: .*did you mean 'Spy'\?\n", finished.stderr)
    assert not (tmp_path / "checkpoints" / "3").exists()


def test_debug_shows_the_traceback(tmp_path: Path, nursery: Nursery) -> None:
    finished = nursery.run("--debug", "train", "nowhere.yaml", folder=tmp_path)
    assert finished.code != 0
    assert "Traceback (most recent call last)" in finished.stderr
    assert "nowhere.yaml" in finished.stderr


def test_a_bug_in_a_users_hook_is_a_traceback_and_exit_code_1(tmp_path: Path, nursery: Nursery) -> None:
    finished = nursery.run("train", tiny_yaml(tmp_path), "general.hooks=[support.user_parts.Broken]", folder=tmp_path)
    assert finished.code == 1
    assert "Traceback (most recent call last)" in finished.stderr
    assert "RuntimeError: this hook is broken" in finished.stderr


def test_a_config_on_stdin_of_a_pipe_that_closes_is_no_error(tmp_path: Path) -> None:
    """`kenotron config show my.yaml | head -1`: the reader goes away, and nothing is said about it."""
    file = tiny_yaml(tmp_path)
    line = f"{shlex.join(KENOTRON)} config show {file} | head -1"
    env = environment(tmp_path)
    shown = subprocess.run(line, shell=True, env=env, capture_output=True, text=True, timeout=100)
    assert (shown.stderr, shown.stdout.count("\n")) == ("", 1)


@pytest.mark.slow
@pytest.mark.budget(8, reason="a process of its own, which imports torch for 5 s: a terminal cannot be given to a fork")
def test_on_a_terminal_log_lines_scroll_above_a_bar_with_the_time_left(tmp_path: Path) -> None:
    import pty

    reader, terminal = pty.openpty()
    process = subprocess.Popen(
        [*KENOTRON, "train", str(tiny_yaml(tmp_path)), "tokens.train_steps=30"],
        cwd=tmp_path,
        env=environment(tmp_path, TERM="xterm", COLUMNS="500"),
        stdout=terminal,
        stderr=subprocess.PIPE,
    )
    os.close(terminal)
    seen = b""
    while True:
        try:
            seen += os.read(reader, 65536)
        except OSError:  # how a terminal says that the other side is gone
            break
    assert process.wait(60) == 0
    assert process.stderr.read() == b""  # type: ignore[union-attr]
    text = seen.decode()
    assert re.search(r"30/30.*loss.*ETA", text)
    erased = "\r\x1b[2K"  # the bar, before a line takes its place
    lines = list(re.finditer(r"step \d+/30 \||\[only\] steps|Total number|Saved checkpoint", text))
    assert len(lines) == 33
    for start in (line.start() for line in lines):
        before = text[:start].removesuffix("\x1b[?25h")  # the cursor comes back after the bar
        assert start == 0 or before.endswith(("\n", erased)), text[start - 40 : start + 60]
    assert len(re.findall(r"step \d+/30 \|.*grad_norm [\d.]+", text)) == 30


def test_ctrl_c_before_the_first_step_is_said(tmp_path: Path, nursery: Nursery) -> None:
    """While the data are opened, which may take an hour, only the command line reports anything."""
    slow = "data_stages.0.data.dataset={source: support.user_parts.slowly}"
    child = nursery.start("train", tiny_yaml(tmp_path), slow, folder=tmp_path)
    wait_until((tmp_path / "opening").exists, 120, lambda: "no data were opened in two minutes")
    os.kill(child.pid, signal.SIGINT)
    finished = child.wait()
    assert (finished.code, finished.stderr) == (130, "interrupted\n")


# ---- what a run's own checkpoints decide: whose others are needed, and when --fresh sets them aside --------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny_yaml(tmp_path)
    return tmp_path


def test_a_run_with_checkpoints_of_its_own_needs_those_of_its_parent_no_more(here: Path, shell: Shell) -> None:
    train_quietly(tiny_config(here / "parent", "tokens.train_steps=1"))
    source = "checkpoints.resume_checkpoint_path=parent/checkpoints"
    assert shell("train", "tiny.yaml", source, "tokens.train_steps=2")[0] == 0
    (here / "parent").rename(here / "gone")
    assert shell("config", "check", "tiny.yaml", source, "tokens.train_steps=3")[0] == 0
    assert shell("train", "tiny.yaml", source, "tokens.train_steps=3")[0] == 0
    code, _, said = shell("config", "check", "tiny.yaml", source, "checkpoints.checkpoints_path=others")
    assert (code, "resume_checkpoint_path: no such file or folder: parent/checkpoints" in said) == (2, True)


def test_fresh_sets_nothing_aside_for_a_run_that_cannot_begin(here: Path, shell: Shell) -> None:
    assert shell("train", "tiny.yaml", "tokens.train_steps=2")[0] == 0
    code, _, said = shell("train", "tiny.yaml", "--fresh", "data_stages.0.data.dataset={tokens: nowhere}")
    assert (code, "no such file or folder: nowhere" in said) == (2, True)
    assert (here / "checkpoints" / "2").is_dir()
    assert shell("train", "tiny.yaml", "--fresh", "tokens.train_steps=1")[0] == 0
    (aside,) = (here / "checkpoints").glob("replaced-*")
    assert sorted(path.name for path in aside.iterdir()) == ["2", "latest.txt"]
    assert (here / "checkpoints" / "1").is_dir()


def test_data_of_a_stage_that_is_over_may_be_gone(here: Path, shell: Shell) -> None:
    for name in ("one", "two"):
        np.save(f"{name}.npy", np.arange(600, dtype=np.uint16) % 50)
    stages = ", ".join(
        f"{{name: {name}, start_training_step: {start}, data: {{dataset: {{tokens: {name}.npy}}}}}}"
        for name, start in (("one", 1), ("two", 3))
    )
    for steps in ("2", "3"):
        run = ("tiny.yaml", f"data_stages=[{stages}]", f"tokens.train_steps={steps}")
        assert shell("config", "check", *run)[0] == 0
        assert shell("train", *run)[0] == 0
        Path("one.npy").unlink(missing_ok=True)
    code, _, said = shell("config", "check", *run, "checkpoints.checkpoints_path=others")
    assert (code, "no such file or folder: one.npy" in said) == (2, True)
