"""The recipes of examples/recipes: each loads with its model, and says what the planner says."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location

import pytest

from kenotron.config import load, refuse_unsupported
from support.tiny_run import REPOSITORY

SPEC = spec_from_file_location("benchmark_recipes", REPOSITORY / "benchmarks" / "recipes.py")
assert SPEC is not None
assert SPEC.loader is not None
recipes = module_from_spec(SPEC)
SPEC.loader.exec_module(recipes)


@pytest.mark.parametrize(("model", "gpus"), recipes.SHAPES, ids=str)
def test_a_recipe_loads_with_its_model(model: str, gpus: int) -> None:
    config = load(recipes.MODELS / f"{model}.yaml", [str(recipes.RECIPES / f"{model}-{gpus}.yaml")])
    refuse_unsupported(config)
    assert config.parallelism.world_size == gpus
    assert config.global_batch_size == recipes.BATCH


def test_the_readme_lists_every_recipe() -> None:
    files = {f"{model}-{gpus}.yaml" for model, gpus in recipes.SHAPES}
    assert {path.name for path in recipes.RECIPES.glob("*.yaml")} == files
    assert recipes.table() in (recipes.RECIPES / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "gpus"), recipes.SHAPES, ids=str)
def test_a_recipe_says_what_is_planned(model: str, gpus: int) -> None:
    recipe = recipes.RECIPES / f"{model}-{gpus}.yaml"
    peak, speed = recipes.predicted(recipes.MODELS / f"{model}.yaml", recipe)
    assert peak < recipes.USABLE
    assert recipe.read_text().startswith(recipes.header(model, gpus, peak, speed))
