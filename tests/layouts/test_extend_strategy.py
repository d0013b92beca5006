"""The data-parallel strategy of docs/extend.md, and its optimizer on shards, mean what one process means."""

from pathlib import Path

import pytest
import yaml

from kenotron.config.errors import InputError
from kenotron.parallel.mesh import axes, build_mesh
from support.layout_runs import Problem, Seen, expect_the_same, prepared, steps, train_alone, train_on_layout
from support.pages import blocks, in_a_users_folder, read_page, sections
from support.ranks import run_ranks

PAGE = read_page("extend.md")
ADAM = Problem("adam", steps=3)
LION = Problem("lion", ("optimizer.optimizer_factory={name: my_optimizer.Lion}",), steps=3)


def layout_of_the_page() -> str:
    (text,) = blocks(sections(PAGE)["Data-parallel strategy"], "yaml")
    keys = yaml.safe_load(text)
    layout = keys["parallelism"]
    return f"dp={layout['dp']} zero={keys['optimizer']['zero_stage']} strategy={layout['strategy']} accum=2"


def on_rank(rank: int, folder: Path, reference: Path) -> tuple[Seen, list[float]]:
    place = folder / f"rank{rank}"
    place.mkdir()
    with in_a_users_folder(PAGE, place):
        seen = train_on_layout(rank, ADAM, layout_of_the_page(), folder, reference)
        config = LION.config("dp=2 zero=3", folder)
        with prepared(config, build_mesh(axes(config), 2, "cpu")) as run:
            return seen, [result.lm_loss for result in steps(run)]


@pytest.mark.budget(10, reason="two ranks import FSDP2 and train twice")
def test_pairs_of_layers_and_lion_on_shards_train_as_one_process(tmp_path: Path) -> None:
    with in_a_users_folder(PAGE, tmp_path):
        reference = train_alone(ADAM, tmp_path)
        with prepared(LION.config("", tmp_path), build_mesh({}, 1, "cpu")) as run:
            expected = [result.lm_loss for result in steps(run)]
    ranks = run_ranks(2, on_rank, tmp_path, reference)
    expect_the_same([seen for seen, _ in ranks], reference)
    for _, found in ranks:
        assert found == pytest.approx(expected, rel=1e-5)
    whole = sum(seen.local_numbers for seen, _ in ranks)
    assert all(seen.local_numbers <= 0.55 * whole for seen, _ in ranks)  # each holds half


def test_what_the_strategy_is_not_for_is_one_line(tmp_path: Path) -> None:
    config, mesh = ADAM.config("strategy=my_strategy.pairs zero=2", tmp_path), build_mesh({}, 1, "cpu")
    refused = pytest.raises(InputError, match="pairs shards over all of dp")
    with in_a_users_folder(PAGE, tmp_path), refused, prepared(config, mesh):
        pass
