"""`kenotron compare`: layouts that mean the same agree, one that forgets a sum is found and named."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import yaml

from compare_power.faults import FAULTS
from compare_power.pairs import pair
from compare_power.run import false_alarms, faults_found
from kenotron.config import InputError, load
from kenotron.launch.comparing import compare, on_layout
from kenotron.models.blocks.attention import Attention
from kenotron.training.compare import Comparison, Distances, backward_order, judge
from support.comparing import compare_on_ranks
from support.layout_runs import Problem
from support.nursery import Nursery
from support.tiny_run import tiny_config, tiny_yaml

PROBLEM = Problem("compare", steps=4, model={"num_hidden_layers": 2})


def compared(layout: str, folder: Path, dtype: str = "float32", steps: int = 4) -> Comparison:
    problem = replace(PROBLEM, overrides=(f"model.dtype={dtype}",))
    return compare_on_ranks(problem.config("", folder), problem.config(layout, folder), folder, steps=steps)


QUICK = [("pp=2 engine=1f1b accum=4", "float32"), ("tp=2 mode=REDUCE_SCATTER", "bfloat16")]
ALL = product(("dp=2", "dp=2 zero=2", *(layout for layout, _ in QUICK)), ("float32", "bfloat16"))
SLOW = [each for each in ALL if each not in QUICK]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("layout", "dtype"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)])
def test_layouts_of_one_config_agree(layout: str, dtype: str, tmp_path: Path) -> None:
    comparison = compared(layout, tmp_path, dtype)
    assert comparison.agrees
    assert comparison.origin() is None
    numbers = [(number.name, number.step) for number in comparison.numbers[:4]]
    assert numbers == [(name, step) for step in (1, 2) for name in ("lm_loss", "grad_norm")]
    assert len(comparison.gradients) == 2 * 9 + 3
    assert len(comparison.update) == len(comparison.movement)
    assert len(comparison.update) == 2 * 9 + 3 if dtype == "float32" else len(comparison.update) < 9
    layers = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]
    assert [each.name for each in comparison.outputs] == layers
    usual, worst = comparison.blind_below()
    assert usual <= worst.allowed
    assert 1e-6 < usual < 1e-3 if dtype == "float32" else 1e-3 < usual < 0.3


@pytest.mark.slow
def test_layouts_in_float16_agree(tmp_path: Path) -> None:
    assert compared("tp=2 mode=REDUCE_SCATTER", tmp_path, "float16").agrees


def test_a_step_of_one_sample_agrees(tmp_path: Path) -> None:
    plain = tiny_config(tmp_path, "tokens.micro_batch_size=1")
    other = load(plain, ["parallelism.tp=2"])
    assert (plain.global_batch_size, other.global_batch_size) == (1, 1)
    assert compare_on_ranks(plain, other, tmp_path, steps=2).agrees


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_layout_that_forgets_a_sum_is_found_at_its_first_parameter(dtype: str, tmp_path: Path) -> None:
    comparison = compared("dp=2 parallelism.strategy=support.user_parts.forgets_to_sum", tmp_path, dtype, steps=2)
    assert not comparison.agrees
    origin = comparison.origin()
    assert (origin[0], origin[1].name) == ("gradient of step 1", "lm_head.weight")  # where backward begins
    assert origin[1].difference > 0.1
    number = comparison.first_number()
    assert (number.name, number.step) == ("grad_norm", 1)  # the first loss comes before any gradient


def distance(numbers: list[list[float]], **of: float) -> Distances:
    """A run at these numbers whose gradients, updates and movements are `of` parameters away; 1e-6 unless given."""
    found = {"head": 1e-6, "layers.1.w": 1e-6, "layers.0.w": 1e-6} | {k.replace("_", "."): v for k, v in of.items()}
    return Distances(numbers, dict.fromkeys(found, 0.0), found, max(found.values()), {}, found, found)


A = [[4.0, 2.0], [3.9, 1.9]]
NEAR = [[4.0 + 1e-6, 2.0 + 1e-6], [3.9 + 1e-6, 1.9 + 1e-6]]


def test_a_reference_that_is_near_by_luck_raises_no_alarm() -> None:
    """Its norm is A's to the bit and one parameter is 0 away; gradient and other layers say how far rounding goes."""
    lucky = distance(A, layers_1_w=0.0)
    apart = distance([[4.0, 2.0 + 5e-6], [3.9, 1.9 + 5e-6]])
    assert judge(distance(A), [lucky], apart).agrees


@pytest.mark.parametrize(
    ("numbers", "wrong", "named"),
    [
        ([[4.0, 2.5], [3.8, 2.4]], {"layers_1_w": 0.1, "layers_0_w": 0.5}, "layers.1.w"),  # backward, from layer 1 on
        ([[4.1, 2.5], [3.8, 2.4]], {"layers_1_w": 0.1, "layers_0_w": 0.5}, "layers.0.w"),  # forward
        ([[4.0, 2.5], [3.9, 1.9]], {}, None),  # the norm alone
    ],
)
def test_the_parameter_to_blame(numbers: list[list[float]], wrong: dict[str, float], named: str | None) -> None:
    comparison = judge(distance(A), [distance(NEAR)], distance(numbers, **wrong))
    assert not comparison.agrees
    origin = comparison.origin()
    assert (origin and origin[1].name) == named


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_differs(bad: float) -> None:
    assert not judge(distance(A), [distance(NEAR)], distance([[bad, 2.0], [3.9, 1.9]])).agrees
    assert not judge(distance(A), [distance(NEAR)], distance(A, head=bad)).agrees


