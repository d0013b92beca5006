"""Tensor and sequence parallelism mean what one process means: every gradient, every way."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from kenotron.config.errors import InputError
from kenotron.kernels.attention import attention
from kenotron.models import Context, Plan, flops_per_token, initialize_model, materialize
from kenotron.models.decoder import Decoder
from kenotron.models.families.llama import LlamaArchitecture
from kenotron.optim.clip import clip_gradients
from kenotron.parallel import data, tensor
from kenotron.parallel.collectives import unshard_tokens
from kenotron.parallel.mesh import build_mesh
from kenotron.parallel.shards import shard_of
from kenotron.planner.ledger import Ledger
from support.autograd_bytes import bytes_saved
from support.data_parallel_run import Collectives
from support.ranks import ROUNDING, relative_error, run_ranks

SEQUENCES, LENGTH = 4, 16
TOKENS = SEQUENCES * LENGTH
BORDERS = ((0, 5, 16, 27, 32), (0, 16, 18, 31, 32))  # documents of the two micro-batches


@dataclass(frozen=True)
class Case:
    mode: str = "ALL_REDUCE"
    asynchronous: bool = False
    regather: bool = True
    tied: bool = False
    heads: int = 4
    kv_heads: int = 4
    bias: bool = False
    z_loss: bool = False
    documents: bool = False
    vocab: int = 64
    vocab_multiple: int = 4
    recompute: bool = False
    compiled: str | None = None  # the compiler's backend
    zero_stage: int = 0
    layout: tuple[tuple[str, int], ...] = (("tp", 2),)
    dtype: torch.dtype = torch.float32

    def model(self) -> Decoder:
        keys = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": self.vocab}
        keys |= {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "attention_bias": self.bias}
        keys |= {"tie_word_embeddings": self.tied, "z_loss_enabled": self.z_loss, "z_loss_coefficient": 0.01}
        with torch.device("meta"):
            model = Decoder(LlamaArchitecture(**keys), self.vocab_multiple)
        model.set_compute_dtype(self.dtype)
        model.set_recompute(self.recompute)
        return model


MODES = [
    {"mode": "ALL_REDUCE"},
    {"mode": "ALL_REDUCE", "asynchronous": True},
    {"mode": "REDUCE_SCATTER"},
    {"mode": "REDUCE_SCATTER", "regather": False},
    {"mode": "REDUCE_SCATTER", "asynchronous": True},
    {"mode": "REDUCE_SCATTER", "asynchronous": True, "regather": False},
]
BOTH_MODES = ("ALL_REDUCE", "REDUCE_SCATTER")
MODELS = [
    {},
    {"tied": True, "kv_heads": 2, "documents": True},
    {"kv_heads": 1, "bias": True, "z_loss": True, "vocab": 51},
    {"tied": True, "heads": 8, "kv_heads": 2, "bias": True, "z_loss": True, "documents": True, "recompute": True},
    {"tied": True, "vocab": 50, "vocab_multiple": 256, "z_loss": True},  # some ranks hold nothing but padding
]


def name(options: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in options.items()) or "plain"


def fill(model: Decoder) -> Decoder:
    materialize(model, "cpu")
    initialize_model(model, std=0.1, scaling="NUM_LAYERS", seed=7, shard_of=shard_of)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(".bias"):  # zeros would hide a bias that is added twice
            shard = shard_of(parameter)
            flat = torch.linspace(-0.1, 0.1, shard.shape[0])
            with torch.no_grad():
                shard.tensor.copy_(flat[shard.offset[0] : shard.offset[0] + len(shard.tensor)])
    return model


def micro_batch(case: Case, number: int, dp_rank: int = 0, dp: int = 1) -> tuple[torch.Tensor, torch.Tensor, Context]:
    """Micro-batch `number` of two: two sequences, or under data parallelism this rank's of them."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(case.vocab, (SEQUENCES // 2, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, 3] = -100
    mine = slice(dp_rank * len(tokens) // dp, (dp_rank + 1) * len(tokens) // dp)
    first, last = mine.start * LENGTH, mine.stop * LENGTH
    borders = tuple(border - first for border in BORDERS[number] if first <= border <= last)
    positions, documents = torch.arange(LENGTH).repeat(len(tokens[mine])), borders if case.documents else None
    ctx = Context((len(tokens[mine]), LENGTH), positions, attention, cu_seqlens=documents, loss_scale=1 / TOKENS)
    return tokens[mine, :-1].reshape(-1), labels[mine].reshape(-1), ctx


@dataclass
class Outcome:
    loss: float
    z_loss: float
    gradients: dict[str, torch.Tensor]
    grad_norm: float


def gradients_of(model: Decoder) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}


