"""Mamba and Mamba-2 beyond what every family is compared by: initial weights, documents, dtypes, nanotron's keys."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import yaml

from kenotron.config import load
from kenotron.config.errors import InputError
from kenotron.interop.hf_config import architecture_from_hf, hf_config
from kenotron.kernels.attention import attention
from kenotron.kernels.state_space_dual import _sums_by_product
from kenotron.kernels.tensor_shard import TensorShard
from kenotron.models import Context, build, flops_per_token, named_parameters
from kenotron.models.blocks import mamba_init
from kenotron.models.blocks.mamba import TimeSteps
from kenotron.models.decoder import Decoder
from support.families import filled, hf_model, in_our_names_of, ours_of
from support.tiny_llamas import fresh_model, our_config, our_logits, random_tokens

HEADS = {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8}
KEYS: dict[str, dict[str, Any]] = {
    "mamba": {"is_mamba_config": True, "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300},
    "mamba2": {"is_mamba2_config": True, "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300} | HEADS,
}
NANOTRONS = yaml.safe_load("""{is_mamba_config: true, d_model: 32, num_hidden_layers: 2, vocab_size: 300,
    ssm_cfg: {d_state: 8, d_conv: 3, expand: 1, dt_rank: 5, dt_min: 0.01, dt_max: 0.2, dt_init: constant,
        dt_scale: 0.5, dt_init_floor: 0.02, conv_bias: false, bias: true, use_fast_path: true},
    rms_norm: true, fused_add_norm: true, residual_in_fp32: false, rms_norm_eps: 1.0e-4, pad_vocab_size_multiple: 8,
    dtype: float32, pad_token_id: null}""")


def config_of(root: Path, **keys: Any) -> dict[str, Any]:
    """A whole config in YAML's keys, with these keys of the model."""
    config = our_config(root)
    config["model"]["model_config"] = keys
    return config


# ---- configs -----------------------------------------------------------------------------------------------


def test_nanotrons_keys_are_read_as_those_they_mean(tmp_path: Path) -> None:
    ours = yaml.safe_load("""{is_mamba_config: true, hidden_size: 32, num_hidden_layers: 2, vocab_size: 300,
        state_size: 8, conv_kernel: 3, expand: 1, time_step_rank: 5, time_step_min: 0.01, time_step_max: 0.2,
        time_step_init_scheme: constant, time_step_scale: 0.5, time_step_floor: 0.02, use_conv_bias: false,
        use_bias: true, residual_in_fp32: false, layer_norm_epsilon: 0.0001}""")
    config = config_of(tmp_path, **NANOTRONS)
    rescaled = {"rescale_prenorm_residual": True, "n_residuals_per_layer": 1}
    config["model"]["init_method"] = {"initializer_range": 0.02, **rescaled}
    said: list[str] = []
    found = load(config, report=said.append)
    assert found.model.architecture == load(config_of(tmp_path, **ours)).model.architecture
    assert found.model.make_vocab_size_divisible_by == 8
    assert (found.model.init_method.std, found.model.init_method.scaling_method) == (0.02, "NUM_LAYERS")
    assert [line.split(": ")[-1] for line in said] == [
        "model.init_method.initializer_range is now model.init_method.std; rescale_prenorm_residual is scaling_method",
        "pad_vocab_size_multiple is now model.make_vocab_size_divisible_by",
    ]


@pytest.mark.parametrize(("keys", "scaling"), [({}, "NUM_LAYERS"), ({"rescale_prenorm_residual": False}, "NONE")])
def test_nanotron_scales_the_branches_of_a_mamba_unless_told_otherwise(keys, scaling, tmp_path):
    config = config_of(tmp_path, **NANOTRONS)
    config["model"]["init_method"] = {"initializer_range": 0.02, **keys}
    assert load(config).model.init_method.scaling_method == scaling


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ssm_cfg": {"d_sate": 8}}, r"ssm_cfg.d_sate: expected one of d_state, d_conv"),
        ({"rms_norm": False}, "rms_norm: expected true"),
        ({"hidden_size": 32}, "d_model: is nanotron's name for hidden_size, which is also set"),
        ({"dtype": "bfloat16"}, r"model_config.dtype bfloat16: expected that of model.dtype"),
        ({"ssm_cfg": {"dt_min": 0.5}}, r"time_step_max: expected at least time_step_min 0.5, found 0.1"),
    ],
)
def test_what_is_wrong_with_nanotrons_keys_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        load(config_of(tmp_path, **NANOTRONS | changes))


