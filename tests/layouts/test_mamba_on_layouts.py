"""Mamba, Mamba-2 and a hybrid are on every layout what they are in one process: losses, gradients, weights.

Under tp a rank has some channels or heads: Mamba's x_proj is summed inside of a layer, and every rank goes on from the
sum in its own way; Mamba-2's B and C have one group (on every rank, each with a part of the gradient) or several
(split). Sequences hold several documents, so that states are reset inside of them, and attention stays inside of them,
too. Under cp ranks pass states on, and a hybrid's attention reads the same contiguous parts. Its pipeline stages
hold layers of different kinds.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from kenotron.config.errors import InputError
from support.layout_runs import ATTENTION, HYBRIDS, STATE_SPACES, Problem, on
from support.written_tokens import write_ds

ROUNDING = 5e-6  # gradients of a few numbers, each a sum over all tokens whose terms nearly cancel
QUICK = [
    ("mamba", 2, "tp=2 mode=REDUCE_SCATTER recompute=true"),
    ("mamba2", 4, "cp=4 method=state_passing"),  # what the first rank leaves goes through the second and third
    ("nemotron_h", 2, "tp=2 mode=REDUCE_SCATTER"),
    ("nemotron_h", 2, "cp=2 method=ulysses"),
    ("nemotron_h_of_experts", 2, "dp=2 ep=2 zero=3 recompute=true"),
]
LAYOUTS = [
    *on(2, "dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "tp=2", "tp=2 mode=REDUCE_SCATTER", "pp=2 engine=1f1b"),
    *on(2, "cp=2 method=state_passing recompute=true"),
    *on(4, "dp=4 shard=2 zero=3", "tp=4 recompute=true", "pp=4 engine=afab recompute=true", "dp=2 zero=1 tp=2"),
    *on(4, "dp=2 zero=3 tp=2 mode=REDUCE_SCATTER async=true", "tp=2 pp=2 engine=1f1b", "cp=4 method=state_passing"),
    *on(4, "cp=2 method=state_passing tp=2 mode=REDUCE_SCATTER", "dp=2 zero=3 cp=2 method=state_passing"),
    *on(4, "cp=2 method=state_passing pp=2 engine=1f1b"),
    *on(8, "dp=2 zero=1 tp=2 pp=2 engine=1f1b"),
]
WITH_EXPERTS = [
    *on(2, "cp=2 method=ulysses ep=2"),
    *on(4, "dp=2 tp=2 ep=2 zero=2 mode=REDUCE_SCATTER", "dp=2 pp=2 ep=2 engine=1f1b"),
]
SLOW = [(family, *layout) for layout in LAYOUTS for family in STATE_SPACES]
SLOW += [(family, size, layout.replace("state_passing", "ulysses")) for family in HYBRIDS for size, layout in LAYOUTS]
SLOW += [("nemotron_h_of_experts", *layout) for layout in WITH_EXPERTS]
SLOW = sorted({*SLOW} - {*QUICK}, key=lambda case: (case[1:], case))  # ranks of one size keep their groups


@pytest.fixture(scope="module")
def problem_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Problem]:
    """What is trained, by family."""
    documents = [[(i * 7 + j) % 60 for j in range(1 + i * 11 % 37)] for i in range(150)]
    path = write_ds(tmp_path_factory.mktemp("tokens") / "0.ds", documents)
    data = f"data_stages.0.data.dataset={{tokens: {path.parent}, packing: best_fit}}"

    def get(family: str) -> Problem:
        overrides, absent = (data, "model.document_masking=true"), () if family in HYBRIDS else ATTENTION
        return Problem(family, overrides, steps=3, model=(STATE_SPACES | HYBRIDS)[family], absent=absent)

    return get


@pytest.mark.budget(10, reason="a run of one process and one of two ranks, and documents of many lengths")
@pytest.mark.parametrize(
    ("family", "world_size", "layout"), [*QUICK, *(pytest.param(*layout, marks=pytest.mark.slow) for layout in SLOW)]
)
def test_a_layout_means_what_one_process_means(family, world_size, layout, problem_of, like_one_process):
    like_one_process(world_size, problem_of(family), layout, ROUNDING)


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_ways_to_share_attention_are_refused(family: str, problem_of: Callable[[str], Problem], tmp_path: Path) -> None:
    said = rf"context_parallel_size: expected context_parallel_method state_passing with {family}, found ring"
    with pytest.raises(InputError, match=said):
        problem_of(family).config("cp=2", tmp_path)
    with pytest.raises(InputError, match="state_passing is for layers"):
        Problem("llama").config("cp=2 method=state_passing", tmp_path)


@pytest.mark.parametrize("method", ["ring", "allgather", "state_passing"])
def test_a_hybrid_needs_parts_that_attention_and_states_both_read(method, problem_of, tmp_path):
    said = f"context_parallel_size: expected context_parallel_method ulysses with nemotron_h, found {method}"
    with pytest.raises(InputError, match=said):
        problem_of("nemotron_h").config(f"cp=2 method={method}", tmp_path)
    with pytest.raises(InputError, match="ulysses splits the query heads of a rank"):
        problem_of("nemotron_h").config("cp=4 tp=4 method=ulysses", tmp_path)


@pytest.mark.parametrize(
    ("family", "tp", "said"),
    [
        ("mamba", 3, r"parallelism.tp: expected a divisor of expand \* hidden_size 64, found 3"),
        ("mamba2", 3, "parallelism.tp: expected a divisor of num_heads 8, found 3"),
        ("mamba2_in_groups", 8, r"parallelism.tp: expected a divisor of n_groups 4 \(or n_groups 1\), found 8"),
        ("nemotron_h", 3, "parallelism.tp: expected a divisor of num_attention_heads 8, found 3"),
        ("nemotron_h", 3, "parallelism.tp: expected a divisor of mamba_num_heads 8, found 3"),
        ("nemotron_h", 8, r"parallelism.tp: expected a divisor of n_groups 4 \(or n_groups 1\), found 8"),
    ],
)
def test_what_tp_does_not_divide_is_named(family, tp, said, problem_of, tmp_path):
    with pytest.raises(InputError, match=said):
        problem_of(family).config(f"tp={tp}", tmp_path)
