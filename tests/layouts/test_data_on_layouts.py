"""Data that are no plain windows, on ranks: answers only, packed rows, several sources, an end before the last step."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kenotron.observers.validation import validate
from kenotron.parallel.mesh import Mesh, axes, build_mesh
from support.hub_cache import make_tokenizer_repository
from support.layout_runs import Problem, prepared, steps
from support.ranks import run_ranks
from support.written_tokens import write_ds

DATASET = "data_stages.0.data.dataset"


def answers(folder: Path) -> Problem:
    """Prompts and answers of many lengths: labels lie unevenly over micro-batches and ranks."""
    rows = [{"prompt": "word1 " * (a + 1), "completion": "word2 word3 " * (b * b)} for a in range(8) for b in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows if row["completion"]))
    words = make_tokenizer_repository(folder / "hub", "robot/words")
    overrides = (
        f"{DATASET}={{text_files: {folder / 'rows.jsonl'}, sft_dataloader: true}}",
        f"tokenizer.tokenizer_name_or_path={words}",
        "model.model_config.eos_token_id=2",
    )
    return Problem("answers", overrides, steps=3, model={"vocab_size": 200})


def halves_without_labels(folder: Path) -> Problem:
    """Sequences whose first half are prompts, and more experts than most micro-batches have slots for.

    With contiguous parts of sequences, a rank has no label, and on every rank some experts get no token.
    """
    given = answers(folder)
    rows = [{"prompt": "word1 " * 10, "completion": f"word{2 + a} word3 " * 2} for a in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sparse = {"is_olmoe_config": True, "num_experts": 64, "num_experts_per_tok": 2, "intermediate_size": 16}
    losses = {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.01}
    return replace(given, name="halves", model=given.model | sparse | losses)


def packed(folder: Path) -> Problem:
    path = write_ds(folder / "a" / "0.ds", [[(i * 7 + j) % 60 for j in range(1 + i * 11 % 37)] for i in range(150)])
    overrides = (f"{DATASET}={{tokens: {path.parent}, packing: best_fit}}", "model.document_masking=true")
    return Problem("packed", overrides, steps=3)


SLOW = [
    *((halves_without_labels, each) for each in ("cp=2 method=ulysses accum=8", "dp=2 ep=2 zero=2 accum=8")),
    *((answers, each) for each in ("cp=2", "tp=2 mode=REDUCE_SCATTER")),
    *((packed, each) for each in ("dp=2 zero=3", "cp=2 method=ulysses")),
]
QUICK = [(answers, "dp=2 accum=4"), (packed, "pp=2 engine=1f1b accum=4")]
QUICK.append((halves_without_labels, "cp=2 method=ulysses ep=2 accum=8"))
LAYOUTS = [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("problem", "layout"), LAYOUTS)
def test_masked_labels_mean_the_same_on_every_layout(problem, layout, like_one_process, tmp_path):
    like_one_process(2, problem(tmp_path), layout)


def validated(rank: int, problem: Problem, layout: str, folder: Path) -> tuple[int, str | None, dict[str, float]]:
    """Steps done, why no more, and what validation found."""
    config = problem.config(layout, folder)
    alone = not layout
    mesh = Mesh() if alone else build_mesh(axes(config), config.parallelism.world_size, "cpu")
    with prepared(config, mesh) as run:
        steps(run)
        found = validate(run)
        fields = found.metrics()
        del fields["val_seconds"]
        return run.step, run.data.exhausted(run.step + 1), fields


@pytest.mark.cases(3)
@pytest.mark.parametrize("layout", ["dp=2", "pp=2", "cp=2", "tp=2 mode=REDUCE_SCATTER", "dp=2 zero=3"])
def test_an_early_end_and_the_losses_of_sources_are_the_same_on_every_layout(layout: str, tmp_path: Path) -> None:
    paths = []
    for name, count in (("a", 40), ("b", 90)):
        documents = [[(i * 5 + j) % 60 for j in range(1 + i * 13 % 29)] for i in range(count)]
        paths.append(write_ds(tmp_path / name / "0.ds", documents).parent)
    parts = f"{{weight: 1, tokens: {paths[0]}, max_epochs: 1}}, {{weight: 2, tokens: {paths[1]}}}"
    validation = ("tokens.val_check_interval=1", "tokens.limit_val_batches=-1", "tokens.val_fraction=0.2")
    overrides = (f"{DATASET}={{mixture: [{parts}]}}", *validation)
    problem = Problem("early", overrides, steps=50)
    done, why, expected = validated(0, problem, "", tmp_path)
    assert 0 < done < 50
    assert why == "'a' is exhausted after 1 epoch"
    assert {"val_loss", "val_tokens", "val_loss/a", "val_loss/b"} <= set(expected)
    for found in run_ranks(2, validated, problem, layout, tmp_path):
        assert found[:2] == (done, why)
        assert found[2] == pytest.approx(expected, rel=1e-5)
