"""A weight that a plan forgets would get one rank's part of its gradient: it is found before training, by name."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from kenotron.config import Config, load
from kenotron.config.errors import InputError
from kenotron.config.families import built_in_names
from kenotron.models import build
from kenotron.models.blocks.attention import Attention
from kenotron.models.blocks.linear import Linear
from kenotron.models.blocks.norm import RMSNorm
from kenotron.models.decoder import Decoder
from kenotron.models.families.llama import LlamaArchitecture, LlamaStyle
from kenotron.models.foreign import HUGGING_FACE, HuggingFace, HuggingFaceArchitecture
from kenotron.models.foreign_model import ForeignModel
from kenotron.models.plan import Plan
from kenotron.parallel.partial_gradients import check_gradients
from support.layout_runs import problem_of_family
from support.tiny_run import tiny_dict

LAYER = "model.layers.*."


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight


class MLP(nn.Module):
    """What is inside of it decides where `alpha` and `gate` are."""

    def __init__(self, config):
        super().__init__()
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        return self.down_proj(self.up_proj(x).relu())


class Inside(MLP):
    """A learned slope between the column and the row layer."""

    def __init__(self, config):
        super().__init__(config)
        self.alpha = Scale(1)

    def forward(self, x):
        return self.down_proj(self.alpha(self.up_proj(x)))


class Gated(MLP):
    """One gate for all features, of the whole x."""

    def __init__(self, config):
        super().__init__(config)
        self.gate = Linear(config.hidden_size, 1)

    def forward(self, x):
        return self.down_proj(torch.sigmoid(self.gate(x)) * self.up_proj(x))


class Written(Inside):
    """The slope gets there by an assignment."""

    def forward(self, x):
        y = torch.zeros_like(self.up_proj(x))
        y[:] = self.alpha(self.up_proj(x))
        return self.down_proj(y)


class Outside(MLP):
    """LayerScale: on the sum of the row layer, which every rank has."""

    def __init__(self, config):
        super().__init__(config)
        self.alpha = Scale(config.hidden_size)

    def forward(self, x):
        return self.alpha(super().forward(x))


class Normed(MLP):
    """Divides by the norm of all features, of which a rank has a part."""

    def forward(self, x):
        up = self.up_proj(x)
        return self.down_proj(torch.nn.functional.rms_norm(up, up.shape[-1:]))


class Halves(MLP):
    def forward(self, x):
        one, two = self.up_proj(x).chunk(2, -1)
        return self.down_proj(torch.cat((one, two.relu()), -1))


class Softmax(MLP):
    def forward(self, x):
        return self.down_proj(self.up_proj(x).softmax(-1))


class OverTokens(MLP):
    """Of each feature by itself."""

    def forward(self, x):
        up = self.up_proj(x)
        heads = up.unflatten(-1, (4, -1)).softmax(-1).flatten(1)
        return self.down_proj(up.softmax(0) + up.mean(0, keepdim=True) + heads)


class Counting(MLP):
    """Its path depends on the values."""

    def forward(self, x):
        return super().forward(x[(x.sum(1) > 0).nonzero().flatten()])


class Block(nn.Module):
    def __init__(self, config, layer, mlp):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, 1e-6)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, 1e-6)
        self.self_attn, self.mlp = Attention.of(config, layer), mlp(config)

    def forward(self, x, positions, ctx):
        x = x + self.self_attn(self.input_layernorm(x), positions, ctx)
        return x + self.mlp(self.post_attention_layernorm(x))


class OwnArchitecture(LlamaArchitecture):
    family: str = f"{__name__}.Own"
    mlp: str = "MLP"


class Own(LlamaStyle[OwnArchitecture]):
    section = OwnArchitecture
    plan = replace(
        LlamaStyle.plan, column=tuple(each for each in LlamaStyle.plan.column if not each.endswith("gate_proj"))
    )

    def block(self, layer):
        return Block(self.config, layer, globals()[self.config.mlp])


def on_meta(config: Config) -> Decoder:
    with torch.device("meta"):
        return build(config.model)


def own(mlp: str) -> Decoder:
    plain = tiny_dict(Path())
    plain["model"]["model_config"] |= {"family": f"{__name__}.Own", "mlp": mlp}
    return on_meta(load(plain))


def checked(model: Decoder, plan: Plan, on_sequence_shards: bool, said: str | None) -> None:
    """`check_gradients` finds nothing, or says this (a pattern) in one line."""
    if said is None:
        check_gradients(model, plan, on_sequence_shards)
        return
    with pytest.raises(InputError, match=said) as error:
        check_gradients(model, plan, on_sequence_shards)
    assert len(str(error.value).splitlines()) == 1


WHOLE = r"^parallelism\.tp: model\.layers\.0\.mlp\.{}\.weight, or what comes of it, is whole"
APPLIED = rf"of {__name__}\.Own applies {{}} to all features of a layer that is split"


@pytest.mark.parametrize(
    ("mlp", "on_sequence_shards", "said"),
    [
        ("MLP", False, None),
        ("MLP", True, None),
        ("Outside", False, None),
        ("Outside", True, WHOLE.format("alpha")),  # it sees the rank's own tokens
        ("Inside", False, WHOLE.format("alpha")),
        ("Gated", False, WHOLE.format("gate")),
        ("Written", False, WHOLE.format("alpha")),
        ("Normed", False, APPLIED.format("rms_norm")),
        ("Halves", False, APPLIED.format("chunk")),
        ("Softmax", False, APPLIED.format("softmax")),
        ("OverTokens", False, None),
        ("Counting", False, rf"parallelism\.tp: expected 1: the forward pass of {__name__}\.Own"),
    ],
)
def test_what_the_plan_of_a_users_family_forgets(mlp: str, on_sequence_shards: bool, said: str | None) -> None:
    model = own(mlp)
    checked(model, model.plan, on_sequence_shards, said)


def test_a_weight_that_it_names_passes() -> None:
    model = own("Inside")
    check_gradients(model, replace(model.plan, per_head=(f"{LAYER}mlp.alpha",)), False)
    model = own("Outside")
    check_gradients(model, replace(model.plan, sequence=(*model.plan.sequence, f"{LAYER}mlp.alpha")), True)


@pytest.mark.parametrize(
    ("family", "field", "pattern", "on_sequence_shards"),
    [
        ("qwen3", "per_head", "self_attn.q_norm", False),
        ("olmo2", "column", "self_attn.k_norm", False),
        ("llama", "sequence", "input_layernorm", True),
        ("deepseek_v3", "column", "self_attn.k_rope_proj", False),
        ("deepseek_v3", "sequence", "self_attn.kv_a_layernorm", True),
        ("nano_with_value_embeddings", "column", "self_attn.value_gate", False),
        ("mamba", "inner_row", "mixer.x_proj", False),
        ("mamba2", "channels", "mixer.time_steps", False),
    ],
)
def test_what_would_miss_in_the_plans_here(family, field, pattern, on_sequence_shards, tmp_path):
    model = on_meta(problem_of_family(family).config("", tmp_path))
    rest = tuple(each for each in getattr(model.plan, field) if each != LAYER + pattern)
    assert len(rest) == len(getattr(model.plan, field)) - 1
    said = rf"parallelism\.tp: model\.layers\.\d\.{re.escape(pattern)}\."
    checked(model, replace(model.plan, **{field: rest}), on_sequence_shards, said)


@pytest.mark.cases(6)
@pytest.mark.parametrize("family", sorted({*built_in_names()} - {"llamoe"}))  # of mixtral and nano, with other names
@pytest.mark.parametrize("on_sequence_shards", [False, True])
def test_the_plans_here_are_complete(family: str, on_sequence_shards: bool, tmp_path: Path) -> None:
    model = on_meta(problem_of_family(family).config("", tmp_path))
    check_gradients(model, model.plan, on_sequence_shards)


def test_nothing_of_the_check_stays_in_the_model(tmp_path: Path) -> None:
    """RoPE keeps its table, and it has to be a real one."""
    model = on_meta(problem_of_family("llama").config("", tmp_path))
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    check_gradients(model, model.plan, False)
    assert not any(hooks)
    assert not model.model.rope._tables  # type: ignore[union-attr]
    assert all(parameter.is_meta for parameter in model.parameters())


ACTIVATION = r"^parallelism\.tp: model\.layers\.0\.mlp\.act_fn\.alpha_p, or what comes of it"


@pytest.mark.parametrize(("model_type", "said"), [("apertus", ACTIVATION), ("gemma2", None)])
def test_what_transformers_plan_leaves_out(model_type: str, said: str | None) -> None:
    shapes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    theirs = AutoConfig.for_model(model_type, **shapes, num_attention_heads=4, num_key_value_heads=2).to_dict()
    keys = {"family": HUGGING_FACE, "hf_config": theirs | {"architectures": None}, "blocks": None}
    config = HuggingFaceArchitecture.model_construct(**keys, vocab_size=64, num_hidden_layers=2, hidden_size=32)
    with torch.device("meta"):
        model = ForeignModel(config, HuggingFace(config))
    checked(model, model.plan, False, said)
