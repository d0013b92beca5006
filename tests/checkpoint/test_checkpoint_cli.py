"""`kenotron checkpoint ...`: what it prints, its exit codes, and that it needs no torch."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kenotron.cli.checkpoint import app
from kenotron.config.errors import InputError
from support.checkpoint_states import flip_a_byte, run_command, save_step


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        save_step(tmp_path / "checkpoints", step)
    return tmp_path / "checkpoints"


def test_list_prints_a_line_a_checkpoint(root: Path) -> None:
    (root / "20" / "config.yaml").unlink()
    code, text = run_command("list", root)
    assert code == 0
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["step", "saved", "size", "state"]
    assert {line[0] for line in lines[1:]} == {"10", "20", "30"}
    assert [line[-1] for line in lines if line[0] == "30"] == ["complete"]
    assert [line[-3:] for line in lines if line[0] == "20"] == [[str(root / "20" / "config.yaml"), "is", "missing"]]
    code, text = run_command("list", root, "--json")
    found = {entry["step"]: entry for entry in json.loads(text)}
    assert found[10]["problem"] is None
    assert found[10]["bytes"] > 8000
    assert found[20]["problem"].endswith("is missing")


def test_show_prints_tensors_with_their_sizes(root: Path) -> None:
    code, text = run_command("show", root)
    assert code == 0
    assert f"checkpoint 30 in {root / '30'}" in text
    assert f"config: {root / '30' / 'config.yaml'}" in text
    assert '"consumed_tokens": 15360' in text
    assert "model: 3 tensors, 10.4 kB\n" in text  # 64*32*4 + 32*32*2 + 32*4 bytes
    (line,) = (line for line in text.splitlines() if "q_proj.weight " in line and "exp_avg" not in line)
    assert line.split() == ["model.layers.0.self_attn.q_proj.weight", "[32,", "32]", "bfloat16", "2.05", "kB", "1"]
    assert f"checkpoint 10 in {root / '10'}" in run_command("show", root / "10")[1]


def test_verify_exits_with_1_and_names_the_file(root: Path) -> None:
    assert run_command("verify", root) == (0, "".join(f"{root / str(step)} is intact\n" for step in (10, 20, 30)))
    file = flip_a_byte(root / "20" / "model" / "rank0.safetensors", 3000)
    code, text = run_command("verify", root)
    assert code == 1
    assert f"{file} is damaged" in text
    assert f"{root / '30'} is intact" in text
    assert run_command("verify", root / "10")[0] == 0
    code, text = run_command("verify", root / "20", "--json")
    assert code == 1
    assert [str(file) in line for line in json.loads(text)[str(root / "20")]] == [True]


def test_prune_says_what_it_would_remove_and_then_removes_it(root: Path) -> None:
    code, text = run_command("prune", root, "--keep-last", 1, "--keep-every", 20, "--dry-run")
    assert code == 0
    assert f"would remove {root / '10'}" in text
    assert (root / "10").exists()
    code, text = run_command("prune", root, "--keep-last", 1, "--keep-every", 20)
    assert (code, text.splitlines()[0]) == (0, f"removed {root / '10'}")
    assert sorted(path.name for path in root.iterdir()) == [".lock", "20", "30", "latest.txt"]
    assert run_command("prune", root, "--keep-last", 0)[0] == 2
    assert run_command("prune", root)[0] == 2


def test_prune_counts_no_checkpoint_whose_contents_are_damaged(root: Path) -> None:
    """It kept the newest, which could not be read, and removed the only ones that could."""
    data = next((root / "30" / "model").glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    code, text = run_command("prune", root, "--keep-last", 1)
    assert code == 0
    assert text.splitlines()[0] == f"removed {root / '10'}"
    assert sorted(path.name for path in root.glob("[0-9]*")) == ["20", "30"]


def test_prune_of_links_removes_the_links(root: Path) -> None:
    linked = root.with_name("linked")
    linked.mkdir()
    for step in ("10", "20", "30"):
        (linked / step).symlink_to(root / step)
    assert run_command("prune", linked, "--keep-last", 1)[0] == 0
    assert sorted(path.name for path in linked.iterdir()) == ["30"]
    assert run_command("verify", root)[0] == 0


def test_verify_names_what_a_step_without_manifest_lacks(root: Path) -> None:
    (root / "20" / "manifest.json").unlink()
    assert run_command("verify", root / "20")[0] == 1
    job = root.rename(root.with_name("123456"))
    assert f"{job / '30'} is intact" in run_command("verify", job)[1]


def test_what_is_not_uploaded_is_named(root: Path) -> None:
    (root / "20" / "config.yaml").unlink()
    result = CliRunner().invoke(app, ["upload", str(root), "memory://uploaded/run"])
    assert result.exit_code == 1
    assert "error: checkpoint 20 was not uploaded: " in result.stderr


def test_a_wrong_path_is_an_input_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    for arguments, message in (
        (("list", "nowhere"), "no checkpoint at nowhere: the current folder has no 'nowhere'$"),
        (("list", "."), r"^\. is not a checkpoint: it has folders of checkpoints: checkpoints$"),
        (("list", "checkpoints/10"), "^checkpoints/10 is a checkpoint; expected a folder of checkpoints$"),
        (("show", "checkpoints/15"), "checkpoints has 10, 20, 30"),
        (("prune", ".", "--keep-last", "1"), "it has folders of checkpoints: checkpoints$"),
    ):
        with pytest.raises(InputError, match=message):
            run_command(*arguments)


def test_on_a_terminal_it_draws_a_table(root: Path) -> None:
    """Through a real pseudo-terminal, in a process of its own that must not import torch."""
    leader, follower = os.openpty()
    code = "import sys; from kenotron.cli.checkpoint import app; import kenotron.checkpoint\n"
    code += "for name in ('list', 'show', 'verify'): app([name, sys.argv[1]], standalone_mode=False)\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(root)], stdout=follower, stderr=follower, check=True)
    os.close(follower)
    text = b""
    with suppress(OSError):  # how Linux ends a pseudo-terminal
        while chunk := os.read(leader, 65536):
            text += chunk
    os.close(leader)
    assert "┃" in text.decode()
    assert "complete" in text.decode()
