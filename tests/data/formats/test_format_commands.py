"""`kenotron data inspect | merge`, through the command line."""

import json
from pathlib import Path

import numpy as np
import pytest

from kenotron.cli.data import BAR
from kenotron.data.formats.datatrove import TokenWriter
from support.tiny_run import Shell

DOCS = [[1, 2, 3], [4, 5], [1, 2, 3], [9, 9, 9, 9, 9]]
IDS = [1, 2, 3, 4, 5, 1, 2, 3, 9, 9, 9, 9, 9]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    with TokenWriter(tmp_path / "in" / "a.ds", np.dtype("uint16"), "gpt2") as writer:
        writer.write(np.array(IDS), np.array([len(doc) for doc in DOCS]))
    return tmp_path / "in"


def test_inspect_counts(corpus: Path, shell: Shell) -> None:
    code, out, _ = shell("data", "inspect", corpus, "--json")
    assert code == 0
    report = json.loads(out)
    expected = {"tokens": 13, "documents": 4, "dtype": "uint16", "format": "datatrove", "files": 1, "tokenizer": "gpt2"}
    assert {key: report[key] for key in expected} == expected
    assert report["largest_id"] == 9
    lengths = report["document_lengths"]
    assert (lengths["shortest"], lengths["mean"], lengths["longest"]) == (2, 13 / 4, 5)
    assert [(b["from"], b["below"], b["documents"]) for b in lengths["histogram"]] == [(2, 4, 3), (4, 8, 1)]
    code, out, _ = shell("data", "inspect", corpus)
    assert code == 0
    *head, _, _ = lines = out.splitlines()
    assert head == [
        f"{corpus}: datatrove, 1 file, 26 bytes of uint16",
        "tokens: 13   documents: 4   largest id: 9",
        "tokenizer: gpt2   tokens without loss: 0",
        "document lengths: 2 to 5 tokens, mean 3.2",
    ]
    assert [line.split()[-1] for line in lines[-2:]] == ["3", "1"]
    assert [line.count("█") for line in lines[-2:]] == [BAR, -(-BAR // 3)]


def test_inspect_reports_an_id_beyond_the_vocabulary(corpus: Path, shell: Shell) -> None:
    code, _, err = shell("data", "inspect", corpus, "--vocab-size", 9)
    assert code == 2
    assert "a.ds: token 8 is 9, beyond the vocabulary of 9 (5 such tokens)" in err
    assert shell("data", "inspect", corpus, "--vocab-size", 10)[0] == 0
