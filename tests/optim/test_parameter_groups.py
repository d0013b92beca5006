"""Which parameter learns at which rate and with which weight decay."""

import pytest
import torch
from torch import nn

from kenotron.config.errors import InputError
from kenotron.optim.groups import is_hidden_matrix, parameter_groups


def settings_by_name(model, groups, key):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: group[key] for group in groups for parameter in group["params"]}


def test_without_patterns_one_group_holds_everything_in_the_models_order(tiny, section):
    model = tiny()
    (group,) = parameter_groups(model.named_parameters(), section())
    assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]
    assert (group["lr"], group["weight_decay"], group["learning_rate_scale"]) == (1e-2, 0.1, 1.0)


EXCLUDED = "weight_decay_exclude_named_params"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({EXCLUDED: ["norm"]}, "'norm' matches no .* from its start; did you mean '.\\*norm'"),
        ({EXCLUDED: [".*embeded_tokens.*"]}, "did you mean 'embed_tokens'"),
        ({"param_groups": [{"pattern": "embed_token.weigth"}]}, "matches no .*; did you mean 'embed_tokens.weight'"),
        ({"param_groups": [{"pattern": "layers"}, {"pattern": "up_proj"}]}, "'up_proj' has no effect"),
    ],
)
def test_a_pattern_without_effect_is_refused(tiny, section, keys, said):
    with pytest.raises(InputError, match=said):
        parameter_groups(tiny().named_parameters(), section(**keys))


def test_patterns_are_checked_against_the_whole_model_where_a_rank_has_a_part_of_it(tiny, section):
    whole = list(tiny().named_parameters())
    groups = [{"pattern": r"layers\.0\.", "learning_rate_scale": 0.5}, {"pattern": "model.norm"}]
    config = section(weight_decay_exclude_named_params=[r"model\.embed_tokens"], param_groups=groups)
    names = [name for name, _ in whole]
    cut = names.index("model.layers.1.up_proj.weight")
    first, last = whole[:cut], [pair for pair in whole[cut:] if pair[0] != "model.norm.weight"]
    with pytest.raises(InputError):
        parameter_groups(last, config)
    (group,) = parameter_groups(last, config, names)
    assert (group["weight_decay"], group["learning_rate_scale"]) == (0.1, 1.0)
    excluded, scaled = parameter_groups(first, config, names)
    assert (excluded["weight_decay"], scaled["weight_decay"], scaled["learning_rate_scale"]) == (0.0, 0.1, 0.5)
    with pytest.raises(InputError, match="matches no parameter's name"):
        parameter_groups(last, section(param_groups=[{"pattern": r"layers\.2\."}]), names)


def test_the_first_pattern_that_matches_wins(tiny, section):
    model = tiny()
    rules = [{"pattern": r"layers\.0\.", "learning_rate_scale": 0.5}, {"pattern": r"model\.norm", "weight_decay": 0.0}]
    rules.insert(1, {"pattern": "up_proj", "learning_rate_scale": 2.0, "weight_decay": 0.3})
    groups = parameter_groups(model.named_parameters(), section(param_groups=rules))
    scale = settings_by_name(model, groups, "learning_rate_scale")
    decay = settings_by_name(model, groups, "weight_decay")
    for name, expected in {"layers.0.up_proj": (0.5, 0.1), "layers.1.up_proj": (2.0, 0.3), "norm": (1.0, 0.0)}.items():
        assert (scale[f"model.{name}.weight"], decay[f"model.{name}.weight"]) == expected
    assert settings_by_name(model, groups, "lr")["model.layers.1.up_proj.weight"] == pytest.approx(2e-2)


def test_exclusion_is_stronger_than_a_groups_weight_decay(tiny, section):
    model = tiny()
    rules = [{"pattern": "norm", "weight_decay": 0.3}]
    config = section(param_groups=rules, weight_decay_exclude_named_params=[r"model\.norm"])
    decay = settings_by_name(model, parameter_groups(model.named_parameters(), config), "weight_decay")
    assert decay["model.norm.weight"] == 0.0
    assert decay["model.layers.0.input_layernorm.weight"] == 0.3


def test_frozen_parameters_are_left_out(tiny, section):
    model = tiny()
    model.model.embed_tokens.weight.requires_grad_(False)
    names = settings_by_name(model, parameter_groups(model.named_parameters(), section()), "lr")
    assert "model.embed_tokens.weight" not in names
    assert len(names) == len(list(model.parameters())) - 1


def test_plain_tensors_and_dtensors_never_share_a_group(tiny, section, group_of_one):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = tiny()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model.model.layers[0], mesh=mesh)
    groups = parameter_groups(model.named_parameters(), section())
    kinds = [{hasattr(parameter, "device_mesh") for parameter in group["params"]} for group in groups]
    assert kinds == [{False}, {True}]


def test_muon_takes_the_matrices_of_numbered_layers_and_nothing_else(tiny, section):
    model = tiny()
    rules = [{"pattern": r"layers\.1.*proj\.weight", "learning_rate_scale": 0.5}]
    config = section({"name": "muon", "muon_learning_rate_scale": 3.0}, param_groups=rules)
    groups = parameter_groups(model.named_parameters(), config)
    rules = settings_by_name(model, groups, "factory")
    scale = settings_by_name(model, groups, "learning_rate_scale")
    assert {rule.name for rule in rules.values()} == {"muon", "adamW"}
    assert all((rule.name == "muon") == name.endswith("proj.weight") for name, rule in rules.items())
    assert scale["model.layers.0.up_proj.weight"] == 3.0
    assert scale["model.layers.1.up_proj.weight"] == 1.5
    assert scale["lm_head.weight"] == 1.0


@pytest.mark.parametrize(
    ("name", "shape", "hidden"),
    [
        ("model.layers.7.self_attn.q_proj.weight", (8, 8), True),
        ("model.layers.7.self_attn.q_proj.bias", (8,), False),
        ("model.embed_tokens.weight", (16, 8), False),
        ("model.layers.1.self_attn.value_embedding.weight", (16, 8), False),
        ("lm_head.weight", (16, 8), False),
        ("backbone.layers.0.mixer.A_log", (16, 8), False),
        ("backbone.layers.0.mixer.conv1d.weight", (16, 1, 4), False),
        ("model.layers.3.mlp.experts.up_proj.weight", (4, 16, 8), True),
    ],
)
def test_a_hidden_matrix_is_the_weight_of_a_linear_map_in_a_layer(name, shape, hidden):
    assert is_hidden_matrix(name, torch.zeros(shape)) is hidden


def test_a_model_without_trainable_parameters_is_refused(section):
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(InputError, match="no trainable parameter"):
        parameter_groups(model.named_parameters(), section())
