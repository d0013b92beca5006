"""Tokenizing on a real Ray of this machine, by the command: `make test-ray`."""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from kenotron.text.byte_level_bpe import train_byte_level_bpe
from support.data_runs import bytes_of
from support.tiny_run import KENOTRON, REPOSITORY, environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]

CORPUS, OPTIONS = "corpus.jsonl", ("--tokenizer", "tokenizer", "--shard-size", "0.002", "--shuffle-documents")


def settings(**more: str) -> dict[str, str]:
    """Of a process that takes part in a cluster: it asks for no token, and sends no statistics."""
    ray = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(REPOSITORY / "src")}
    return {k: v for k, v in environment(Path.cwd(), **ray, **more).items() if "PROXY" not in k.upper()}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of one node that ``ray start --head`` made."""
    folder = tempfile.mkdtemp(prefix="ray")  # its sockets need a short path
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    line = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2"]
    line += ["--include-dashboard=false", f"--temp-dir={folder}", "--node-ip-address=127.0.0.1"]
    head = subprocess.Popen([*line, f"--port={address.split(':')[1]}"], env=settings(), stdout=subprocess.PIPE)
    end = time.monotonic() + 120
    while b"Ray runtime started" not in (said := head.stdout.readline()):
        assert said, "ray start ended"
        assert time.monotonic() < end
    yield address
    head.terminate()  # --block: it ends all that it started
    head.wait(60)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with a corpus of five shards and a tokenizer."""
    source = random.Random(0)
    texts = [" ".join(source.choices(["alpha", "beta", "gamma"], k=30)) for _ in range(50)]
    (tmp_path / CORPUS).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_byte_level_bpe(texts, 300).save(tmp_path / "tokenizer")
    return tmp_path


def tokenized(folder: Path, output: str, *executor: str, **more: str) -> subprocess.CompletedProcess[str]:
    line = [*KENOTRON, "data", "tokenize", CORPUS, *OPTIONS, "--output", output, *executor]
    return subprocess.run(line, cwd=folder, env=settings(**more), capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("own", [False, True], ids=["cluster", "no cluster"])
def test_the_files_are_those_of_local_tasks(corpus: Path, request: pytest.FixtureRequest, own: bool) -> None:
    """On the cluster that RAY_ADDRESS names; without one, ray starts one on this machine."""
    where = {} if own else {"RAY_ADDRESS": request.getfixturevalue("cluster")}
    local = tokenized(corpus, "local", "--executor", "local", "--tasks", "2", "--workers", "2")
    assert local.returncode == 0, local.stderr
    made = tokenized(corpus, "tokens", "--executor", "ray", "--tasks", "3", **where)
    assert made.returncode == 0, made.stderr
    assert ("Connected to Ray cluster" in made.stderr) == (not own)
    assert len(list((corpus / "tokens").glob("*.ds"))) == 5
    assert bytes_of(corpus / "tokens") == bytes_of(corpus / "local")
    assert len(list((corpus / "tokens.logs" / "stats").iterdir())) == 3


def test_tasks_that_fail_say_why_in_the_last_line_and_the_others_are_done(corpus: Path, cluster: str) -> None:
    """A line in two of the five shards is not JSON."""
    lines = (corpus / CORPUS).read_text().splitlines()
    for number in (14, 34):
        lines[number] = "?" * len(lines[number])
    (corpus / CORPUS).write_text("\n".join(lines) + "\n")
    failed = tokenized(corpus, "tokens", "--executor", "ray", RAY_ADDRESS=cluster)
    assert failed.returncode == 2
    last = failed.stderr.splitlines()[-1]
    said = "error: tokens: 2 of 5 shards missing; 2 tasks failed, the first (task 1): corpus.jsonl:15: not JSON"
    assert last.startswith(said)
    assert last.endswith(f"run the same command again to continue; logs: {corpus}/tokens.logs")
    assert [file.name for file in sorted((corpus / "tokens").glob("*.ds"))] == ["00000.ds", "00002.ds", "00004.ds"]
