"""Families whose layers have more than a Llama's mean on every layout what they mean in one process.

A weight that sees only a rank's heads (Qwen3's norms of queries and keys) has a gradient to be summed over tp ranks;
norms over all heads (OLMo 2's) have a sum of squares, whose gradient is to be summed as well. A layer that is unlike
its neighbours (SmolLM3's without positions) has to be itself on whichever pipeline stage it lies. Biases of norms that
see a rank's tokens alone (StarCoder2's) have summands as gradients, and a bias behind a sum over ranks is added once.
A window (Mistral's) reaches back over the border between two ranks of a sequence.
Projections that begin at zero (nano's) begin so on every rank, and the step after moves all that they hid.
Value embeddings look tokens up in layers that lie on later pipeline stages, and for a rank's own heads.
A parametrization multiplies initial weights and rates by what a weight's whole shape says, not a rank's.
"""

from collections import defaultdict

import pytest
import test_elastic_resume
import test_experts_on_layouts
import test_mamba_on_layouts
import test_matrix

from kenotron.config.architecture import built_in_sections
from support.layout_runs import FAMILIES, HYBRIDS, SPARSE, STATE_SPACES, Problem, on

PROBLEMS = {
    family: Problem(family, steps=3, model=keys, compared=2 if "nano" in family else 1)
    for family, keys in FAMILIES.items()
}
UNTIED = {"tie_word_embeddings": False}
COMPLETEP = "model.parametrization={kind: completep, base_width: 8, base_depth: 2}"
PARAMETRIZED = {
    "spectral": Problem("spectral", ("model.init_method={use_mup: true}",), 3, UNTIED),
    "completep": Problem("completep", (COMPLETEP,), 3, UNTIED),
}
ROUNDING = 5e-6  # a norm's gradient: a few numbers, each a sum over all tokens and heads whose terms nearly cancel
QUICK = [
    *((family, 2, "tp=2") for family in ("qwen3", "gpt_neox")),
    *((family, 2, "tp=2 mode=REDUCE_SCATTER") for family in ("olmo2", "starcoder2", "nano_with_value_embeddings")),
    *(("mistral", 2, "cp=2 method=ulysses"), ("smollm3", 2, "pp=2 engine=interleaved_1f1b")),
    ("nano_with_value_embeddings", 2, "pp=2 engine=1f1b"),
    *(("spectral", 2, "dp=2 zero=3"), ("completep", 2, "tp=2 mode=REDUCE_SCATTER")),
]
LAYOUTS = [
    *on(2, "dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "tp=2", "tp=2 mode=REDUCE_SCATTER recompute=true"),
    *on(2, "pp=2 engine=1f1b", "pp=2 engine=interleaved_1f1b", "cp=2", "cp=2 method=ulysses"),
    *on(4, "tp=4"),  # twice as many ranks as key-value heads
    *on(4, "dp=2 zero=3 tp=2 mode=REDUCE_SCATTER async=true", "tp=2 pp=2 engine=1f1b", "tp=2 cp=2"),
]
# A window's keys do not travel around a ring.
CASES = [
    (family, *layout)
    for layout in sorted(LAYOUTS)
    for family in PROBLEMS
    if not (family == "mistral" and "cp=2" in layout[1] and "ulysses" not in layout[1])
]
CASES.append(("mistral", 4, "tp=2 cp=2 method=ulysses"))
SPLIT = [*on(2, "dp=2 zero=3", "tp=2", "pp=2"), *on(4, "tp=2 mode=REDUCE_SCATTER pp=2")]
FACTORS = [(name, *layout) for layout in SPLIT for name in PARAMETRIZED]


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("family", "world_size", "layout"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (*CASES, *FACTORS) if case not in QUICK),
    ],
)
def test_a_layout_means_what_one_process_means(family, world_size, layout, like_one_process):
    like_one_process(world_size, (PROBLEMS | PARAMETRIZED)[family], layout, ROUNDING)


def test_every_family_has_twelve_layouts_and_resumes_on_another() -> None:
    tested = defaultdict(set, llama={layout for _, _, layout in test_matrix.LAYOUTS})
    for family, _, layout in (*CASES, *test_mamba_on_layouts.SLOW):
        tested[family].add(layout)
    for family in SPARSE:
        tested[family] = {layout for _, layout in test_experts_on_layouts.LAYOUTS}
    assert {*FAMILIES, *SPARSE, *STATE_SPACES, *HYBRIDS} <= tested.keys()
    assert set(built_in_sections()) - {"llamoe"} <= tested.keys()  # nanotron's alone
    assert {family: len(layouts) for family, layouts in tested.items() if len(layouts) < 12} == {}
    assert sum(map(len, tested.values())) > 400
    resumed = {problem for problem, _, _ in (*test_elastic_resume.PAIRS, *test_elastic_resume.MORE_PAIRS)}
    assert tested.keys() - {"llama"} <= resumed  # whose problems are called tied, muon, …
