"""Fresh weights are functions of (seed, name, element): of nothing else, and with the distribution of the rules."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kenotron.config.decoder import DecoderArchitecture
from kenotron.config.errors import InputError
from kenotron.kernels.tensor_shard import TensorShard
from kenotron.models import initialize_model, materialize, named_parameters
from kenotron.models.decoder import Decoder
from kenotron.models.families.llama import LlamaArchitecture
from kenotron.models.families.mamba import MambaArchitecture
from kenotron.models.families.mixtral import MixtralArchitecture
from kenotron.models.families.nano import NanoArchitecture
from kenotron.models.families.nemotron_h import NemotronHArchitecture
from kenotron.models.init_rules import InitRule, Normal, rule_for
from kenotron.models.initialization import fill

LAYERS = 3


def llama(vocab_multiple=1, scaling="NUM_LAYERS", seed=1, section=LlamaArchitecture, **changes) -> dict[str, Tensor]:
    """Every initial weight of a small model, by name."""
    shapes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 500}
    shapes |= {"num_hidden_layers": LAYERS} | ({"attention_bias": True} if section is LlamaArchitecture else {})
    with torch.device("meta"):
        keys = {name: value for name, value in (shapes | changes).items() if value is not None}
        model = Decoder(section(**keys), vocab_multiple)
    materialize(model, "cpu")
    initialize_model(model, std=0.02, scaling=scaling, seed=seed)
    return {name: parameter.detach() for name, parameter in named_parameters(model)}


@pytest.mark.parametrize(("scaling", "into_residual"), [("NUM_LAYERS", 0.02 / math.sqrt(2 * LAYERS)), ("NONE", 0.02)])
def test_every_weight_has_the_standard_deviation_of_its_rule(scaling: str, into_residual: float) -> None:
    for name, weight in llama(scaling=scaling).items():
        if name.endswith("norm.weight"):
            assert torch.equal(weight, torch.ones_like(weight)), name
        elif name.endswith(".bias"):
            assert not weight.any(), name
        else:
            std = into_residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            error = 4 / math.sqrt(2 * weight.numel())  # four standard errors of a standard deviation
            assert weight.std().item() == pytest.approx(std, rel=error), name
            assert abs(weight.mean().item()) < 4 * std / math.sqrt(weight.numel()), name


FAMILIES: dict[type[DecoderArchitecture], tuple[int, dict[str, Any]]] = {  # branches of a layer, keys
    LlamaArchitecture: (2, {}),
    MixtralArchitecture: (2, {"num_local_experts": 2}),
    MambaArchitecture: (1, {"num_attention_heads": None, "intermediate_size": None}),
    NemotronHArchitecture: (1, {"hybrid_override_pattern": "M*-", "head_dim": 16}),
}


@pytest.mark.parametrize("section", FAMILIES, ids=lambda section: section.__name__)
def test_layer_index_divides_by_the_branches_up_to_a_layer(section: type[DecoderArchitecture]) -> None:
    """Lingua's `current_depth`, torchtitan's `depth_init`: sqrt(2 * (layer + 1)); everything else is as it was."""
    branches, keys = FAMILIES[section]
    plain, found = (llama(scaling=scaling, section=section, **keys) for scaling in ("NONE", "LAYER_INDEX"))
    damped = [name for name in found if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))]
    assert {name.split(".")[2] for name in damped} == {str(layer) for layer in range(LAYERS)}
    for name, weight in found.items():
        by = math.sqrt(branches * (int(name.split(".")[2]) + 1)) if name in damped else 1.0
        torch.testing.assert_close(weight * by, plain[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("scaling", ["NUM_LAYERS", "NONE", "LAYER_INDEX"])
def test_a_nano_begins_with_nothing_written_into_the_residual_stream(scaling: str) -> None:
    weights = llama(scaling=scaling, section=NanoArchitecture)
    zeros = {name for name, weight in weights.items() if not weight.any()}
    branches = ("self_attn.o_proj", "mlp.down_proj")
    assert zeros == {f"model.layers.{layer}.{each}.weight" for layer in range(LAYERS) for each in branches}
    for name in weights.keys() - zeros:
        assert weights[name].std().item() == pytest.approx(0.02, rel=0.1), name


def test_no_two_weights_are_alike_and_the_seed_matters() -> None:
    one, other = llama(seed=1), llama(seed=2)
    matrices = {name: w for name, w in one.items() if w.dim() == 2}
    assert len({w.flatten()[:8].numpy().tobytes() for w in matrices.values()}) == len(matrices)
    assert all(not torch.equal(w, other[name]) for name, w in matrices.items())
    assert all(torch.equal(w, llama(seed=1)[name]) for name, w in one.items())


def test_padding_the_vocabulary_moves_no_weight_and_its_rows_are_zero() -> None:
    plain, padded = llama(), llama(vocab_multiple=128)
    for name, weight in padded.items():
        rows = len(plain[name])
        assert torch.equal(weight[:rows], plain[name]), name
        assert not weight[rows:].any(), name
    assert len(padded["lm_head.weight"]) == 512


def test_a_deeper_model_has_the_same_first_layers_but_for_the_damping() -> None:
    shallow, deep = llama(scaling="NONE"), llama(scaling="NONE", num_hidden_layers=LAYERS + 2)
    assert all(torch.equal(weight, deep[name]) for name, weight in shallow.items())


def test_a_tied_head_leaves_the_embedding_as_it_is() -> None:
    tied = llama(tie_word_embeddings=True)
    assert "lm_head.weight" not in tied
    assert torch.equal(tied["model.embed_tokens.weight"], llama()["model.embed_tokens.weight"])


def test_torchs_global_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one = llama()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    other = llama()
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


@given(st.data())
def test_any_shard_holds_the_bits_of_the_whole(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    first, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    last, right = data.draw(st.integers(first + 1, rows)), data.draw(st.integers(left + 1, columns))
    whole = torch.empty(rows, columns)
    fill("a.weight", TensorShard(whole, (rows, columns), (0, 0)), Normal(0.5), seed=11)
    part = torch.empty(last - first, right - left)
    fill("a.weight", TensorShard(part, (rows, columns), (first, left)), Normal(0.5), seed=11)
    assert torch.equal(part, whole[first:last, left:right])


def test_the_first_rule_that_matches_wins_and_a_parameter_without_one_is_named() -> None:
    rules = [InitRule("*.o_proj.weight", Normal(1.0)), InitRule("*.weight", Normal(2.0))]
    assert rule_for("model.layers.0.self_attn.o_proj.weight", rules) == Normal(1.0)
    assert rule_for("model.layers.0.self_attn.q_proj.weight", rules) == Normal(2.0)
    with pytest.raises(InputError, match=r"covers the parameter 'model\.norm\.bias'"):
        rule_for("model.norm.bias", rules)
