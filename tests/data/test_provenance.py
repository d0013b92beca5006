"""What a step reads, told from the order alone, is what the step's batch holds."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenotron.checkpoint.start import Start
from kenotron.config import dump
from kenotron.data import open_run
from kenotron.data.provenance import document_ranges, step_origins
from support.data_runs import quiet, run_config, write_texts
from support.tiny_run import Shell
from support.written_tokens import LENGTHS, L, counting, write_ds


def config_of(dataset: Any, **changes: Any) -> Any:
    return run_config(dataset, sequence_length=L, arch__vocab_size=4096, **changes)


def test_a_run_that_continues_its_parents_data_counts_its_own_steps(tmp_path: Path) -> None:
    """`load_mode: model_data` after 4 steps: the run's step 1 has the parent's fifth samples."""
    write_ds(tmp_path / "a" / "0.ds", counting(0, LENGTHS))
    folder = {"dataset_folder": [str(tmp_path / "a")]}
    restarted = Start(data_start=-4).in_run_steps(config_of(folder))
    with open_run(config_of(folder, train_steps=16), 1, quiet) as parent, open_run(restarted, 1, quiet) as run:
        for step in range(1, 13):
            assert step_origins(run, step) == step_origins(parent, step + 4)


@pytest.fixture
def mixed(tmp_path: Path) -> dict[str, Any]:
    """A `.ds` folder with documents and an .npy without, three to one."""
    write_ds(tmp_path / "a" / "0.ds", counting(0, LENGTHS))
    write_ds(tmp_path / "a" / "1.ds", counting(1000, LENGTHS[::-1]))
    np.save(tmp_path / "b.npy", np.arange(2000, 2300, dtype=np.uint16))
    return {"tokens": {str(tmp_path / "a"): 3, str(tmp_path / "b.npy"): 1}}


def test_the_tokens_that_are_named_are_those_that_the_step_reads(mixed: dict[str, Any]) -> None:
    lengths = {"0.ds": LENGTHS, "1.ds": LENGTHS[::-1]}
    with open_run(config_of(mixed), 1, quiet) as data:
        for step in (1, 5, 12):
            batches = data.batch(step)
            rows = {int(s): row for b in batches for s, row in zip(b.sample_ids, b.tokens)}
            origins = step_origins(data, step)
            assert [origin.sample for origin in origins] == sorted(rows)
            for origin in origins:
                assert origin.file is not None
                name = Path(origin.file).name
                first = {"0.ds": 0, "1.ds": 1000, "b.npy": 2000}[name]
                assert origin.first_token == origin.window * (L if name == "b.npy" else L + 1)
                assert origin.end_token == origin.first_token + L + 1
                read = range(first + origin.first_token, first + origin.end_token - 1)
                assert rows[origin.sample].tolist() == list(read)
                if name == "b.npy":
                    assert origin.documents is None
                    continue
                of = np.repeat(np.arange(8), lengths[name])[origin.first_token : origin.end_token]
                expected = [(d, int((of == d).sum())) for d in sorted(set(of.tolist()))]
                assert [(r.document, r.end_token - r.first_token) for r in origin.documents or []] == expected


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.data())
def test_ranges_of_documents_are_those_of_a_plain_count(lengths: list[int], draw: st.DataObject) -> None:
    of = [document for document, length in enumerate(lengths) for _ in range(length)]
    if not of:
        return
    start = draw.draw(st.integers(0, len(of) - 1))
    stop = draw.draw(st.integers(start + 1, len(of)))
    found = document_ranges(np.cumsum(lengths).astype(np.uint64), start, stop)
    assert [each.document for each in found for _ in range(each.first_token, each.end_token)] == of[start:stop]
    assert (found[0].first_token, found[-1].end_token) == (start, stop)
    assert len({each.document for each in found}) == len(found)


def test_the_command_prints_lines_and_json(mixed: dict[str, Any], tmp_path: Path, shell: Shell) -> None:
    config = config_of(mixed)
    (tmp_path / "my.yaml").write_text(dump(config))
    with open_run(config, 1, quiet) as data:
        expected = step_origins(data, 4)
    run = partial(shell, "data", "which", tmp_path / "my.yaml")
    code, out, err = run("--step", "4", "--json")
    told = json.loads(out)
    assert (code, err, told["step"], told["stage"]) == (0, "", 4, "stage 0")
    places = [(origin.file, origin.window, origin.first_token) for origin in expected]
    assert [(s["file"], s["window"], s["first_token"]) for s in told["samples"]] == places
    code, out, err = run("--step", "4")
    lines = out.splitlines()
    assert (code, err, lines[0]) == (0, "", "step 4 of stage 'stage 0': 4 samples")
    first = expected[0]
    assert lines[1].startswith(f"sample 12: {first.file} window {first.window}, tokens {first.first_token}-")
    assert sum("documents not known" in line for line in lines) == 1
    code, _, err = run()
    assert (code, "--step" in err) == (2, True)
    assert run("--step", "13") == (2, "", "error: step 13 is not in the run: its steps are 1 to 12\n")


def test_beside_a_stream_the_other_sources_are_reported(mixed, tmp_path, monkeypatch, shell) -> None:
    monkeypatch.setenv("KENOTRON_CACHE", str(tmp_path / "cache"))
    stream = {"text_files": str(write_texts(tmp_path / "texts", 8)), "streaming": {"shuffle_buffer": 2}}
    path = tmp_path / "run.yaml"

    def which(dataset: Any, *arguments: str) -> tuple[int, str, str]:
        config = config_of(dataset, val_samples=4, tokenizer__train={"vocab_size": 300})
        path.write_text(dump(config))
        return shell("data", "which", path, *arguments)

    both = {"mixture": [{"weight": 1} | mixed, {"weight": 1} | stream]}
    code, out, _ = which(both, "--step", "2", "--json")
    samples = json.loads(out)["samples"]
    assert code == 0
    assert [sample["stream"] for sample in samples].count(True) == 2
    assert all((sample["file"] is None) == sample["stream"] for sample in samples)
    assert "texts[2], of a stream: documents not known" in which(both, "--step", "2")[1]
    code, _, error = which(stream, "--step", "2")
    assert code == 2
    assert "a stream is shuffled while it is read" in error
