"""A model that reads across packed documents is refused whatever its first weights hide; one that does not is not."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig

from kenotron.config.decoder import RopeArchitecture
from kenotron.config.errors import InputError
from kenotron.interop.hf_config import architecture_from_hf
from kenotron.kernels.attention import attention
from kenotron.models import Context
from kenotron.models.blocks.attention import Attention
from kenotron.models.blocks.linear import Linear
from kenotron.models.blocks.norm import RMSNorm
from kenotron.models.blocks.rope import Rope
from kenotron.models.document_separation import check_blocks, check_documents, check_repeats
from kenotron.models.family import Family
from kenotron.models.foreign import HuggingFace, HuggingFaceArchitecture, UserModule, UserModuleArchitecture
from kenotron.models.plan import Plan
from support.families import FAMILIES, hf_model
from support.tiny_run import tiny_config, train_quietly

SHAPES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}  # whose row of the embedding is zero
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2}


class Base(nn.Module):
    """An embedding, `mixed` with what is before, a head."""

    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, 16)
        self.mix, self.out, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, vocab_size)
        self.layers = nn.ModuleList([self.mix, self.out])

    def forward(self, tokens, ctx):
        x = self.table(tokens)
        return self.head(x + self.mixed(x, ctx, tokens))

    def attended(self, x, ctx):
        q = self.mix(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return ctx.attention(q, q, q, ctx, 0).transpose(1, 2).flatten(2)


class Sums(Base):
    def mixed(self, x, ctx, tokens):
        return self.out(torch.tanh(self.mix(x)).cumsum(1))


class ZeroAtFirst(Sums):
    def __init__(self, vocab_size):
        super().__init__(vocab_size)
        nn.init.zeros_(self.out.weight), nn.init.zeros_(self.out.bias)


class Faint(Sums):
    def mixed(self, x, ctx, tokens):
        return x + 1e-5 * super().mixed(x, ctx, tokens)


class OnlyTheFirstToken(Base):
    def mixed(self, x, ctx, tokens):
        return self.out(self.mix(x[:, :1]) * x)


class CountedEnds(Base):
    def mixed(self, x, ctx, tokens):
        return self.out(x) * (tokens == 58).cumsum(1).unsqueeze(-1)


class CountedOnes(Base):
    def mixed(self, x, ctx, tokens):
        return self.out(x) * (tokens == 1).cumsum(1).unsqueeze(-1)


class FullExperts(Base):
    """An expert takes four tokens of a batch; the others pass it by."""

    def mixed(self, x, ctx, tokens):
        chosen = x[..., 0] > 0
        return self.out(x) * (chosen & (chosen.cumsum(1) <= 4)).unsqueeze(-1)


def attended_within(x, documents):
    """Causal attention among tokens of one number in documents ``[sequences or 1, length]``."""
    before = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    apart = (documents[:, :, None] != documents[:, None]) | ~before
    return (x @ x.transpose(1, 2)).masked_fill(apart, -1e9).softmax(-1) @ x


class InChunks(Base):
    """Attends within four tokens of a sequence, whatever document they are of."""

    def mixed(self, x, ctx, tokens):
        return self.out(attended_within(self.mix(x), torch.arange(x.shape[1])[None] // 4))


class ToTheFirstBorder(Base):
    """All documents but the first are one."""

    def mixed(self, x, ctx, tokens):
        numbers = (ctx.positions.view(tokens.shape) == 0).cumsum(1).clamp(max=2)
        return self.out(attended_within(self.mix(x), numbers))


class ByTheFirstRow(Base):
    def mixed(self, x, ctx, tokens):
        return self.out(attended_within(self.mix(x), (ctx.positions.view(tokens.shape)[:1] == 0).cumsum(1)))


class SeesTheNext(Base):
    def mixed(self, x, ctx, tokens):
        return self.out(self.mix(x).roll(-1, 1))


class Hidden(Base):
    """Its lookups are out of sight, so nothing is shown."""

    def forward(self, tokens, ctx):
        with torch.no_grad():
            x = self.table(tokens)
        return self.head(x)


class Apart(Base):
    def mixed(self, x, ctx, tokens):
        return self.out(self.attended(x, ctx))


class ApartOneHot(Apart):
    def forward(self, tokens, ctx):
        x = F.one_hot(tokens, self.table.num_embeddings).float() @ self.table.weight
        return self.head(x + self.mixed(x, ctx, tokens))


class ApartByIndex(Apart):
    def forward(self, tokens, ctx):
        x = self.table.weight[tokens.flatten()]
        x *= 2
        x = x.view(*tokens.shape, -1)
        return self.head(x + self.mixed(x, ctx, tokens))


class ApartTokenFirst(Apart):
    def forward(self, tokens, ctx):
        x = self.table(tokens.T).transpose(0, 1)
        return self.head(x + self.mixed(x, ctx, tokens))


class ApartByStarts(Base):
    def mixed(self, x, ctx, tokens):
        sums = [part.cumsum(0) for part in x.flatten(0, 1).tensor_split(ctx.document_starts[1:-1].long())]
        return self.out(torch.cat(sums).view_as(x).tanh())


class Counts(Base):
    """In a buffer and in attributes, which are put back."""

    def __init__(self, vocab_size):
        super().__init__(vocab_size)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.list = 0, []

    def mixed(self, x, ctx, tokens):
        self.seen += 1
        self.calls += 1
        self.list.append(1)
        return x * (self.seen + self.calls + len(self.list))


class InNumpy(Base):
    mean = np.zeros(16, np.float32)

    def mixed(self, x, ctx, tokens):
        self.mean += 0.1 * x.detach().mean((0, 1)).numpy()
        return self.out(x - torch.from_numpy(self.mean.copy()))


class InAClosure(Base):
    def __init__(self, vocab_size):
        super().__init__(vocab_size)
        kept = []
        self.count = lambda: (kept.append(1), len(kept))[1]

    def mixed(self, x, ctx, tokens):
        return x * self.count()


class Draws(Base):
    def __init__(self, vocab_size):
        super().__init__(vocab_size)
        self.layers = nn.ModuleList([nn.Linear(16, 16)])

    def mixed(self, x, ctx, tokens):
        return F.dropout(self.layers[0](x))


def check(family: HuggingFace | UserModule, length: int = 12) -> None:
    positions = torch.arange(length).repeat(3)
    check_documents(family, Context((3, length), positions, attention, cu_seqlens=(0, 3 * length)))


def of_transformers(model_type: str, **keys: Any) -> HuggingFace:
    config = AutoConfig.for_model(model_type, **SHAPES | keys).to_dict() | {"architectures": None}
    return HuggingFace(HuggingFaceArchitecture.model_construct(hf_config=config, vocab_size=61))


def of_user(name: str) -> UserModule:
    return UserModule(UserModuleArchitecture(module=f"{__name__}.{name}", vocab_size=61, eos_token_id=58))


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("jamba", EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        ("qwen3_next", EXPERTS | {"layer_types": ["linear_attention", "full_attention"]}),
        ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4}),
    ],
)
def test_models_of_transformers_that_do_not_separate_documents_are_refused(model_type, keys):
    with pytest.raises(InputError, match=f"transformers' {model_type} is not shown to keep") as error:
        check(of_transformers(model_type, **keys))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral", "qwen2_moe"])
def test_models_of_transformers_that_separate_them_pass(model_type: str) -> None:
    check(of_transformers(model_type, head_dim=8))


@pytest.mark.parametrize(
    "name",
    [
        *("Sums", "ZeroAtFirst", "Faint", "OnlyTheFirstToken", "CountedEnds"),
        *("CountedOnes", "FullExperts", "Hidden", "InChunks", "ToTheFirstBorder", "ByTheFirstRow"),
    ],
)
def test_a_module_that_is_not_shown_to_separate_them_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=rf"document_masking: {__name__}\.{name} is not shown to keep"):
        check(of_user(name))


@pytest.mark.parametrize("name", ["Apart", "ApartOneHot", "ApartByIndex", "ApartTokenFirst", "ApartByStarts"])
def test_a_module_that_separates_them_passes(name: str) -> None:
    check(of_user(name))
    check(of_user(name), length=300)  # longer than what the gradient is taken of


def test_the_check_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    check(of_user("Apart"))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "repeats"), [("Counts", True), ("InNumpy", True), ("InAClosure", False), ("Draws", False)]
)
def test_a_module_whose_logits_do_not_repeat_is_refused(name: str, repeats: bool) -> None:
    ctx = Context((1, 12), torch.arange(12), attention)
    said = rf"^model\.model_config: .*{__name__}\.{name}.* gives other logits when it reads"
    with nullcontext() if repeats else pytest.raises(InputError, match=said):
        check_repeats(of_user(name), ctx)


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    """They are its labels. transformers has BERT among its causal models, and makes it one only where asked."""
    ctx = Context((1, 12), torch.arange(12), attention)
    for family in (of_user("SeesTheNext"), of_transformers("bert")):
        with pytest.raises(InputError, match=r"^model\.model_config: .* is not shown to be causal: the gradient of"):
            check_repeats(family, ctx)
    for family in (of_user("Apart"), of_transformers("bert", is_decoder=True), of_transformers("gpt2")):
        check_repeats(family, ctx)


def test_a_run_of_such_a_module_is_refused_in_its_first_step(tmp_path: Path) -> None:
    keys = f"model.model_config={{module: {__name__}.Draws, vocab_size: 64}}", "model.init_method.scaling_method=NONE"
    with pytest.raises(
        InputError, match=rf"{__name__}\.Draws.* gives other logits when it reads the same tokens again"
    ):
        train_quietly(tiny_config(tmp_path, *keys))


@pytest.mark.parametrize("model_type", ["bamba", "falcon_h1"])
def test_infinite_bounds_in_a_config_are_read_as_transformers_writes_them(model_type: str) -> None:
    theirs = AutoConfig.for_model(model_type, time_step_limit=(0.0, float("inf")))
    written = json.loads(theirs.to_json_string(use_diff=False))
    assert written["time_step_limit"][1] == {"__float__": "Infinity"}
    read = HuggingFaceArchitecture.model_construct(hf_config=written).transformers_config()
    assert tuple(read.time_step_limit) == (0.0, float("inf"))


class Shifted(nn.Module):
    """Adds what the token before is made of, of another document too where `leaks`."""

    def __init__(self, config, layer, leaks):
        super().__init__()
        self.self_attn, self.mlp = Attention.of(config, layer), Linear(config.hidden_size, config.hidden_size)
        self.leaks = leaks

    def forward(self, x, rope, ctx):
        before = self.mlp(x).roll(1, 0)
        begins = torch.arange(len(x), device=x.device) % ctx.shape[1] == 0
        if not self.leaks and ctx.document_starts is not None:
            begins = ctx.positions == 0
        return x + self.self_attn(x, rope, ctx) + before.masked_fill(begins[:, None], 0.0)


class FamilyApart(Family[RopeArchitecture]):
    section, leaks = RopeArchitecture, False
    plan = Plan(blocks="model.layers.*", vocab=("model.embed_tokens", "lm_head"))

    def block(self, layer):
        return Shifted(self.config, layer, self.leaks and layer == 1)

    def final_norm(self):
        return RMSNorm(self.config.hidden_size, 1e-5)

    def positions(self):
        return Rope.of(self.config)


class Leaking(FamilyApart):
    leaks = True


class SumsOfChunks(Shifted):
    """Hands a sum on from chunk to chunk of eight tokens."""

    def forward(self, x, rope, ctx):
        if len(x) % 8 == 0:
            sums = x.unflatten(0, (-1, 8)).sum(1).cumsum(0)
            x = x + torch.cat((torch.zeros_like(sums[:1]), sums[:-1])).repeat_interleave(8, 0) / len(x)
        return super().forward(x, rope, ctx)


class OfTokens(Shifted):
    """Reads what the token before is."""

    def __init__(self, config, layer, leaks):
        super().__init__(config, layer, leaks)
        self.bigram = Linear(1, config.hidden_size)

    def forward(self, x, rope, ctx):
        return super().forward(x + self.bigram(ctx.tokens.roll(1)[:, None].to(x)), rope, ctx)


class LeakingInChunks(FamilyApart):
    def block(self, layer):
        return SumsOfChunks(self.config, layer, False)


class LeakingTokens(FamilyApart):
    def block(self, layer):
        return OfTokens(self.config, layer, False)


@pytest.mark.parametrize("which", FAMILIES)
def test_blocks_of_the_families_here_keep_documents_apart(which: str) -> None:
    check_blocks(architecture_from_hf(hf_model(which).config.to_dict(), "config.json"), 25)


def test_a_family_of_the_users_that_mixes_documents_is_refused(tmp_path: Path) -> None:
    def run(name: str, masked: bool) -> None:
        keys = f"model.document_masking={str(masked).lower()}", "tokens.train_steps=1"
        train_quietly(tiny_config(tmp_path / name, f"model.model_config.family={__name__}.{name}", *keys))

    run("FamilyApart", masked=True)
    run("Leaking", masked=False)
    for name, layer in (("Leaking", 1), ("LeakingInChunks", 0), ("LeakingTokens", 0)):
        said = rf"^model\.document_masking: layer {layer} of {__name__}\.{name} does not keep the documents"
        with pytest.raises(InputError, match=said):
            run(name, masked=True)