def test_another_number_of_residual_branches_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, **NANOTRONS)
    config["model"]["init_method"] = {"initializer_range": 0.02, "n_residuals_per_layer": 2}
    with pytest.raises(InputError, match="n_residuals_per_layer: expected 1, the branches of a Mamba layer"):
        load(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_heads": 6}, r"num_heads: expected num_heads \* head_dim = expand \* hidden_size 64, found 6 \* 8"),
        ({"n_groups": 3}, "n_groups: expected a divisor of num_heads 8, found 3"),
        ({"time_step_limit": [2.0, 1.0]}, r"time_step_limit: expected \[least, most\], found \[2.0, 1.0\]"),
    ],
)
def test_heads_that_do_not_fit_are_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        load(config_of(tmp_path, **KEYS["mamba2"] | changes))


def test_a_mamba_has_one_matrix_of_tokens_unless_told_otherwise(tmp_path: Path) -> None:
    for keys, has_head in (({}, False), ({"tie_word_embeddings": False}, True)):
        model = build(load(config_of(tmp_path, **KEYS["mamba"], **keys)).model)
        assert ("lm_head.weight" in dict(named_parameters(model))) == has_head
    with pytest.raises(InputError, match=r"hidden_act: expected .*silu"):
        load(config_of(tmp_path, **KEYS["mamba"], hidden_act="gelu"))


# ---- initial weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", KEYS)
def test_decays_and_time_steps_begin_as_in_the_papers(family: str, tmp_path: Path) -> None:
    keys = {"time_step_min": 0.01, "time_step_max": 0.5, "time_step_floor": 0.02}
    model = fresh_model(config_of(tmp_path, **KEYS[family], **keys))
    weights = {name: parameter.detach() for name, parameter in named_parameters(model)}
    mixer = "model.layers.1.mixer."
    a_log, skip = weights[mixer + "scan.A_log"], weights[mixer + "scan.D"]
    assert torch.allclose(a_log.exp(), torch.arange(1.0, a_log.shape[-1] + 1).expand_as(a_log), rtol=1e-5)
    assert (skip == 1).all()
    bias = weights[mixer + ("dt_proj.bias" if family == "mamba" else "time_steps.dt_bias")]
    steps = torch.nn.functional.softplus(bias.double())
    assert 0.02 - 1e-6 <= steps.min() < 0.05
    assert 0.2 < steps.max() <= 0.5 + 1e-6
    assert steps.log().mean() == pytest.approx(math.log(0.01 * 0.5) / 2, abs=0.8)
    bounds = {"in_proj_x": 32**-0.5, "out_proj": 64**-0.5 / 2**0.5}  # the last damped by sqrt(layers)
    if family == "mamba":
        bounds |= {"x_proj": 64**-0.5, "dt_proj": 2**-0.5}
    for name, bound in bounds.items():
        weight = weights[f"{mixer}{name}.weight"]
        assert 0.9 * bound < weight.abs().max() <= bound, name
        assert weight.std() == pytest.approx(bound / 3**0.5, rel=0.15)
    assert weights["model.embed_tokens.weight"].std() == pytest.approx(0.05, rel=0.05)


def test_constant_projections_to_time_steps(tmp_path: Path) -> None:
    keys = {"time_step_init_scheme": "constant", "time_step_scale": 0.5, "time_step_rank": 4}
    weights = dict(named_parameters(fresh_model(config_of(tmp_path, **KEYS["mamba"], **keys))))
    assert (weights["model.layers.0.mixer.dt_proj.weight"] == 0.25).all()


