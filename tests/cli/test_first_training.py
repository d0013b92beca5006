"""docs/your-first-training.md: its commands, in their order, on its own text, with a smaller model; other pages."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import kenotron as kn
from support.nursery import Finished, Nursery
from support.pages import blocks, in_a_users_folder, read_page, sections
from support.tiny_run import REPOSITORY, Shell

PAGE = read_page("your-first-training.md")
STEPS, MORE_STEPS = 12, 14  # in place of the page's 400 and 600


def commands() -> list[str]:
    """Every command of the page's bash blocks; one may have several lines, inside of quotes."""
    found: list[str] = []
    for block in blocks(PAGE, "bash"):
        quoted = False
        for line in block.splitlines():
            found[-1:] = [f"{found[-1]}\n{line}"] if quoted else [*found[-1:], line]
            quoted = found[-1].count('"') % 2 == 1
    return found


def shrink(file: Path) -> None:
    """The starter with a tiny model and few steps, which take their time so that they can be interrupted."""
    config = yaml.safe_load(file.read_text())
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
    config["model"]["model_config"] |= sizes | {"vocab_size": 512}
    config["model"]["dtype"] = "float32"
    config["tokenizer"]["train"]["vocab_size"] = 512
    config["tokens"] |= {"sequence_length": 32, "train_steps": STEPS, "val_check_interval": STEPS}
    config["optimizer"]["learning_rate_scheduler"] |= {"lr_warmup_steps": 2, "lr_decay_starting_step": 8}
    config["logging"]["tensorboard"] = False
    config["general"]["hooks"] = ["support.user_parts.Leisurely"]
    file.write_text(yaml.safe_dump(config))


def metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "logs" / "text-folder" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def interrupted(nursery: Nursery, arguments: list[str], folder: Path) -> Finished:
    """The command, with Ctrl-C after two steps."""
    child = nursery.start(*arguments, folder=folder)
    deadline = time.monotonic() + 120
    while len(metrics(folder)) < 2 and child.runs() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGINT)
    return child.wait()


def run_page(folder: Path, nursery: Nursery) -> dict[str, Finished]:
    """Every command of the page but the installation, by its text; the first training is interrupted."""
    done: dict[str, Finished] = {}
    install = sections(PAGE)["Install"]
    for line in commands():
        if line in install:
            continue
        text, _, redirected = line.partition(" > ")
        program, *arguments = shlex.split(text.replace("tokens.train_steps=600", f"tokens.train_steps={MORE_STEPS}"))
        if program != "kenotron":
            assert program in ("mkdir", "python")
            program = sys.executable if program == "python" else program
            subprocess.run([program, *arguments], cwd=folder, check=True)
            continue
        if arguments == ["train", "my.yaml"] and line not in done:
            done[line] = interrupted(nursery, arguments, folder)
            assert 2 <= len(metrics(folder)) < STEPS
            continue
        done[f"{line} (again)" if line in done else line] = finished = nursery.run(*arguments, folder=folder)
        if redirected:
            (folder / redirected).write_text(finished.stdout)
            shrink(folder / redirected)
    return done


@pytest.mark.slow
def test_the_page_works_as_it_stands(tmp_path: Path, nursery: Nursery, monkeypatch: Any, capsys: Any) -> None:
    done = run_page(tmp_path, nursery)
    assert {line: finished.stderr for line, finished in done.items() if finished.code} == {}
    assert [step["iteration"] for step in metrics(tmp_path)] == list(range(1, MORE_STEPS + 1))  # none twice
    assert done["kenotron config check my.yaml"].stdout.startswith("my.yaml: valid: ")
    sampled = next(finished.stdout for line, finished in done.items() if line.startswith("kenotron generate"))
    assert sampled.startswith("The ")
    assert len(sampled) > 20

    monkeypatch.chdir(tmp_path)
    (code,) = blocks(PAGE, "python")
    exec(code, {})
    (ours,) = kn.generate("checkpoints/text-folder", "The ", max_new_tokens=60)
    theirs = capsys.readouterr().out
    assert theirs.startswith((ours.prompt + ours.text)[:40])  # greedy, both


def test_the_installation_is_the_makefile_s() -> None:
    assert [line for line in commands() if line in sections(PAGE)["Install"]][2] == "make setup"
    assert "\nsetup:" in (REPOSITORY / "Makefile").read_text()


def test_the_config_of_a_run_of_weeks_passes_the_check(tmp_path: Path, shell: Shell) -> None:
    with in_a_users_folder(read_page("long-runs.md"), tmp_path):
        code, said, _ = shell("config", "check", "long.yaml")
    assert (code, "long.yaml: valid: 500000 steps of 1024 sequences of 2048 tokens" in said) == (0, True)


@pytest.mark.slow
def test_the_readme_can_be_typed(tmp_path: Path, nursery: Nursery) -> None:
    """Its walkthrough on texts of one's own, with a smaller model: every command, and what it shows of their output."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    own, layouts = (block for block in blocks(readme, "console") if "$ kenotron" in block)
    (tmp_path / "docs").symlink_to(REPOSITORY / "docs")
    printed = ""
    for line in [*own.splitlines(), *layouts.splitlines()]:
        if not line.startswith("$ "):
            assert line == "…" or line in printed
        elif line.startswith("$ mkdir"):
            subprocess.run(line[2:], shell=True, cwd=tmp_path, check=True)
        elif not line.startswith("$ source"):
            words = shlex.split(line[2:].replace("train_steps=600", f"train_steps={MORE_STEPS}"), comments=True)
            arguments, redirected = (words[1:-2], words[-1]) if ">" in words else (words[1:], "")
            interrupt = arguments == ["train", "my.yaml"] and not metrics(tmp_path)
            finished = (
                interrupted(nursery, arguments, tmp_path) if interrupt else nursery.run(*arguments, folder=tmp_path)
            )
            assert finished.code == (2 if "stps" in line else 0), finished.stderr
            printed = finished.stdout + finished.stderr
            if redirected:
                (tmp_path / redirected).write_text(finished.stdout)
                shrink(tmp_path / redirected)
    assert [step["iteration"] for step in metrics(tmp_path)] == list(range(1, MORE_STEPS + 1))
