"""A document that cannot be read ends a run with its place, or is left out and counted, in any form of file."""

import json
from pathlib import Path

import pytest

from kenotron.config.errors import InputError
from support.tiny_run import TEXTS, losses, text_overrides, tiny_config, train_and_listen, train_quietly

ROWS: list[dict[str, object]] = [{"text": text} for text in TEXTS]
BAD: list[dict[str, object]] = [{"text": None}, {"title": "no text"}, {"text": 7}, {"text": ["a", "b"]}]


def written(path: Path, rows: list[dict[str, object]]) -> Path:
    if path.suffix == ".parquet":  # a column has one type
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist([{"text": row.get("text")} for row in rows]), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.budget(8, reason="three runs, of which each trains a tokenizer")
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("streaming", ["null", "{shuffle_buffer: 1}"])
def test_a_run_that_leaves_them_out_is_the_run_without_them(tmp_path: Path, suffix: str, streaming: str) -> None:
    bad = BAD if suffix == ".jsonl" else [{"text": None}] * 4
    good_file = written(tmp_path / f"good{suffix}", ROWS)
    bad_file = written(tmp_path / f"bad{suffix}", [*ROWS[:3], *bad, *ROWS[3:]])
    tokenizer = text_overrides(tmp_path)[1:]

    def config(file: Path, name: str, what: str):
        dataset = f"data_stages.0.data.dataset={{text_files: {file}, streaming: {streaming}, on_bad_document: {what}}}"
        return tiny_config(tmp_path / name, *tokenizer, dataset)

    said_of_it = "; dataset.on_bad_document: skip leaves it out$"
    with pytest.raises(InputError, match="must hold text, found null" + said_of_it):
        train_quietly(config(bad_file, "error", "error"))
    _, said = train_and_listen(skipping := config(bad_file, "skip", "skip"))
    train_quietly(plain := config(good_file, "plain", "error"))
    assert losses(skipping) == losses(plain)
    with pytest.raises(InputError, match=said_of_it):  # what was cached without them is not taken for all
        train_quietly(config(bad_file, "error again", "error"))
    if streaming == "null":
        places = [":4: ", ":5: ", ":6: "] if suffix == ".jsonl" else [", row 3: ", ", row 4: ", ", row 5: "]
        assert [f"left out: {bad_file}{place}" in said for place in places] == [True] * 3
        assert "4 documents left out as not readable" in said
