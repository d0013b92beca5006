"""`kenotron mup check`: it passes what the papers promise, and sees what breaks it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from kenotron.config import load
from kenotron.config.errors import InputError
from kenotron.launch import transfer
from kenotron.models import parametrization
from kenotron.models.parametrization import Factors
from support.data_runs import quiet
from support.tiny_run import Shell, tiny_dict


def small(folder: Path, kind: str = "completep", **keys: Any) -> dict[str, Any]:
    """The base model of its own parametrization: two layers, width 16, four heads."""
    content = tiny_dict(folder)
    content["model"]["model_config"] |= {"tie_word_embeddings": False, "num_key_value_heads": 4} | keys
    content["model"]["parametrization"] = {"kind": kind, "base_width": 16, "base_depth": 2}
    return content


def swept(folder: Path, kind: str = "completep", **keys: Any) -> dict[tuple[str, str], transfer.Sweep]:
    found = transfer.coordinates(load(small(folder, kind, **keys)), (1, 4), seeds=1, say=quiet)
    return {(each.kind, each.axis): each for each in found}


def slopes(sweep: transfer.Sweep, module: str) -> list[float]:
    return sweep.slopes[list(sweep.modules).index(f"model.layers.*.{module}")].tolist()


def test_what_is_promised_holds_and_the_standard_parametrization_does_not(tmp_path: Path) -> None:
    sweeps = swept(tmp_path)
    assert list(sweeps) == [(kind, axis) for axis in ("width", "depth") for kind in ("completep", "standard")]
    for (kind, axis), sweep in sweeps.items():
        assert sweep.promised.all() == (kind == "completep"), axis
    # A sum over m times as many inputs grows by the root of m while they are independent, by m once they are learnt.
    assert slopes(sweeps["standard", "width"], "mlp.up_proj") == pytest.approx([0.5, 1.0], abs=0.2)
    assert slopes(sweeps["completep", "depth"], "mlp.down_proj") == pytest.approx([-1.0, -1.0], abs=0.2)


@pytest.mark.parametrize("wrong", [{"learning_rate": 4.0}, {"std": 2.0}])
def test_a_wrong_factor_is_seen(wrong: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At four times the width: steps or weights of the standard parametrization in the matrices of a layer."""
    right = parametrization.factors

    def broken(model: Any, config: Any) -> dict[str, Factors]:
        found = right(model, config)
        changed = [name for name in found if "_proj" in name and model.config.hidden_size == 64]
        more = {name: {key: getattr(found[name], key) * by for key, by in wrong.items()} for name in changed}
        return found | {name: replace(found[name], **numbers) for name, numbers in more.items()}

    monkeypatch.setattr(parametrization, "factors", broken)
    assert not swept(tmp_path, "mup")["mup", "width"].promised.all()


def test_heads_that_are_not_named_are_as_many_as_the_others(tmp_path: Path) -> None:
    sweep = swept(tmp_path, "mup", num_key_value_heads=None)["mup", "width"]
    assert slopes(sweep, "self_attn.k_proj") == pytest.approx([0.0, 0.0], abs=transfer.TOLERANCE)


def test_a_best_rate_is_the_vertex_of_a_parabola() -> None:
    rates = [2 ** (half / 2) for half in range(-6, 3)]
    parabola = transfer.Grid("mup", 1, {rate: 3 + 0.2 * (np.log2(rate) + 1.3) ** 2 for rate in rates})
    assert parabola.best == pytest.approx(2**-1.3)
    assert parabola._replace(losses={rate: rate for rate in rates}).best == rates[0]


def test_best_rates_are_those_of_whole_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses with their minimum at half the config's rate; for the standard parametrization beyond the grid."""

    def loss(run: Any) -> float:
        best = -9 if run.config.model.parametrization is None else -1
        rate = run.config.optimizer.learning_rate_scheduler.learning_rate
        return float((np.log2(rate / 0.01) - best) ** 2)

    monkeypatch.setattr(transfer, "_last_loss", loss)
    config = load(small(tmp_path, "mup"))
    half = pytest.approx(0.005)
    assert [(each.kind, each.size, each.best) for each in transfer.rates(config, 2, quiet)] == [
        ("mup", 1, half),
        ("mup", 2, half),
        ("standard", 2, 0.0025),
    ]
    with pytest.raises(InputError, match=r"^optimizer.*learning_rate: expected one near the best of base_width, found"):
        transfer.rates(load(config, ["optimizer.learning_rate_scheduler.learning_rate=0.1"]), 2, quiet)


def test_a_run_that_diverged_counts_as_a_model_that_knows_nothing(tmp_path: Path) -> None:
    overrides = ["optimizer.learning_rate_scheduler.learning_rate=1e30", "tokens.train_steps=12"]
    (found,) = transfer._measure([load(small(tmp_path, "mup"), overrides)], transfer._last_loss, quiet)
    assert found == pytest.approx(np.log(64))


def grids(*best: float) -> list[transfer.Grid]:
    """Grids of parabolas with these minima, over rates from 0.0025 to 0.04."""
    rates = [0.01 * 2 ** (half / 2) for half in range(-4, 5)]
    losses = [{rate: 3 + np.log2(rate / each) ** 2 for rate in rates} for each in best]
    return [transfer.Grid(*case, each) for case, each in zip([("mup", 1), ("mup", 4), ("standard", 4)], losses)]


def test_the_command_prints_a_table_and_leaves_no_files(tmp_path: Path, shell: Shell, monkeypatch: Any) -> None:
    monkeypatch.setattr(transfer, "rates", lambda *args: grids(0.01, 0.011, 0.004))
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(small(tmp_path, "mup")))
    command = ("mup", "check", tmp_path / "my.yaml", "--learning-rates")
    code, out, _ = shell(*command)
    said = out.splitlines()
    assert code == 0
    assert said[0].split() == ["over", "width", "mup", "|x|", "mup", "moved", "standard", "|x|", "standard", "moved"]
    assert said[1].startswith("model.embed_tokens ")
    holds = said.index("mup over width: holds")
    assert said[holds + 1].startswith("standard over width: does not hold: ")
    canvas = np.array([list(line.ljust(82)[10:]) for line in said[holds + 2 : -4]])
    lowest = {mark: max(np.argwhere(canvas == mark), key=lambda at: at[0])[1] for mark in "*o+"}
    assert lowest["+"] < lowest["*"]
    assert lowest["*"] <= lowest["o"] <= lowest["*"] + 9  # of 72 columns for four octaves
    assert said[-3] == "* mup, base_width: best rate 0.01"
    assert said[-2] == "o mup, 4 times as wide: best rate 0.011: holds"
    assert said[-1] == "+ standard, 4 times as wide: best rate 0.004: does not hold"
    monkeypatch.setattr(transfer, "rates", lambda *args: grids(0.01, 0.02, 0.02))
    assert shell(*command)[0] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["my.yaml"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["model.parametrization=null"], "model: expected a parametrization to check, {kind: …}, and init_method {"),
        (["model.parametrization.base_width=10"], "model.model_config.num_attention_heads: expected a number that"),
        (["optimizer.optimizer_factory={name: sgd}"], "model.parametrization: its factors are those of adamW or muon"),
    ],
)
def test_what_cannot_be_checked_is_one_line(changes: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        transfer.coordinates(load(small(tmp_path), changes))
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)
