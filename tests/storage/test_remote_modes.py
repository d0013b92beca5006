"""Every way of reading a dataset gives from an S3 server what it gives from the same files here."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_remote_tokens import write_folder

from kenotron.config import Config, InputError
from kenotron.data import open_run
from kenotron.storage import fetching
from kenotron.text.byte_level_bpe import train_byte_level_bpe
from kenotron.text.tokenizer import load_tokenizer
from support.data_runs import assert_same_batches, batches_of, quiet, run_config
from support.tiny_run import Shell

Upload = Callable[[Path, str], str]

STREAM = {"shuffle_buffer": 20, "reader_shards": 2}
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "packed texts": ("text_files", {"packing": "best_fit"}),
    "streamed texts": ("text_files", {"streaming": STREAM}),
    "prompts and answers": ("text_files", {"sft_dataloader": True}),
    "packed prompts and answers": ("text_files", {"sft_dataloader": True, "packing": "best_fit"}),
    "a mixture by size": ("mixture", {}),
}


def write_rows(folder: Path) -> Path:
    """DocumentSource, prompts and answers in three files."""
    import gzip

    import pyarrow as pa
    from pyarrow import parquet

    generator, rows = random.Random(0), []
    for number in range(150):
        words = " ".join(generator.choice(["beep", "boop", "été", "漢"]) for _ in range(generator.randint(3, 40)))
        rows.append({"text": words, "prompt": f"{number} and ", "completion": words[:30]})
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:50]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows[50:100]).encode()))
    parquet.write_table(pa.Table.from_pylist(rows[100:]), folder / "c.parquet", row_group_size=10)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_byte_level_bpe(["beep boop été 漢 and 0 1 2 3 4 5 6 7 8 9"], 300).save(folder)
    return str(folder)


def config_of(mode: str, path: str, tokenizer: str) -> Config:
    key, more = MODES[mode]
    dataset: dict[str, Any] = {key: path} | more
    if key == "mixture":
        parts = [{"tokens": f"{path}/part {number}", "weight": "size"} for number in range(2)]
        dataset = {"mixture": [*parts, {"text_files": f"{path}/rows/a.jsonl", "weight": "size"}]}
    named = {"tokenizer__tokenizer_name_or_path": tokenizer} if "text_files" in str(dataset) else {}
    return run_config(dataset, model__document_masking=True, val_samples=8, **named)


@pytest.mark.cases(2)
@pytest.mark.parametrize("mode", MODES)
def test_numbers(tmp_path: Path, upload: Upload, mode: str, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "BLOCK", 3000)
    here = tmp_path / "data"
    if MODES[mode][0] == "text_files":
        write_rows(here)
    else:
        write_rows(write_folder(here) / "rows")
    told: list[list[Any]] = []
    for path in (str(here), upload(here, "data")):
        monkeypatch.setenv("KENOTRON_CACHE", str(tmp_path / path.replace("/", "")))  # nothing made before is found
        told.append(batches_of(config_of(mode, path, tokenizer)))
    assert len(told[0]) > 24
    assert_same_batches(*told)


def test_a_stream_goes_on_where_it_stopped(tmp_path: Path, upload: Upload, tokenizer: str) -> None:
    here = write_rows(tmp_path / "data")
    whole, rest = (config_of("streamed texts", path, tokenizer) for path in (str(here), upload(here, "data")))
    with open_run(whole, report=quiet) as data:
        expected = [data.batch(step) for step in range(1, 13)]
    with open_run(rest, report=quiet) as data:
        for step in range(1, 7):
            data.batch(step)
        states = {name: state() for name, state in data.streams.states(6).items()}
    with open_run(rest, 7, quiet) as data:
        data.streams.restore(6, states.get)
        for step in range(7, 13):
            assert_same_batches(data.batch(step), expected[step - 1])
    upload(write_rows(tmp_path / "other") / "a.jsonl", "data/b.jsonl.gz")  # of another size
    with open_run(rest, 7, quiet) as data, pytest.raises(InputError, match="the state of another stream: files is"):
        data.streams.restore(6, states.get)


def test_what_a_step_reads_is_told(tmp_path: Path, upload: Upload, shell: Shell) -> None:
    here = write_folder(tmp_path / "tokens")
    there = upload(here, "tokens")
    answers = []
    for path in (str(here), there):
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(run_config({"tokens": path}).model_dump(mode="json")))
        code, said, _ = shell("data", "which", file, "--step", "3")
        assert code == 0
        answers.append(said.replace(path, ""))
    assert answers[0] == answers[1]


def test_fetch_looks_at_what_is_read_elsewhere(tmp_path: Path, upload: Upload, shell: Shell) -> None:
    here = write_folder(tmp_path / "tokens", loss=False)
    size = sum(file.stat().st_size for file in here.rglob("*") if file.is_file() and ".hidden" not in file.parts)
    upload(here, "tokens")
    config = run_config({"tokens": ["s3://robots/tokens", "s3://robots/tokens/part 0/0.ds"]}).model_dump(mode="json")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    code, told, _ = shell("data", "fetch", tmp_path / "run.yaml")
    assert code == 0
    assert f"remote s3://robots/tokens: {size / 1000:.3g} kB, read during training" in told
    assert "remote s3://robots/tokens/part 0/0.ds: 10 kB, read during training" in told
    missing = "data_stages.0.data.dataset={tokens: [s3://robots/x, s3://no/y]}"
    code, told, errors = shell("data", "fetch", tmp_path / "run.yaml", missing)
    assert code == 2
    assert "Ready" not in told
    for path in ("s3://robots/x", "s3://no/y"):
        assert f"data_stages.0.data.dataset.tokens: no such file or folder: {path}" in errors


def test_a_tokenizer_elsewhere_is_refused() -> None:
    with pytest.raises(InputError, match=r"a folder or tokenizer\.json on this machine, .* found s3://robots/tok"):
        load_tokenizer("s3://robots/tok")