def step(case: Case, model: Decoder, mesh: Any = None) -> Outcome:
    dp_rank, dp = (0, 1) if mesh is None else (mesh.rank("batch"), mesh.degree("batch"))
    total = torch.zeros(2)
    for number in range(2):
        data.set_last_micro_batch(model, last=number == 1)
        tokens, labels, ctx = micro_batch(case, number, dp_rank, dp)
        loss, z_loss = model(tokens, ctx, labels)
        loss.backward()
        total += torch.stack((loss.detach(), z_loss))
    data.finish_gradients(model)
    gradients = gradients_of(model)
    norm = clip_gradients(model.parameters(), None, mesh)
    return Outcome(total[0].item(), total[1].item(), gradients, norm.item())


def one_process(case: Case) -> Outcome:
    return step(case, fill(replace(case, recompute=False).model()))


def split_model(case: Case) -> tuple[Decoder, Any]:
    mesh = build_mesh(dict(case.layout), torch.distributed.get_world_size(), "cpu")
    model = case.model()
    how = {"mode": case.mode, "asynchronous": case.asynchronous, "recompute_allgather": case.regather}
    tensor.apply(model, model.plan, mesh, **how)
    blocks = list(model.model.layers.values())
    if case.compiled:
        torch._dynamo.reset()
        for block in blocks:
            block.compile(backend=case.compiled, fullgraph=True)
    data.apply(model, blocks, mesh, zero_stage=case.zero_stage, compute_dtype=case.dtype)
    return fill(model), mesh


def split_rank(rank: int, case: Case) -> Outcome:
    model, mesh = split_model(case)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return step(case, model, mesh)


def check(case: Case, gradient_limit: float = ROUNDING, loss_limit: float = ROUNDING) -> None:
    expected = one_process(case)
    outcomes = run_ranks(2 if case.layout == (("tp", 2),) else 4, split_rank, case)
    dp = dict(case.layout).get("dp_shard", 1)
    tp = dict(case.layout)["tp"]
    loss, z_loss = (sum(getattr(o, key) for o in outcomes) / tp for key in ("loss", "z_loss"))
    assert loss == pytest.approx(expected.loss, rel=loss_limit)
    assert z_loss == pytest.approx(expected.z_loss, rel=loss_limit)
    for outcome in outcomes:
        if dp == 1:
            assert outcome.loss == pytest.approx(expected.loss, rel=loss_limit)
        assert outcome.grad_norm == pytest.approx(expected.grad_norm, rel=10 * loss_limit)
        assert outcome.gradients.keys() == expected.gradients.keys()
        for parameter, gradient in outcome.gradients.items():
            assert gradient.dtype == torch.float32
            # softmax ignores what all keys share: this gradient is the small remainder of terms that cancel
            limit = 10 * gradient_limit if parameter.endswith("k_proj.bias") else gradient_limit
            assert relative_error(gradient, expected.gradients[parameter]) < limit, parameter


@pytest.mark.cases(15)
@pytest.mark.parametrize("options", MODELS, ids=name)
@pytest.mark.parametrize("how", MODES, ids=name)
def test_gradients_of_every_parameter_are_those_of_one_process(how: dict[str, Any], options: dict[str, Any]) -> None:
    check(Case(**how, **options))


WITH_DATA = {"asynchronous": True, "layout": (("dp_shard", 2), ("tp", 2))}
COMPILED = [how | {"kv_heads": 1, "bias": True, "z_loss": True, "recompute": "asynchronous" in how} for how in MODES]
COMPILED += [{"mode": mode, **WITH_DATA, "zero_stage": 3, "recompute": True} for mode in BOTH_MODES]
COMPILED += [{"mode": mode, "asynchronous": True, "compiled": "inductor"} for mode in BOTH_MODES]


@pytest.mark.slow
@pytest.mark.parametrize("options", COMPILED, ids=name)
def test_blocks_compile_without_a_graph_break_and_have_one_process_gradients(options: dict[str, Any]) -> None:
    check(Case(**{"compiled": "aot_eager"} | options))


@pytest.mark.cases(3)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", BOTH_MODES)
@pytest.mark.parametrize("options", [MODELS[2], MODELS[3]], ids=name)
def test_sharded_over_data_parallel_ranks_too_it_is_still_one_process(mode, zero_stage, options):
    check(Case(mode=mode, zero_stage=zero_stage, **WITH_DATA, **options))


