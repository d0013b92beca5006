"""Tokenizing by several processes that take a share each: the plain command's bytes."""

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kenotron.config.errors import InputError
from kenotron.prepare.tokenize import TokenizeOptions, tokenize
from kenotron.text.byte_level_bpe import train_byte_level_bpe
from kenotron.text.tokenizer import load_tokenizer
from support.data_runs import bytes_of, quiet
from support.tiny_run import KENOTRON, Shell, environment

OPTIONS = TokenizeOptions(shard_megabytes=0.002, shuffle_documents=True)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a corpus of five shards, a tokenizer, and the plain command's tokens in ``plain``."""
    monkeypatch.chdir(tmp_path)
    source = random.Random(0)
    texts = [" ".join(source.choices(["alpha", "beta", "gamma"], k=30)) for _ in range(50)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_byte_level_bpe(texts, 300).save(tmp_path / "tokenizer")
    made = tokenize(["corpus.jsonl"], load_tokenizer("tokenizer"), tmp_path / "plain", OPTIONS, 1, quiet)
    assert len(made["files"]) == 5
    return tmp_path


def run_share(number: int, count: int, say: Callable[[str], None] = quiet) -> dict | None:
    given = ["corpus.jsonl"], load_tokenizer("tokenizer"), Path("tokens"), OPTIONS
    return tokenize(*given, report=say, share=(number, count))


@pytest.mark.cases(1)
@pytest.mark.parametrize("count", [1, 2, 9])
def test_shares_in_any_number_and_order_are_the_same_bytes(corpus: Path, count: int) -> None:
    """The last to make a shard writes the manifest; what comes later finds all done."""
    made = [run_share(number, count) for number in reversed(range(count))]
    assert made[-1] == json.loads((corpus / "plain" / "manifest.json").read_text())
    assert made.count(None) == count - 1
    assert bytes_of(corpus / "tokens") == bytes_of(corpus / "plain")
    assert run_share(0, count) == made[-1]


def test_what_a_share_left_undone_the_plain_command_makes(corpus: Path) -> None:
    lines: list[str] = []
    assert run_share(1, 2, lines.append) is None
    assert "3 of 5 shards missing, which other shares make" in lines
    assert sorted(file.name for file in (corpus / "tokens").glob("*.ds")) == ["00001.ds", "00003.ds"]
    tokenize(["corpus.jsonl"], load_tokenizer("tokenizer"), corpus / "tokens", OPTIONS, 1, lines.append)
    assert "2 of 5 shards done already" in lines
    assert bytes_of(corpus / "tokens") == bytes_of(corpus / "plain")


def test_a_share_whose_input_is_another_is_refused(corpus: Path) -> None:
    run_share(0, 2)
    with open(corpus / "corpus.jsonl", "a") as stream:
        stream.write(json.dumps({"text": "more"}) + "\n")
    with pytest.raises(InputError, match=r"started with content\.corpus\.jsonl"):
        run_share(1, 2)


def command(corpus: Path, share: str) -> subprocess.Popen[str]:
    options = ["--tokenizer", "tokenizer", "--output", "tokens", "--shard-size", "0.002", "--shuffle-documents"]
    line = [*KENOTRON, "data", "tokenize", "corpus.jsonl", *options, "--workers", "1", "--share", share]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(corpus))


@pytest.mark.budget(20, reason="two processes at once")
def test_processes_that_run_at_once_write_the_plain_command_s_bytes(corpus: Path) -> None:
    started = [command(corpus, f"{number}/2") for number in range(2)]
    said = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert [out for out, _ in said if "tokens: 50 documents" in out]
    assert bytes_of(corpus / "tokens") == bytes_of(corpus / "plain")


@pytest.mark.parametrize("share", ["3/3", "1", "1/0", "a/b", "-1/2"])
def test_a_share_that_is_none_is_refused(corpus: Path, share: str, shell: Shell) -> None:
    options = ("--tokenizer", "tokenizer", "--output", "tokens")
    code, _, said = shell("data", "tokenize", "corpus.jsonl", *options, "--share", share)
    assert (code, f"--share: expected I/N, from 0/N to N-1/N, found '{share}'" in said) == (2, True)
