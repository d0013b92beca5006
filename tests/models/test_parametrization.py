"""Parametrizations: nanotron's published factors, the papers' tables, and the models that they are the tables of."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kenotron.config import load
from kenotron.config.errors import InputError
from kenotron.models import build, named_parameters
from kenotron.models.parametrization import Factors, factors, table
from kenotron.optim.build import build_optimizer
from kenotron.parallel.mesh import Mesh
from support.layout_runs import SPARSE, prepared
from support.tiny_run import tiny_dict

UNTIED = {"tie_word_embeddings": False}
# examples/mup/configs/mup_350m_llama_config.yaml of nanotron
LLAMA_350M = yaml.safe_load("""{hidden_size: 1024, intermediate_size: 4096, num_attention_heads: 8,
    num_key_value_heads: 4, num_hidden_layers: 2, vocab_size: 49152}""")
LAYER = "model.layers.0."


def of(folder: Path, shapes: dict[str, Any], *overrides: str) -> dict[str, Factors]:
    content = tiny_dict(folder)
    content["model"]["model_config"] |= UNTIED | shapes
    config = load(content, overrides)
    with torch.device("meta"):
        return factors(build(config.model), config)


@pytest.mark.parametrize(
    ("way", "matrix", "std", "rate"),
    [
        ("fused", "self_attn.q_proj", 0.03125, 2),
        ("fused", "self_attn.v_proj", 0.03125, 2),
        ("fused", "self_attn.o_proj", 0.03125, 1),
        ("fused", "mlp.gate_proj", 0.03125, 8),
        ("fused", "mlp.up_proj", 0.03125, 8),
        ("fused", "mlp.down_proj", 0.0078125, 0.25),
        ("per_matrix", "self_attn.q_proj", 0.03125, 1),
        ("per_matrix", "self_attn.k_proj", 0.022097, 0.5),
        ("per_matrix", "mlp.gate_proj", 0.03125, 4),
    ],
)
def test_spectral_factors_of_350m_are_those_published(way, matrix, std, rate, tmp_path):
    found = of(tmp_path, LLAMA_350M, f"model.init_method={{use_mup: true, mup_factors: {way}}}")
    scores = 128**-0.5 if matrix.endswith("q_proj") else 1.0  # 1 / head_dim instead of its root, in the weights
    name = f"{LAYER}{matrix}.weight"
    assert found[name].std == pytest.approx(std * scores, rel=1e-4)
    assert found[name].learning_rate == pytest.approx(rate * scores)
    assert found[name].weight_decay == pytest.approx(1 / scores)
    assert found["lm_head.weight"].std == pytest.approx(0.03125)
    assert found["lm_head.weight"].learning_rate == pytest.approx(48)
    for plain in ("model.embed_tokens.weight", "model.norm.weight", f"{LAYER}input_layernorm.weight"):
        assert found[plain] == Factors()


@pytest.mark.parametrize("optimizer", ["adamW", "muon"])
@pytest.mark.parametrize("kind", ["mup", "completep"])
def test_relative_factors_are_the_table_s(kind: str, optimizer: str, tmp_path: Path) -> None:
    m, l = 4.0, 3.0
    deep = kind == "completep"
    base = f"model.parametrization={{kind: {kind}, base_width: 16, base_depth: {2 if deep else 'null'}}}"
    shapes = {"hidden_size": 64, "num_hidden_layers": 6}
    found = of(tmp_path, shapes, base, f"optimizer.optimizer_factory={{name: {optimizer}}}")
    rate = m**-0.5 if optimizer == "muon" else 1 / m
    branch = 1 / l if deep else 1.0
    hidden = Factors(m**-0.5, rate, 1 / rate, 1 / (m * l) if deep else 1 / m)
    depth = l**0.5 if deep else 1.0  # NUM_LAYERS divides by the root of this depth, and the base model's counts
    out = Factors(m**-0.5 * branch * depth, rate * branch, 1 / (rate * branch), 1 / m)
    whole = Factors(epsilon=1 / (m * l) if deep else 1.0)
    expected = {"model.embed_tokens": whole, "model.norm": whole}
    expected |= {f"{LAYER}self_attn.q_proj": hidden, f"{LAYER}mlp.up_proj": hidden}
    expected |= {f"{LAYER}self_attn.o_proj": out, f"{LAYER}mlp.down_proj": out}
    expected["lm_head"] = Factors(1 / m, 1 / m, m, 1 / l if deep else m)
    for name, wanted in expected.items():
        assert vars(found[f"{name}.weight"]) == pytest.approx(vars(wanted)), name


def test_biases_of_what_writes_into_the_residual_stream_are_divided_by_depth_with_it(tmp_path: Path) -> None:
    shapes = {"family": "starcoder2", "hidden_size": 64, "num_hidden_layers": 6}
    found = of(tmp_path, shapes, "model.parametrization={kind: completep, base_width: 16, base_depth: 2}")
    out, plain = found[f"{LAYER}self_attn.o_proj.bias"], found[f"{LAYER}self_attn.q_proj.bias"]
    assert (plain.learning_rate, plain.epsilon) == (1.0, pytest.approx(1 / 12))
    assert (out.learning_rate, out.weight_decay, out.epsilon) == pytest.approx((1 / 3, 3.0, 1 / 4))


def test_a_weight_times_c_trains_as_the_same_weight_with_its_output_times_c() -> None:
    """What the factors on activations are replaced by, in ten steps of AdamW in float64."""
    c, x, y = 0.125, torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    start = torch.randn(3, 5, dtype=torch.float64)
    outputs = []
    plain = Factors()
    for factor, output in ((plain, c), (plain.with_output_times(c), 1.0)):
        weight = torch.nn.Parameter(start * factor.std)
        options = {"weight_decay": 0.2 * factor.weight_decay, "eps": 1e-3 * factor.epsilon}
        optimizer = torch.optim.AdamW([weight], lr=0.05 * factor.learning_rate, **options)
        for _ in range(10):
            optimizer.zero_grad()
            (output * x @ weight.T - y).square().mean().backward()
            optimizer.step()
        outputs.append((output * x @ weight.T).detach())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-12, atol=1e-12)


def config_of(folder: Path, *overrides: str) -> Any:
    content = tiny_dict(folder)
    content["model"]["model_config"] |= UNTIED
    return load(content, ["model.parametrization={kind: completep, base_width: 4, base_depth: 1}", *overrides])


def test_they_reach_weights_and_optimizer(tmp_path: Path) -> None:
    plain = load(config_of(tmp_path / "plain"), ["model.parametrization=null"])
    with prepared(plain, Mesh()) as one, prepared(config_of(tmp_path / "scaled"), Mesh()) as other:
        name = f"{LAYER}mlp.down_proj.weight"
        before, after = (dict(named_parameters(*run.parts))[name] for run in (one, other))
        torch.testing.assert_close(after, before * 4**-0.5 / 2 * 2**0.5)
        (group,) = (g for g in other.optimizer.param_groups if any(p is after for p in g["params"]))
        assert group["learning_rate_scale"] == pytest.approx(1 / 8)
        assert group["weight_decay"] == pytest.approx(0.1 * 8)
        assert group["eps"] == pytest.approx(1e-8 / 4)


def test_patterns_of_parameter_groups_multiply_them(tmp_path: Path) -> None:
    rule = "optimizer.param_groups=[{pattern: down_proj, learning_rate_scale: 3, weight_decay: 0}]"
    config = config_of(tmp_path, rule)
    with torch.device("meta"):
        model = build(config.model)
    optimizer = build_optimizer(model.named_parameters(), config.optimizer, factors=factors(model, config))
    weight = dict(model.named_parameters())[f"{LAYER}mlp.down_proj.weight"]
    (group,) = (g for g in optimizer.param_groups if any(p is weight for p in g["params"]))
    assert (group["learning_rate_scale"], group["weight_decay"]) == (pytest.approx(3 / 8), 0.0)


KEY = "model.parametrization"
MUP = [f"{KEY}=null", "model.init_method={use_mup: true}"]
COMPLETEP = f"{KEY}.kind=completep"
SGD, MUON = (f"optimizer.optimizer_factory={{name: {name}}}" for name in ("sgd", "muon"))


@pytest.mark.parametrize(
    ("shapes", "overrides", "said"),
    [
        ({}, [SGD], f"{KEY}: its factors are those of adamW or muon or normuon; found"),
        ({"tie_word_embeddings": True}, [], f"{KEY}: embedding and head learn at different rates; expected tie"),
        (SPARSE["mixtral"], [], f"{KEY}: expected a model of attention and dense MLPs, found mixtral"),
        ({}, [*MUP, MUON], "model.init_method.use_mup: its factors are those of adamW; found muon"),
        (
            {},
            [COMPLETEP, "model.init_method={std: 0.02, scaling_method: layer_index}"],
            "model.init_method.scaling_method: expected NUM_LAYERS or NONE with completep, found LAYER_INDEX",
        ),
        (
            {"family": "olmo2"},
            [COMPLETEP],
            f"{KEY}.kind: expected mup: the norms after branches of olmo2 undo 1 / depth",
        ),
        ({}, MUP[1:], "model.parametrization: expected null with init_method.use_mup"),
        ({}, ["model.parametrization.base_depth=3"], "base_depth: expected null or this model's depth; "),
        ({}, [COMPLETEP, f"{KEY}.base_depth=null"], f"{KEY}.base_depth: missing: completep needs the depth"),
    ],
)
def test_what_the_rules_do_not_know_is_one_line(shapes, overrides, said, tmp_path):
    with pytest.raises(InputError, match=said):
        of(tmp_path, shapes, "model.parametrization={kind: mup, base_width: 8, base_depth: 2}", *overrides)


def test_use_mup_false_asks_for_nothing(tmp_path: Path) -> None:
    assert of(tmp_path, {}, "model.init_method={std: 0.05, use_mup: false}") == {}


def test_a_group_has_a_standard_deviation_of_its_own(tmp_path: Path) -> None:
    """Its weights are the same numbers, half as large; the parametrization's factor stays."""
    rule = "optimizer.param_groups=[{pattern: down_proj, init_std_scale: 0.5, learning_rate_scale: 0.25}]"
    plain, scaled = config_of(tmp_path / "plain"), config_of(tmp_path / "scaled", rule)
    with prepared(plain, Mesh()) as one, prepared(scaled, Mesh()) as other:
        found = dict(named_parameters(*other.parts))
        for name, weight in named_parameters(*one.parts):
            torch.testing.assert_close(found[name], (0.5 if "down_proj" in name else 1.0) * weight)
    before, after = (next(row.split() for row in table(each) if "down_proj" in row) for each in (plain, scaled))
    assert float(after[-4]) == pytest.approx(0.5 * float(before[-4]), rel=1e-3)
    assert float(after[-3]) == pytest.approx(0.25 * float(before[-3]), rel=1e-3)
    with pytest.raises(InputError, match=r"param_groups\.0\.init_std_scale: has no effect: model.init_method.path has"):
        config_of(tmp_path, rule, "model.parametrization=null", "model.init_method={path: checkpoints/100}")
