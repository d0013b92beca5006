"""One meaning on every layout: the same weights, samples, losses and gradients as one process, to rounding.

The quick tier trains three steps on a subset in which every pair of options meets, the slow tier ten on every layout.
"""

from dataclasses import replace

import pytest

from kenotron.config import dump, load
from support.layout_runs import Problem
from support.pairwise import covering, options, pairs

# 8, 8, 8 and then 16 samples a step, in sequences of 16 and from step 8 on 32 tokens.
STAGES = """data_stages=[{name: ramped, start_training_step: 1, data: {dataset: null},
    batch_size_ramp: {start: 8, increment: 8, samples: 24}},
    {name: longer, start_training_step: 8, sequence_length: 32, data: {dataset: null}}]"""

# The same in four steps: 8 and then 16 samples, in sequences of 16 and then 32 tokens.
QUICK_STAGES = STAGES.replace("samples: 24", "samples: 8").replace("start_training_step: 8", "start_training_step: 4")

GROUPS = (  # patterns that match parameters of one pipeline rank alone
    "optimizer.weight_decay_exclude_named_params=[model.embed_tokens]",
    "optimizer.param_groups=[{pattern: layers.0, learning_rate_scale: 0.5}, {pattern: model.norm, weight_decay: 0.2}]",
)
PROBLEMS = {
    "plain": Problem("plain"),
    "tied": Problem("tied", GROUPS, model={"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "deep": Problem("deep", model={"tie_word_embeddings": True, "num_hidden_layers": 8}),
    "biased": Problem("biased", model={"attention_bias": True, "num_key_value_heads": 8, "rope_interleaved": True}),
    "ramped": Problem("ramped", (STAGES,)),
}


def of(world_size: int, problem: str, *layouts: str) -> list[tuple[int, str, str]]:
    return [(world_size, problem, layout) for layout in layouts]


LAYOUTS = [
    *of(2, "plain", "tp=2 recompute=elementwise", "dp=2", "dp=2 zero=2 accum=4", "tp=2"),
    *of(2, "plain", "tp=2 async=true recompute=true", "pp=2", "pp=2 engine=interleaved_1f1b accum=4"),
    *of(2, "plain", "pp=2 engine=dualpipev accum=4", "cp=2", "pp=2 engine=1f1b accum=4 recompute=selective"),
    *of(2, "plain", "dp=2 zero=3 recompute=selective"),
    *of(2, "tied", "dp=2 zero=1", "dp=2 zero=3 recompute=true", "tp=2 mode=REDUCE_SCATTER", "tp=2 recompute=selective"),
    *of(2, "tied", "pp=2 engine=1f1b accum=4", "pp=2 engine=1f1b accum=1"),
    *of(2, "tied", "pp=2 engine=interleaved_zero_bubble accum=4", "pp=2 engine=zbv_zero_bubble accum=4"),
    *of(2, "tied", "cp=2 method=ulysses"),
    *of(2, "biased", "tp=2 mode=REDUCE_SCATTER async=true", "cp=2 method=allgather recompute=true"),
    *of(2, "biased", "cp=2 recompute=selective"),
    *of(2, "ramped", "dp=2 zero=3", "pp=2 engine=1f1b accum=4", "pp=2 engine=interleaved_1f1b accum=4"),
    *of(2, "ramped", "tp=2 mode=REDUCE_SCATTER", "cp=2"),
    *of(4, "plain", "dp=4 zero=1", "dp=4 shard=2 zero=2", "dp=2 tp=2"),
    *of(4, "plain", "tp=2 mode=REDUCE_SCATTER pp=2 engine=1f1b recompute=selective", "tp=4 mode=REDUCE_SCATTER"),
    *of(4, "plain", "dp=2 zero=1 pp=2 engine=1f1b", "tp=2 pp=2 engine=interleaved_1f1b accum=4"),
    *of(4, "plain", "pp=4 engine=1f1b accum=4", "dp=2 zero=3 cp=2", "pp=2 cp=2 method=ring engine=1f1b", "cp=4"),
    *of(4, "tied", "dp=4 zero=3", "dp=4 shard=2 zero=hybrid", "dp=2 zero=3 tp=2 mode=REDUCE_SCATTER", "tp=4"),
    *of(4, "tied", "dp=2 zero=3 pp=2 engine=1f1b", "dp=2 zero=2 pp=2 engine=interleaved_zero_bubble accum=4"),
    *of(4, "tied", "dp=2 pp=2 engine=zbv_zero_bubble accum=4", "tp=2 mode=REDUCE_SCATTER pp=2 engine=1f1b"),
    *of(4, "tied", "tp=2 mode=REDUCE_SCATTER cp=2 method=ulysses"),
    *of(4, "biased", "dp=2 zero=1 tp=2 mode=REDUCE_SCATTER async=true recompute=true", "cp=4 method=allgather"),
    *of(8, "plain", "dp=2 zero=1 tp=2 pp=2 engine=1f1b", "dp=2 zero=2 cp=2 tp=2 mode=REDUCE_SCATTER"),
    *of(8, "plain", "dp=4 shard=2 zero=1 tp=2", "pp=2 cp=2 tp=2 mode=REDUCE_SCATTER engine=1f1b"),
    *of(8, "plain", "dp=2 zero=3 pp=2 cp=2 method=ulysses engine=afab"),
    *of(8, "tied", "dp=2 zero=3 tp=2 mode=REDUCE_SCATTER pp=2 engine=1f1b recompute=true"),
    *of(8, "tied", "dp=2 tp=2 mode=REDUCE_SCATTER async=true pp=2 engine=zbv_zero_bubble accum=4"),
    *of(8, "tied", "dp=8 shard=4 zero=3", "dp=4 shard=2 zero=3 cp=2"),
    *of(8, "deep", "pp=4 dp=2 zero=1 engine=interleaved_1f1b accum=4"),
]


QUICK = {name: replace(problem, steps=3) for name, problem in PROBLEMS.items()}
QUICK["ramped"] = Problem("ramped", (QUICK_STAGES,), steps=4)
QUICK_LAYOUTS = [LAYOUTS[i] for i in covering([options(problem, layout) for _, problem, layout in LAYOUTS])]


def names(layouts: list[tuple[int, str, str]]) -> list[str]:
    return [f"{layout} ({problem})" for _, problem, layout in layouts]


@pytest.mark.cases(7)
@pytest.mark.budget(10, reason="eight ranks on two cores train a model of four layers")
@pytest.mark.parametrize(("world_size", "problem", "layout"), QUICK_LAYOUTS, ids=names(QUICK_LAYOUTS))
def test_a_layout_means_what_one_process_means(world_size, problem, layout, like_one_process):
    like_one_process(world_size, QUICK[problem], layout)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "problem", "layout"), LAYOUTS, ids=names(LAYOUTS))
