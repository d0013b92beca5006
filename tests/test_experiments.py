"""What experiments/ shows is seen in its short form, and its configs are valid."""

import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from kenotron.config import load, refuse_unsupported
from support.tiny_run import REPOSITORY

TRANSFER, PRECISION, DOREMI = (REPOSITORY / "experiments" / name for name in ("transfer", "precision", "doremi"))
SHORT = (
    "tokens.train_steps=80",
    "tokens.val_check_interval=80",
    "tokens.limit_val_batches=16",
    "optimizer.learning_rate_scheduler.lr_warmup_steps=24",
)


def script_of(folder: Path) -> Any:
    spec = spec_from_file_location(f"{folder.name}_experiment", folder / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def transfer() -> Any:
    return script_of(TRANSFER)


def rows_of(folder: Path, *options: str) -> dict[str, list[str]]:
    """First cell → the others, of the tables that a script prints."""
    command = [sys.executable, str(folder / "run.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^(\d+) of \1: .*; ETA 0 min$", done.stdout, re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows}


def test_every_way_is_a_config_and_the_rates_are_around_its_own(transfer: Any) -> None:
    configs = [load(TRANSFER / "transfer.yaml", overrides) for overrides, _ in transfer.WAYS.values()]
    for config in configs:
        refuse_unsupported(config)
    rate = configs[0].optimizer.learning_rate_scheduler.learning_rate
    assert rate == pytest.approx(2**transfer.FOUND, rel=1e-3)
    sizes = [(each.model.decoder.hidden_size, each.model.decoder.num_hidden_layers) for each in configs]
    assert sizes == [(64, 2), (256, 2), (256, 2), (64, 8), (64, 8)]
    heads = {each.model.decoder.hidden_size / each.model.decoder.num_attention_heads for each in configs}
    assert heads == {16}


def test_a_best_rate_is_the_minimum_of_the_parabola_through_the_means(transfer: Any) -> None:
    losses = {rate: [4 + (rate + 7.3) ** 2 + noise for noise in (-0.1, 0.1)] for rate in transfer.RATES}
    assert transfer.best(losses) == (pytest.approx(-7.3), pytest.approx(4.0))
    assert transfer.best(transfer.each_seed(losses)[0]) == (pytest.approx(-7.3), pytest.approx(3.9))


@pytest.mark.slow
@pytest.mark.cases(slow=0)  # minutes: at night
def test_a_rate_carries_over_to_four_times_the_width_and_depth() -> None:
    found = rows_of(TRANSFER, "--seeds", "1", *SHORT)
    assert abs(float(found["width 256, µP"][1])) <= 0.5  # octaves: a step of the grid
    assert float(found["width 256, standard"][1]) < -0.5
    assert float(found["depth 8, CompleteP"][0]) < float(found["depth 8, standard"][0]) - 0.2


def test_every_way_of_the_precision_is_a_config() -> None:
    precision = script_of(PRECISION)
    configs = [load(PRECISION / "precision.yaml", overrides) for overrides in precision.WAYS.values()]
    for config in configs:
        refuse_unsupported(config)
    assert [config.kept_dtype for config in configs] == ["float32", "bfloat16", "bfloat16"]
    found = {way: [4.0, 5.0] for way in precision.WAYS} | {"bf16, to the nearest": [4.04, 5.1]}
    assert "| bf16, to the nearest | 4.5700 | 0.7495 | +1.50% (+1.00% to +2.00%) |" in precision.table(found)


def test_the_domains_are_there_and_the_table_compares_them(tmp_path: Path) -> None:
    doremi = script_of(DOREMI)
    refuse_unsupported(load(DOREMI / "doremi.yaml", list(doremi.LARGE)))
    for name, (root, pattern) in doremi.DOMAINS.items():
        assert doremi.collect(root, pattern, tmp_path / name) > 1000
    found = [(dict.fromkeys(doremi.DOMAINS, value) for value in (0.25, 2.0, learned)) for learned in (1.8, 2.2)]
    table = doremi.table([tuple(each) for each in found])
    assert table[2] == "| python | 0.250 | 2.0000 | 2.0000 | -10.0%, +10.0% |"
    assert table[-1] == "| worst | | 2.0000 | 2.0000 | -10.0%, +10.0% |"


@pytest.mark.slow
@pytest.mark.cases(slow=0)  # minutes: at night
def test_stochastic_rounding_gives_back_what_bf16_costs() -> None:
    found = rows_of(PRECISION, "--seeds", "1")  # the whole of one seed: after 150 steps the effect is 1%
    nearest, stochastic = (float(found[f"bf16, {way}"][0]) for way in ("to the nearest", "stochastic rounding"))
    assert stochastic < 0.99 * nearest