@pytest.mark.parametrize("mode", BOTH_MODES)
def test_in_bf16_it_is_one_process_up_to_bf16(mode: str) -> None:
    check(Case(mode=mode, asynchronous=True, dtype=torch.bfloat16), gradient_limit=2e-2, loss_limit=1e-3)


# What travels --------------------------------------------------------------------------------------


def counting_rank(rank: int, case: Case) -> list[dict[str, int]]:
    """Collectives of two blocks, forward and backward."""
    model, mesh = split_model(case)
    _, _, ctx = micro_batch(case, 0)
    tokens = ctx.positions.numel() // (mesh.degree("tp") if case.mode == "REDUCE_SCATTER" else 1)
    x = torch.randn(tokens, 32, requires_grad=True)
    rope = model.model.rope(ctx.positions.view(ctx.shape))
    with Collectives() as forward:
        y = x
        for block in model.model.layers.values():
            y = block(y, rope, ctx)
    with Collectives() as backward:
        y.sum().backward()
    return [dict(Counter(name.rstrip("_") for name in each.names)) for each in (forward, backward)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_layer_sums_twice_forward_and_twice_backward(asynchronous: bool) -> None:
    for forward, backward in run_ranks(2, counting_rank, Case(asynchronous=asynchronous, bias=True)):
        assert forward == backward == {"all_reduce": 4}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("regather", [False, True])
def test_a_layer_on_token_shards_gathers_and_scatters_twice(asynchronous: bool, regather: bool) -> None:
    case = Case(mode="REDUCE_SCATTER", asynchronous=asynchronous, regather=regather)
    for forward, backward in run_ranks(2, counting_rank, case):
        # on CPU a reduce-scatter is an exchange of summands, which each rank adds up
        assert forward == {"all_gather_into_tensor": 4, "all_to_all_single": 4}
        assert backward == {"all_gather_into_tensor": 8 if regather else 4, "all_to_all_single": 4}


def saved_rank(rank: int, case: Case) -> int:
    """Numbers that a block keeps for backward, weights aside."""
    model, mesh = split_model(case)
    _, _, ctx = micro_batch(case, 0)
    rope = model.model.rope(ctx.positions.view(ctx.shape))
    x = torch.randn(ctx.positions.numel() // mesh.degree("tp"), 32, requires_grad=True)
    block = model.model.layers["0"]
    weights = (parameter.to_local() for parameter in block.parameters())  # type: ignore[attr-defined]
    return bytes_saved(lambda *_: block(x, rope, ctx), x, *weights) // 4


def test_gathering_again_keeps_two_whole_inputs_less_a_layer() -> None:
    whole, shard = (run_ranks(2, saved_rank, Case(mode="REDUCE_SCATTER", regather=again))[0] for again in (False, True))
    tokens = TOKENS // 2
    # the two norms' outputs: whole before, now the rank's tokens, which were not kept before
    assert whole - shard == 2 * 32 * tokens - 2 * 32 * tokens // 2


def largest_rank(rank: int, case: Case) -> int:
    """Bytes of the largest tensor that is made in a step."""
    model, _ = split_model(case)
    tokens, labels, ctx = micro_batch(case, 0)
    with Ledger() as ledger:
        model(tokens, ctx, labels)[0].backward()
    return max(storage.size for storage in ledger.storages)


@pytest.mark.parametrize("mode", BOTH_MODES)
def test_in_training_no_rank_holds_whole_logits(mode: str) -> None:
    case = Case(mode=mode, vocab=4096)
    assert max(run_ranks(2, largest_rank, case)) == TOKENS // 2 * 4096 // 2 * 4


# Logits, parts, other people's modules ------------------------------------------------------------


class Classifier(nn.Module):
    """A module of nobody's family, with torch's own layers and weights that it has already."""

    plan = Plan(blocks="", column=("up",), row=("down",), vocab=("embed",), sequence=("norm",))

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(20, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.temperature = nn.Bilinear(8, 8, 1)  # named by no pattern: whole weights on whole activations
        nn.init.normal_(self.norm.weight)

    def forward(self, tokens: torch.Tensor, gather: Any = lambda x: x) -> torch.Tensor:
        x = self.embed(tokens)
        y = gather(x + self.down(self.up(self.norm(x)).tanh()))
        return self.temperature(y, y).square().sum()


def classifier_rank(rank: int, mode: str) -> tuple[float, dict[str, torch.Tensor]]:
    mesh = build_mesh({"tp": 2}, 2, "cpu")
    model = Classifier()
    tensor.apply(model, model.plan, mesh, mode=mode, asynchronous=True)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Classifier().named_parameters()]
    loss = model(torch.arange(20), lambda x: unshard_tokens(x, mesh.group("tp")) if mode == "REDUCE_SCATTER" else x)
    loss.backward()
    return loss.item(), gradients_of(model)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", BOTH_MODES)
def test_a_module_of_ones_own_is_split_by_a_plan_of_ones_own(mode: str) -> None:
    model = Classifier()
    expected = model(torch.arange(20))
    expected.backward()
    for loss, gradients in run_ranks(2, classifier_rank, mode):
        assert loss == pytest.approx(expected.item(), rel=ROUNDING)
        for parameter, gradient in gradients_of(model).items():  # type: ignore[arg-type]
            assert relative_error(gradients[parameter], gradient) < ROUNDING, parameter


def counted_flops(rank: int, case: Case) -> float:
    model, _ = split_model(case)
    return flops_per_token(model, LENGTH, causal=True)


@pytest.mark.parametrize("options", MODELS[3:], ids=name)
def test_flops_count_the_logical_matrices(options: dict[str, Any]) -> None:
    case = Case(**options)
    assert run_ranks(2, counted_flops, case) == [flops_per_token(case.model(), LENGTH, causal=True)] * 2


# Errors --------------------------------------------------------------------------------------------


def refused(rank: int, given: list[tuple[nn.Module, Plan]]) -> list[str]:
    mesh, said = build_mesh({"tp": 2}, 2, "cpu"), []
    for module, plan in given:
        with pytest.raises(InputError) as error:
            tensor.apply(module, plan, mesh)
        said.append(str(error.value))
    return said


class Heads(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.head_dim = 4
        self.q_proj = nn.Linear(8, heads * 4)


def test_what_cannot_be_split_is_refused_in_one_line() -> None:
    embedding = nn.Embedding(8, 2, padding_idx=0)
    cases = [
        (Heads(3), Plan("", column=("q_proj",)), "q_proj: expected a divisor of its 3 heads, found 2"),
        (Heads(3), Plan("", column=("q_proj",), kv=("q_proj",)), "q_proj: expected a divisor of its 3 heads, found 2"),
        (nn.Sequential(nn.Linear(5, 2)), Plan("", row=("0",)), "0: expected a divisor of its 5 columns, found 2"),
        (nn.Sequential(nn.Linear(2, 5)), Plan("", column=("0",)), "0: expected a divisor of its 5 rows, found 2"),
        (nn.Sequential(nn.Embedding(7, 2)), Plan("", vocab=("0",)), "0: expected a divisor of its 7 rows, found 2"),
        (nn.Sequential(nn.Linear(2, 8)), Plan("", vocab=("0",)), "expected an embedding"),
        (nn.Sequential(embedding), Plan("", vocab=("0",)), "expected an embedding without"),
        (nn.MultiheadAttention(8, 2), Plan(""), "MultiheadAttention holds parameters (in_proj_weight, in_proj_bias)"),
    ]
    for errors in run_ranks(2, refused, [(module, plan) for module, plan, _ in cases]):
        for error, (_, _, message) in zip(errors, cases, strict=True):
            assert message in error
            assert "\n" not in error


def uneven_rank(rank: int) -> str:
    model, _ = split_model(Case(mode="REDUCE_SCATTER"))
    with pytest.raises(InputError) as error:
        model(torch.arange(7), Context((1, 7), torch.arange(7), attention), torch.arange(7))
    return str(error.value)


def test_tokens_that_cannot_be_shared_out_are_refused() -> None:
    assert all("expected a multiple of tp 2 tokens, found 7" in error for error in run_ranks(2, uneven_rank))


def bad_token_rank(rank: int) -> list[str]:
    model, _ = split_model(Case(vocab=51))
    tokens, labels, ctx = micro_batch(Case(vocab=51), 0)
    messages = []
    for wrong_tokens, wrong_labels in ((tokens.index_fill(0, torch.tensor(3), 52), labels), (tokens, labels + 30)):
        with pytest.raises(RuntimeError) as error:
            model(wrong_tokens, ctx, wrong_labels)
        messages.append(str(error.value))
    return messages


def test_a_token_or_label_that_no_rank_has_is_an_error() -> None:
    for token, label in run_ranks(2, bad_token_rank):
        assert "a token outside the vocabulary" in token
        assert "a label outside the vocabulary" in label