@pytest.mark.parametrize(
    "distribution", [mamba_init.uniform(2.0), mamba_init.time_step_bias(0.01, 0.1, 1e-4), mamba_init.log_of_index()]
)
def test_a_shard_is_filled_with_the_bits_of_the_whole(distribution: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, part = torch.empty(12, 3, 5), torch.empty(4, 3, 2)
    distribution.fill(TensorShard.full(whole), 42)
    monkeypatch.setattr(mamba_init, "ELEMENTS", 12)  # two rows a round
    distribution.fill(TensorShard(part, (12, 3, 5), (6, 0, 2)), 42)
    assert torch.equal(part, whole[6:10, :, 2:4])


# ---- maths -------------------------------------------------------------------------------------------------


def test_bounds_of_time_steps_are_those_of_transformers() -> None:
    theirs = hf_model("mamba2", time_step_limit=[0.3, 0.8])
    config = theirs.config.to_dict() | {"architectures": ["Mamba2ForCausalLM"]}
    architecture = architecture_from_hf(config, "config.json")
    tokens = random_tokens(2, 17)
    unlimited = architecture.model_copy(update={"time_step_limit": [0.0, None]})
    models = (Decoder(architecture), Decoder(unlimited))
    limited, free = (our_logits(filled(m, in_our_names_of(m, theirs.state_dict())), tokens) for m in models)
    with torch.no_grad():
        expected = theirs(tokens).logits
    assert torch.allclose(limited, expected, atol=1e-4)
    assert not torch.allclose(free, expected, atol=1e-2)
    assert list(hf_config(architecture, "float32", 0).time_step_limit) == [0.3, 0.8]
    unpublished = {"time_step_limit", "num_attention_heads"}  # files of a Mamba have no such heads
    content = {key: value for key, value in config.items() if key not in unpublished}
    assert architecture_from_hf(content, "config.json").time_step_limit == [0.0, None]


def test_flops_are_those_of_the_matrices_and_the_recurrence() -> None:
    hidden, inner, state, rank, width, vocab = 32, 64, 16, 2, 4, 300
    matrices = 2 * hidden * inner + inner * (rank + 2 * state) + rank * inner + inner * hidden
    layer = 2 * matrices + 2 * inner * width + 6 * inner * state
    assert flops_per_token(ours_of(hf_model("mamba")), 1024, causal=True) == 2 * layer + 2 * vocab * hidden


@pytest.mark.slow
@pytest.mark.parametrize("family", KEYS)
def test_a_compiled_model_has_the_same_gradients_and_no_nan(family: str, tmp_path: Path) -> None:
    """torch.compile gave NaN on Mamba-2 elsewhere (pytorch #146129)."""
    found = []
    for compiled in (False, True):
        model = fresh_model(config_of(tmp_path, **KEYS[family]))
        if compiled:
            for block in model.model.layers.values():
                block.compile()
        tokens = random_tokens(2, 70)
        ctx = Context((2, 70), torch.arange(70).repeat(2), attention, loss_scale=1 / 140)
        loss, _ = model(tokens.flatten(), ctx, tokens.flatten())
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for _, parameter in named_parameters(model))])
    for plain, other in zip(*found):
        assert other.isfinite().all()
        assert torch.allclose(other, plain, rtol=1e-3, atol=1e-6)


def test_time_steps_have_the_bias_that_zero_hands_out() -> None:
    torch.manual_seed(0)
    masters, handed_out = TimeSteps(4, 64, bias=True), TimeSteps(4, 64, bias=True)
    torch.nn.init.uniform_(masters.bias, -7, -2)
    torch.nn.init.normal_(masters.weight)
    for mine, theirs in zip(handed_out.parameters(), masters.parameters(), strict=True):
        mine.data = theirs.data.bfloat16()
    x = torch.randn(20, 4).bfloat16()
    assert torch.equal(masters(x), handed_out(x))


def test_running_sums_as_products_are_running_sums() -> None:
    """What a GPU computes in deterministic runs."""
    x = torch.randn(2, 3, 7, 5, dtype=torch.float64)
    for dim in (-1, -2):
        assert torch.allclose(_sums_by_product(x, dim), x.cumsum(dim))
