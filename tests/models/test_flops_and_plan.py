"""What a model costs, and how it says that it may be split."""

import re
from dataclasses import replace

import pytest
import torch
import yaml

from kenotron.config.errors import InputError
from kenotron.models import flops_per_token
from kenotron.models.decoder import Decoder
from kenotron.models.families.deepseek_v3 import DeepseekV3Architecture
from kenotron.models.families.llama import Llama, LlamaArchitecture
from kenotron.models.families.mistral import MistralArchitecture
from kenotron.models.part import ModelPart
from kenotron.models.plan import matching
from kenotron.parallel import tensor
from kenotron.parallel.mesh import AXES, Mesh

SEEDS = yaml.safe_load("""{hidden_size: 16, intermediate_size: 64, num_attention_heads: 4, num_key_value_heads: 4,
    num_hidden_layers: 2, vocab_size: 256, tie_word_embeddings: true}""")
GROUPED = yaml.safe_load("""{hidden_size: 96, intermediate_size: 200, num_attention_heads: 6, num_key_value_heads: 2,
    num_hidden_layers: 5, vocab_size: 1000}""")


def meta_llama(shapes: dict[str, int], vocab_multiple: int = 1) -> Decoder:
    with torch.device("meta"):
        return Decoder(LlamaArchitecture(**shapes), vocab_multiple)


def by_hand(shapes: dict[str, int], length: int) -> float:
    """nanotron's count of a forward pass, for one token: 2 a multiplication, the whole attention square."""
    hidden, heads, kv = shapes["hidden_size"], shapes["num_attention_heads"], shapes["num_key_value_heads"]
    width = hidden // heads
    attention = 2 * hidden * (heads + 2 * kv) * width + 2 * 2 * length * heads * width + 2 * heads * width * hidden
    mlp = 3 * 2 * hidden * shapes["intermediate_size"]
    return shapes["num_hidden_layers"] * (attention + mlp) + 2 * hidden * shapes["vocab_size"]


@pytest.mark.parametrize("shapes", [SEEDS, GROUPED], ids=["seeds", "grouped"])
@pytest.mark.parametrize("length", [1, 256])
def test_flops_are_nanotrons_count(shapes: dict[str, int], length: int) -> None:
    """A causal mask halves the square and nothing else, and padding of the vocabulary costs nothing."""
    square = shapes["num_hidden_layers"] * 2 * 2 * length * shapes["hidden_size"]
    for vocab_multiple in (1, 128):
        model = meta_llama(shapes, vocab_multiple)
        assert flops_per_token(model, length, causal=False) == by_hand(shapes, length)
        assert flops_per_token(model, length, causal=True) == by_hand(shapes, length) - square / 2


@pytest.mark.parametrize("window", [1, 100, 255, 256, 1000])
def test_a_window_costs_the_keys_that_its_queries_see(window: int) -> None:
    with torch.device("meta"):
        model = Decoder(MistralArchitecture(**GROUPED, sliding_window=window))
    seen = sum(min(query + 1, window) for query in range(256)) / 256 if window < 256 else 256 / 2
    assert flops_per_token(model, 256, causal=True) == pytest.approx(by_hand(GROUPED, 0) + 5 * 2 * 2 * seen * 96)


@pytest.mark.parametrize(("causal", "keys"), [(True, 128), (False, 256)])
def test_latent_attention_costs_the_widths_of_scores_and_of_values(causal: bool, keys: int) -> None:
    widths = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}
    with torch.device("meta"):
        model = Decoder(DeepseekV3Architecture(**GROUPED, **widths))  # as many key-value heads as heads, in latent form
    square = flops_per_token(model, 256, causal) - flops_per_token(model, 0, causal)
    assert square == 5 * 2 * 6 * (16 + 8 + 20) * keys


@pytest.mark.parametrize("field", ["column", "kv", "row", "vocab", "sequence", "per_head"])
def test_a_pattern_that_names_nothing_is_an_error(field: str) -> None:
    model = meta_llama(GROUPED)
    broken = replace(model.plan, **{field: ("model.layers.*.self_attn.query",)})
    with pytest.raises(InputError, match=re.escape(f"plan.{field}: 'model.layers.*.self_attn.query' matches no mod")):
        broken.check(model)


def test_key_value_heads_that_no_column_splits_are_an_error() -> None:
    model = meta_llama(GROUPED)
    with pytest.raises(InputError, match=r"plan.kv: .* names model.layers.0.self_attn.o_proj, which plan.column does"):
        replace(model.plan, kv=("model.layers.*.self_attn.o_proj",)).check(model)


def test_a_plan_is_checked_when_a_model_is_built_and_when_it_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Llama.plan
    with torch.device("meta"):  # the first two layers of five, without head
        part = Decoder(LlamaArchitecture(**GROUPED), part=ModelPart((0, 1), last=False))
    for broken in (replace(plan, kv=("model.layers.*.self_attn.key",)), replace(plan, row=("model.layers.*.mlp.out",))):
        with pytest.raises(InputError, match="matches no module of Decoder"):  # in a part of a pipeline too
            tensor.apply(part, broken, Mesh(dict.fromkeys(AXES, 1) | {"tp": 2}))
        monkeypatch.setattr(Llama, "plan", broken)
        with pytest.raises(InputError, match="matches no module of Decoder"):
            meta_llama(GROUPED)
        monkeypatch.setattr(Llama, "plan", plan)


def test_a_star_is_one_name_between_dots() -> None:
    names = ["model.layers.0.mlp", "model.layers.11.mlp", "model.layers.0.mlp.up_proj", "model.norm", "xmodel.norm"]
    assert matching("model.layers.*.mlp", names) == ["model.layers.0.mlp", "model.layers.11.mlp"]
    assert matching("model.norm", names) == ["model.norm"]
