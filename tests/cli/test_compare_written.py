"""`kenotron plot`, and `compare` and `config diff` of what runs have written, and what is no run."""

import json
from pathlib import Path

from kenotron.runs.plot import HEIGHT, WIDTH
from support.tiny_run import Shell, tiny_config, tiny_yaml, train_quietly


def written(folder: Path, losses: list[float | None], val: dict[int, float]) -> Path:
    folder.mkdir(parents=True)
    lines = [{"iteration": s, "consumed_tokens": 1000 * s, "lm_loss": loss} for s, loss in enumerate(losses, 1)]
    for step, loss in val.items():
        lines[step - 1]["val_loss"] = loss
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_curves_in_the_terminal_go_from_the_highest_loss_to_the_lowest(tmp_path: Path, shell: Shell) -> None:
    falls = written(tmp_path / "falls", [8.0, 6.0, None, 2.0], {4: 4.0})
    flat = written(tmp_path / "flat", [5.0] * 4, {})
    code, said, _ = shell("plot", falls, flat / "metrics.jsonl")
    assert code == 0
    lines = said.splitlines()
    rows = [line[10:] for line in lines[:HEIGHT]]
    assert rows[0] == "*"  # step 1, loss 8
    assert rows[-1] == " " * (WIDTH - 1) + "*"  # step 4, loss 2
    assert [row.index("v") for row in rows if "v" in row] == [WIDTH - 1]
    assert "v" in rows[round((8 - 4) / (8 - 2) * (HEIGHT - 1))]
    assert [row.count("o") for row in rows if "o" in row] == [4]
    assert lines[HEIGHT].split()[:4] == ["1K", "to", "4K", "tokens;"]
    assert lines[-2:] == ["* falls: 2", "o flat: 5"]


def test_a_column_shows_the_mean_of_its_steps(tmp_path: Path, shell: Shell) -> None:
    """Losses of 1 and 3 in turn: three steps or more have a mean between 5/3 and 7/3, drawn in the middle third."""
    noisy = written(tmp_path / "noisy", [1.0, 3.0] * (4 * WIDTH), {})
    code, said, _ = shell("plot", noisy)
    assert code == 0
    drawn = [row for row, line in enumerate(said.splitlines()[:HEIGHT]) if "*" in line]
    assert HEIGHT / 3 - 1 <= min(drawn) <= max(drawn) <= HEIGHT * 2 / 3


def test_losses_that_are_not_finite_are_not_equal(tmp_path: Path, shell: Shell) -> None:
    runs = [written(tmp_path / "a", [2.0, None, 1.0], {}), written(tmp_path / "b", [2.0, 3.0, 1.0, 0.5], {})]
    for run in runs:
        tiny_yaml(run).rename(run / "config.yaml")
    code, said, _ = shell("compare", *runs)
    assert code == 0
    assert "lm_loss: equal until step 2" in said
    assert "  step 2: nan  3  difference +nan" in said
    assert said.endswith("  step 3: 1  1  difference +0\n")  # the last one that both have


def test_what_is_no_run_is_named(tmp_path: Path, shell: Shell) -> None:
    written(tmp_path / "logs" / "a", [1.0], {})
    for path, expected in (
        (tmp_path / "logs", "expected the folder of a run, with metrics.jsonl; it has the runs a"),
        (tmp_path / "log", "no such file or folder"),
    ):
        for command in ("report", "plot"):
            code, _, said = shell(command, path)
            assert (code, expected in said) == (2, True)


def test_two_runs_and_two_configs_are_compared(tmp_path: Path, shell: Shell) -> None:
    rates = (0.01, 0.02)
    folders = []
    for number, rate in enumerate(rates):
        config = tiny_config(tmp_path / str(number), f"optimizer.learning_rate_scheduler.learning_rate={rate}")
        train_quietly(config)
        folders.append(Path(config.logging.log_dir) / config.general.run)
    differs = "optimizer.learning_rate_scheduler.learning_rate: 0.01 -> 0.02"
    assert differs in shell("config", "diff", *folders)[1]
    code, said, _ = shell("compare", *folders)
    assert code == 0
    assert differs in said
    assert "lm_loss: equal until step 2" in said  # the first step's loss is before the first update
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in folders]
    one, other = (json.loads(each[2])["lm_loss"] for each in lines)
    assert f"step 3: {one:.6g}  {other:.6g}" in said
    code, _, said = shell("compare", folders[0], tmp_path)
    assert (code, f"{tmp_path}: expected the folder of a run" in said) == (2, True)
    assert "no such file or folder" in shell("compare", folders[0], tmp_path / "none")[2]
    a, b = tiny_yaml(tmp_path / "0"), tmp_path / "b.yaml"
    b.write_text(a.read_text().replace("seed: 7", "seed: 8"))
    code, _, said = shell("compare", a, b)
    assert (code, "general.seed: 7 and 8 are different runs; expected two layouts of one run" in said) == (2, True)
    code, _, said = shell("compare", a, tmp_path / "c.yaml")
    assert (code, "no such file" in said) == (2, True)