def test_ten_steps_of_every_layout_mean_what_one_process_means(world_size, problem, layout, like_one_process):
    like_one_process(world_size, PROBLEMS[problem], layout)


STRATEGIES = {"fsdp_grad_op": 2, "fsdp": 3, "fsdp_hybrid": "hybrid"}


@pytest.mark.parametrize(
    ("world_size", "shards"),
    [(2, ""), pytest.param(4, "", marks=pytest.mark.slow), pytest.param(4, "shard=2", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_of_a_yaml_means_what_one_process_means(world_size, shards, strategy, like_one_process, tmp_path):
    problem, layout = QUICK["tied"], f"dp={world_size} {shards} zero=null strategy={strategy}"
    path = tmp_path / "my.yaml"
    path.write_text(dump(problem.config(layout, tmp_path)))
    assert f"  strategy: {strategy}\n" in path.read_text()
    assert load(path, report=lambda line: None).zero_stage == STRATEGIES[strategy]
    like_one_process(world_size, problem, layout)


def test_the_quick_layouts_have_every_pair_of_options_that_all_have() -> None:
    every, quick = (
        {pair for _, problem, layout in layouts for pair in pairs(options(problem, layout))}
        for layouts in (LAYOUTS, QUICK_LAYOUTS)
    )
    assert quick == every
    assert len(every) > 100
    assert len(QUICK_LAYOUTS) <= 30