def test_backward_reaches_what_reads_a_value_before_what_makes_it(tmp_path: Path) -> None:
    names = backward_order(PROBLEM.config("", tmp_path))
    assert names[:2] == ["lm_head.weight", "model.norm.weight"]
    assert names[-1] == "model.embed_tokens.weight"
    layer = [name.removeprefix("model.layers.0.").removesuffix(".weight") for name in names if "layers.0" in name]
    assert layer.index("mlp.down_proj") < layer.index("mlp.gate_proj") < layer.index("post_attention_layernorm")
    assert layer.index("self_attn.o_proj") < layer.index("self_attn.k_proj") < layer.index("input_layernorm")


@pytest.mark.slow
@pytest.mark.cases(slow=0)
def test_clean_pairs_agree_and_seeded_faults_are_named() -> None:
    """The short form of `make compare-power`."""
    assert false_alarms(range(10)) == 0
    assert all(answer.found and answer.right for answer in faults_found(FAULTS[::5]))


def test_a_pair_is_a_function_of_its_number(tmp_path: Path) -> None:
    assert pair(3, tmp_path) == pair(3, tmp_path)
    drawn = [pair(number, tmp_path) for number in range(60)]
    assert sum(each.plain.global_batch_size == 1 for each in drawn) == 10
    assert {each.plain.model.dtype for each in drawn} == {"float32", "bfloat16"}
    assert all(each.plain.global_batch_size == each.other.global_batch_size for each in drawn)


def test_every_fault_applies_and_is_undone() -> None:
    assert len({fault.mutant.name for fault in FAULTS}) == len(FAULTS) == 25
    functions = (Attention.of, Attention.forward)
    codes = [function.__code__ for function in functions]
    for fault in FAULTS:
        with fault.mutant.in_this_process():
            changed = codes != [function.__code__ for function in functions]
            assert changed == (fault.mutant.file == "models/blocks/attention.py")
        assert codes == [function.__code__ for function in functions]


def test_micro_batches_are_divided_for_every_step_of_a_ramp(tmp_path: Path) -> None:
    """Steps of 4 and 12 samples on two ranks: 2 at once, of the 4 that one rank takes."""
    file = tiny_yaml(tmp_path)
    content = yaml.safe_load(file.read_text())
    content["tokens"] |= {"micro_batch_size": 4, "batch_accumulation_per_replica": 3}
    content["data_stages"][0]["batch_size_ramp"] = {"start": 4, "increment": 8, "samples": 8}
    file.write_text(yaml.safe_dump(content))
    other = on_layout(file, load(file), ["parallelism.dp=2"], print)
    assert (other.tokens.micro_batch_size, other.tokens.batch_accumulation_per_replica) == (2, 3)
    assert other.global_batch_size == 12


def test_another_layout_in_an_incomplete_file_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("parallelism: {tp: 2}\n")
    with pytest.raises(InputError, match="missing key 'data_stages'") as caught:
        compare(tiny_yaml(tmp_path), other=tmp_path / "other.yaml")
    assert "override" not in str(caught.value)


@pytest.mark.slow
def test_the_command_gives_the_verdict_by_its_exit_code(tmp_path: Path, nursery: Nursery) -> None:
    file = tiny_yaml(tmp_path)
    layout = ("parallelism.recompute_layer=true", "parallelism.strategy=support.user_parts.halves_a_gradient")
    wrong = nursery.run("compare", file, *layout, "--steps", "2", "--dtype", "bfloat16", folder=tmp_path)
    assert wrong.code == 1
    assert "The layouts DIFFER: look at model.layers.0.input_layernorm.weight, whose gradient of step 1" in wrong.stdout
    assert "Blind below: a gradient off by less than " in wrong.stdout
    assert "of its norm" in wrong.stdout
    assert "looks like bfloat16 rounding; --dtype float32 sees far less." in wrong.stdout
    refused = nursery.run("compare", file, "optimizer.weight_decay=0", folder=tmp_path)
    assert refused.code == 2
    assert "optimizer.weight_decay: 0.1 and 0.0 are different runs; expected two layouts of one run" in refused.stderr


@pytest.mark.slow
def test_the_command_starts_the_ranks_of_both_layouts(tmp_path: Path, nursery: Nursery) -> None:
    file = tiny_yaml(tmp_path)
    right = nursery.run("compare", file, "parallelism.dp=2", "--steps", "2", folder=tmp_path)
    assert right.code == 0
    assert "The global batch stays 4: tokens.micro_batch_size=2 tokens.batch_accumulation_per_rep" in right.stderr
    assert "The layouts agree: all differences are within rounding." in right.stdout
