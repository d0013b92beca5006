"""`kenotron plot`, and `compare` and `config diff` of what runs have written, and what is no run."""

import json
from pathlib import Path

import pytest

from kenotron.cli import main
from kenotron.runs.plot import HEIGHT, WIDTH
from support.tiny_run import tiny_config, tiny_yaml, train_quietly


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def written(folder: Path, losses: list[float | None], val: dict[int, float]) -> Path:
    folder.mkdir(parents=True)
    lines = [
        {"iteration": step, "consumed_tokens": 1000 * step, "lm_loss": loss}
        | ({"val_loss": val[step]} if step in val else {})
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_curves_in_the_terminal_go_from_the_highest_loss_to_the_lowest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    falls = written(tmp_path / "falls", [8.0, 6.0, None, 2.0], {4: 4.0})
    flat = written(tmp_path / "flat", [5.0] * 4, {})
    assert call("plot", falls, flat / "metrics.jsonl") == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line[10:] for line in lines[:HEIGHT]]
    assert rows[0] == "*"  # step 1, loss 8
    assert rows[-1] == " " * (WIDTH - 1) + "*"  # step 4, loss 2
    assert [row.index("v") for row in rows if "v" in row] == [WIDTH - 1]
    assert "v" in rows[round((8 - 4) / (8 - 2) * (HEIGHT - 1))]
    assert [row.count("o") for row in rows if "o" in row] == [4]
    assert lines[HEIGHT].split()[:4] == ["1K", "to", "4K", "tokens;"]
    assert lines[-2:] == ["* falls: 2", "o flat: 5"]


def test_a_column_shows_the_mean_of_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses of 1 and 3 in turn: three steps or more have a mean between 5/3 and 7/3, drawn in the middle third."""
    noisy = written(tmp_path / "noisy", [1.0, 3.0] * (4 * WIDTH), {})
    assert call("plot", noisy) == 0
    drawn = [row for row, line in enumerate(capsys.readouterr().out.splitlines()[:HEIGHT]) if "*" in line]
    assert HEIGHT / 3 - 1 <= min(drawn) <= max(drawn) <= HEIGHT * 2 / 3


def test_losses_that_are_not_finite_are_not_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [written(tmp_path / "a", [2.0, None, 1.0], {}), written(tmp_path / "b", [2.0, 3.0, 1.0], {})]
    for run in runs:
        tiny_yaml(run).rename(run / "config.yaml")
    assert call("compare", *runs) == 0
    said = capsys.readouterr().out
    assert "lm_loss: equal until step 2" in said
    assert "  step 2: nan  3  difference +nan" in said


def test_what_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "logs" / "a", [1.0], {})
    for path, expected in (
        (tmp_path / "logs", "expected the folder of a run, with metrics.jsonl; it has the runs a"),
        (tmp_path / "log", "no such file or folder"),
    ):
        assert call("report", path) == call("plot", path) == 2
        assert expected in capsys.readouterr().err


def test_two_runs_and_two_configs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = (0.01, 0.02)
    folders = []
    for number, rate in enumerate(rates):
        config = tiny_config(tmp_path / str(number), f"optimizer.learning_rate_scheduler.learning_rate={rate}")
        train_quietly(config)
        folders.append(Path(config.logging.log_dir) / config.general.run)
    differs = "optimizer.learning_rate_scheduler.learning_rate: 0.01 -> 0.02"
    assert call("config", "diff", *folders) == 0
    assert differs in capsys.readouterr().out
    assert call("compare", *folders) == 0
    said = capsys.readouterr().out
    assert differs in said
    assert "lm_loss: equal until step 2" in said  # the first step's loss is before the first update
    losses = [
        [json.loads(line)["lm_loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in folders
    ]
    assert f"step 3: {losses[0][2]:.6g}  {losses[1][2]:.6g}" in said
    assert call("compare", folders[0], tmp_path) == 2
    assert "with config.yaml" in capsys.readouterr().err
    a, b = tiny_yaml(tmp_path / "0"), tmp_path / "b.yaml"
    b.write_text(a.read_text().replace("seed: 7", "seed: 8"))
    assert call("compare", a, b) == 2
    assert "general.seed: 7 and 8 are different runs; expected two layouts of one run" in capsys.readouterr().err
    assert call("compare", a, tmp_path / "c.yaml") == 2
    assert "no such file" in capsys.readouterr().err
