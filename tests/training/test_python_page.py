"""docs/python.md runs as it stands, and docs/python.ipynb is that page."""

import contextlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kenotron.cli import main
from kenotron.generation.load import load_for_generation
from support.notebook import DOCS, notebook_text
from support.tiny_llamas import our_logits

NOTEBOOK = DOCS / "python.ipynb"


def test_the_notebook_is_the_page() -> None:
    stale = "stale: run `python tests/support/notebook.py`"
    assert NOTEBOOK.read_text(encoding="utf-8") == notebook_text(), stale


def run_cell(source: str, names: dict[str, Any], folder: Path) -> None:
    """A cell of Python, or ``!kenotron … > file``."""
    if not source.startswith("!"):
        exec(source, names)
        return
    program, *arguments, arrow, file = shlex.split(source)
    assert (program, arrow) == ("!kenotron", ">")
    with (folder / file).open("w") as said, contextlib.redirect_stdout(said), pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code


@pytest.mark.slow
@pytest.mark.budget(10, reason="trains three models, of 60 steps each")
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            run_cell("".join(cell["source"]), names, tmp_path)

    run, table, steps = names["run"], names["metrics"], 60
    assert (run.step, names["small"].tokens.train_steps, names["config"].tokens.train_steps) == (steps, steps, 400)
    written = [json.loads(line) for line in Path("logs/text-folder/metrics.jsonl").read_text().splitlines()]
    assert list(table["lm_loss"]) == pytest.approx([step["lm_loss"] for step in written], rel=1e-12)
    assert list(table["iteration"]) == list(range(1, steps + 1))
    assert written[-1]["lm_loss"] == run.last_metrics["lm_loss"] < 0.85 * written[0]["lm_loss"]
    assert list(table["val_loss"].dropna().index) == [29, 59]
    assert len(set(names["losses"].values())) == 2

    said = capsys.readouterr().out
    assert "unknown key 'tokens.train_stps'; did you mean 'train_steps'?" in said
    assert [completion.prompt for completion in names["completions"]] == ["The ", "If the class "]
    assert all(len(completion.tokens) == 24 for completion in names["completions"])
    (greedy,) = names["kn"].generate("checkpoints/text-folder", "The ", max_new_tokens=4, stop_at_eos=False)
    model, tokenizer, _ = load_for_generation("checkpoints/text-folder")
    text = tokenizer.encode("The ")
    for token in greedy.tokens:
        assert token == int(our_logits(model, torch.tensor([text]))[0, -1].argmax())
        text.append(token)
