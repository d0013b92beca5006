"""Ranks that share sequences compute what one process computes: attention, gradients, and the whole small Llama."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kenotron.config.errors import InputError
from kenotron.kernels.attention import attention
from kenotron.models import Context, MicroBatch, initialize_model, materialize
from kenotron.models.decoder import Decoder
from kenotron.models.families.llama import LlamaArchitecture
from kenotron.parallel import context, ring
from kenotron.parallel.cp_schedule import ScoreBlock, contiguous, earlier_blocks, local_blocks, zigzag
from kenotron.parallel.mesh import build_mesh
from kenotron.parallel.ulysses import ulysses_attention
from support.plain_attention import numbers_of, plain_attention
from support.ranks import ROUNDING, run_ranks

METHODS = ("ring", "ulysses", "allgather")


def relative_error(a: torch.Tensor, b: torch.Tensor, where_zero: float = 1.0) -> float:
    """Norm of the difference over the norm of b; over `where_zero` where b is 0."""
    expected = b.double().norm().item()
    return (a.double() - b.double()).norm().item() / (expected if expected > 1e-9 else where_zero)


# Attention alone ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One call of attention on whole sequences; its numbers are drawn from `seed`."""

    ranks: int
    sequences: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    cu_seqlens: tuple[int, ...] | None
    scale: float | None
    seed: int
    dtype: torch.dtype = torch.float64

    def tensors(self) -> list[torch.Tensor]:
        """q, k, v and the output's gradient, ``[sequences, heads, length, head_dim]``."""
        generator = torch.Generator().manual_seed(self.seed)
        widths = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.sequences, self.length, width, self.head_dim) for width in widths]
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        strides_as_in_a_model = [x.to(self.dtype).transpose(1, 2) for x in drawn]
        if self.seed % 3:
            return strides_as_in_a_model
        return [x.mT.contiguous().mT for x in strides_as_in_a_model]


def draw(ranks: int, seed: int) -> Case:
    """A random case: shapes, heads, and document borders, some a token long, some across every chunk border."""
    generator = torch.Generator().manual_seed(1000 * ranks + seed)

    def pick(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=generator))]

    sequences, length = pick(1, 2, 3), 2 * ranks * pick(1, 2, 5, 8)
    heads, kv_heads = pick((4, 4), (4, 2), (4, 1), (8, 2), (12, 3), (12, 6))
    tokens = sequences * length
    count = pick(None, 0, 3, tokens // 3, tokens - 1)
    borders = None
    if count is not None:
        inner = torch.randperm(tokens - 1, generator=generator)[:count] + 1
        borders = tuple(sorted({0, tokens, *inner.tolist(), *range(0, tokens, length)}))
    return Case(ranks, sequences, length, heads, kv_heads, pick(4, 8, 16), borders, pick(None, 0.3), seed)


def formula(case: Case) -> list[torch.Tensor]:
    """out, dq, dk, dv in float64 on one process: the definition and autograd."""
    q, k, v, grad = (x.double() for x in case.tensors())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = plain_attention(*inputs, case.scale, numbers_of(case.cu_seqlens, case.sequences))
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def attention_rank(rank: int, method: str, case: Case) -> list[torch.Tensor]:
    chunks = context.local_chunks(case.length, case.ranks, rank, method)
    q, k, v, grad = (context.cut(x, chunks, 2) for x in case.tensors())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = context.attention_of(method)(q, k, v, dist.group.WORLD, case.cu_seqlens, case.scale)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def joined(parts: list[torch.Tensor], method: str, length: int, dim: int = 2) -> torch.Tensor:
    """What the ranks hold, put in the order of the sequence."""
    found: dict[int, torch.Tensor] = {}
    for rank, part in enumerate(parts):
        at = 0
        for begin, end in context.local_chunks(length, len(parts), rank, method):
            found[begin] = part.narrow(dim, at, end - begin)
            at += end - begin
    return torch.cat([found[begin] for begin in sorted(found)], dim)


def worst_error(method: str, case: Case) -> float:
    results = run_ranks(case.ranks, attention_rank, method, case)
    whole = [joined(list(parts), method, case.length) for parts in zip(*results)]
    assert all(bool(x.isfinite().all()) for x in whole)
    expected = formula(case)
    size = expected[0].norm().item()  # where no query sees anything but itself, dq and dk are 0
    return max(relative_error(a, b, size) for a, b in zip(whole, expected))


@pytest.mark.cases(3)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
def test_shared_attention_and_its_gradients_are_one_processs_for_random_shapes_and_documents(method, ranks):
    for seed in range(12):
        case = draw(ranks, seed)
        if method == "ulysses" and case.heads % ranks:
            case = replace(case, heads=12, kv_heads=case.kv_heads if 12 % case.kv_heads == 0 else 6)
        assert worst_error(method, case) < 1e-12, case
        single = replace(case, dtype=torch.float32)
        assert worst_error(method, single) < ROUNDING, single


@pytest.mark.parametrize("method", METHODS)
def test_without_a_group_each_method_is_attention_of_one_process(method: str) -> None:
    case = draw(1, 0)
    q, k, v, _ = case.tensors()
    found = context.attention_of(method)(q, k, v, None, case.cu_seqlens, case.scale)
    assert relative_error(found, formula(case)[0]) < 1e-12


def bytes_sent_rank(rank: int, method: str, case: Case) -> tuple[int, int]:
    """What this rank sends to others, forward and backward, counted where it is handed to torch.distributed."""
    sent = 0

    def counting(function: Callable[..., Any], at: int, others: float) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            sent += round(args[at].nbytes * others)
            return function(*args, **kwargs)

        return counted

    n = case.ranks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "send_on", counting(ring.send_on, 0, 1))
        patch.setattr(ring, "start_gather", counting(ring.start_gather, 0, n - 1))
        patch.setattr(ring, "start_reduce_scatter", counting(ring.start_reduce_scatter, 0, (n - 1) / n))
        patch.setattr(dist, "all_to_all_single", counting(dist.all_to_all_single, 1, (n - 1) / n))
        chunks = context.local_chunks(case.length, n, rank, method)
        q, k, v, grad = (context.cut(x, chunks, 2) for x in case.tensors())
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = context.attention_of(method)(q, k, v, dist.group.WORLD, case.cu_seqlens, case.scale)
        forward = sent
        torch.autograd.grad(out, inputs, grad)
        return forward, sent - forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_the_bytes_that_travel_are_those_of_the_documented_formula(method: str, dtype: torch.dtype) -> None:
    n, sequences, length, heads, kv_heads, head_dim = 4, 2, 64, 8, 2, 16
    case = Case(n, sequences, length, heads, kv_heads, head_dim, None, None, 0, dtype)
    a_head = sequences * length // n * head_dim  # numbers, of this rank's tokens
    kv, e = 2 * kv_heads * a_head, dtype.itemsize
    if method == "ulysses":  # q, k, v there and the output back; two key-value heads are sent as four
        expected = ((n - 1) * (2 * heads + 2 * n) * a_head * e // n,) * 2
    else:  # keys and values, twice; their gradients in fp32
        expected = (n - 1) * kv * e, (n - 1) * kv * (e + 4)
    assert run_ranks(n, bytes_sent_rank, method, case) == [expected] * n


def pairs(blocks: list[ScoreBlock]) -> int:
    """Scores that the blocks compute, of one head."""
    total = 0
    for t in blocks:
        queries, keys, rows = (s.stop - s.start for s in (t.q, t.k, t.rows))
        total += rows * (queries * (queries + 1) // 2 if t.causal else queries * keys)
    return total


@pytest.mark.parametrize("degree", [1, 2, 3, 8])
def test_zigzag_gives_every_rank_the_same_work_in_every_step_and_contiguous_parts_do_not(degree: int) -> None:
    length = 48 * degree
    for step in range(degree):
        found = set()
        for rank in range(degree):
            ours, theirs = zigzag(length, degree, rank), zigzag(length, degree, (rank - step) % degree)
            blocks = earlier_blocks(ours, theirs, 2, length, None)
            assert len(blocks) <= 1  # half a block, one call
            found.add(pairs(blocks) + (pairs(local_blocks(ours, 2, length, None)) if step == 0 else 0))
        assert len(found) == 1
    last = contiguous(length, degree, degree - 1)
    most = pairs(local_blocks(last, 1, length, None)) + pairs(earlier_blocks(last, ((0, length),), 1, length, None))
    even = length * (length + 1) / 2 / degree
    assert most / even == pytest.approx(2 - 1 / degree, rel=0.02)


def test_tiles_of_random_documents_cover_each_visible_pair_once() -> None:
    for seed in range(20):
        case = draw(3, seed)
        length, rows = case.length, case.sequences
        borders = case.cu_seqlens or tuple(range(0, rows * length + 1, length))
        visible = sum((end - begin) * (end - begin + 1) // 2 for begin, end in pairwise(borders))
        everyone = [zigzag(length, 3, rank) for rank in range(3)]
        found = [local_blocks(chunks, rows, length, case.cu_seqlens) for chunks in everyone]
        found += [earlier_blocks(*two, rows, length, case.cu_seqlens) for two in product(everyone, repeat=2)]
        assert sum(map(pairs, found)) == visible


def test_what_a_method_is_not_for_is_reported_by_its_key() -> None:
    with pytest.raises(InputError, match=r"context_parallel_method: state_passing: this model has attention"):
        context.attention_of("state_passing")()
    with pytest.raises(InputError, match=r"context_parallel_size: ring cuts a sequence into 4 chunks; .* found 10"):
        context.local_chunks(10, 2, 0, "ring")
    for message in run_ranks(2, too_few_heads_rank):
        assert message.startswith("parallelism.context_parallel_size: ulysses shares out the 3 query heads of a rank")


def too_few_heads_rank(rank: int) -> str:
    x = torch.zeros(1, 3, 4, 8)
    with pytest.raises(InputError) as error:
        ulysses_attention(x, x, x, dist.group.WORLD)
    return str(error.value)


# The whole model ----------------------------------------------------------------------------------

SEQUENCES, LENGTH, VOCAB = 3, 32, 50
DOCUMENTS = (0, 5, 6, 7, 30, 32, 64, 65, 96)  # of a token, across chunk borders, a whole sequence


@dataclass(frozen=True)
class Setting:
    """How the small Llama runs."""

    documents: bool = False
    recompute: bool = False
    compile_backend: str | None = None
    dtype: torch.dtype = torch.float32


def small_llama() -> Decoder:
    shapes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    shapes |= {"num_hidden_layers": 2, "vocab_size": VOCAB, "z_loss_enabled": True, "z_loss_coefficient": 0.01}
    with torch.device("meta"):
        return Decoder(LlamaArchitecture(**shapes))


def micro_batch(setting: Setting, seed: int = 0) -> MicroBatch:
    """Random tokens; some labels carry no loss, so that the ranks' shares of the loss differ."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(VOCAB, (2, SEQUENCES * LENGTH), generator=generator)
    labels[torch.rand(len(labels), generator=generator) < 0.3] = -100
    positions = torch.arange(LENGTH).repeat(SEQUENCES)
    borders = None
    if setting.documents:
        borders = tuple(sorted({*DOCUMENTS, seed % LENGTH}))
        positions = torch.cat([torch.arange(end - begin) for begin, end in pairwise(borders)])
    ids, scale = torch.arange(SEQUENCES), 1 / int((labels != -100).sum())
    return MicroBatch(tokens, labels, Context((SEQUENCES, LENGTH), positions, attention, borders, ids, scale))


def prepared(setting: Setting) -> Decoder:
    model = small_llama()
    model.set_recompute(setting.recompute)
    if setting.compile_backend is not None:
        for block in model.model.layers.values():
            block.compile(backend=setting.compile_backend)
    model.set_compute_dtype(setting.dtype)
    materialize(model, "cpu")
    initialize_model(model, std=0.08, scaling="NUM_LAYERS", seed=7)
    return model


def gradients(model: Decoder, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss, _ = model(batch.tokens, batch.ctx, batch.labels)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert all(grad is not None for grad in found.values())
    return loss.detach(), found


def model_rank(rank: int, ranks: int, method: str, setting: Setting) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients, summed over cp by hand."""
    mesh = build_mesh({"cp": ranks}, ranks, "cpu")
    batch = context.shard(micro_batch(setting), mesh, method)
    assert len(batch.tokens) == SEQUENCES * LENGTH // ranks
    loss, found = gradients(prepared(setting), batch)
    for tensor_ in (loss, *found.values()):
        dist.all_reduce(tensor_, group=mesh.group("cp"))
    return loss, found


def check_model(ranks: int, method: str, setting: Setting, tolerance: float = ROUNDING) -> None:
    loss, expected = gradients(prepared(replace(setting, recompute=False, compile_backend=None)), micro_batch(setting))
    for rank_loss, found in run_ranks(ranks, model_rank, ranks, method, setting):
        assert rank_loss.item() == pytest.approx(loss.item(), rel=tolerance)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            assert gradient.shape == expected[name].shape
            assert gradient.dtype == torch.float32
            assert relative_error(gradient, expected[name]) < tolerance, name


@pytest.mark.cases(6)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_models_loss_and_every_gradient_are_one_processs(method: str, documents: bool, ranks: int) -> None:
    check_model(ranks, method, Setting(documents))
    check_model(ranks, method, Setting(documents, dtype=torch.float64), tolerance=2e-7)  # the sum over cp is in fp32


def total_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of all parameters as one vector."""
    return relative_error(*(torch.cat([some[name].flatten() for name in expected]) for some in (found, expected)))


@pytest.mark.parametrize("method", METHODS)
def test_bf16_is_as_near_to_float64_as_one_processs_bf16(method: str) -> None:
    bf16 = Setting(documents=True, recompute=True, dtype=torch.bfloat16)
    exact_loss, exact = gradients(prepared(Setting(dtype=torch.float64)), micro_batch(bf16))
    _, alone = gradients(prepared(bf16), micro_batch(bf16))
    for loss, found in run_ranks(2, model_rank, 2, method, bf16):
        assert loss.item() == pytest.approx(exact_loss.item(), rel=1e-3)
        assert max(relative_error(found[name], exact[name]) for name in exact) < 3e-2
        assert total_error(found, exact) < 1.25 * total_error(alone, exact)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_compiled_blocks_mean_the_same(method: str, recompute: bool) -> None:
    check_model(2, method, Setting(documents=True, recompute=recompute, compile_backend="aot_eager"))


def compiled_graphs_rank(rank: int, method: str) -> list[int]:
    """Graphs that the compiler has made after each of four micro-batches with documents of their own."""
    mesh = build_mesh({"cp": 2}, 2, "cpu")
    setting = Setting(documents=True, compile_backend="aot_eager")
    model = prepared(setting)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counts = []
    for seed in range(10, 14):
        gradients(model, context.shard(micro_batch(setting, seed), mesh, method))
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_new_documents_compile_nothing_anew(method: str) -> None:
    for counts in run_ranks(2, compiled_graphs_rank, method):
        assert counts[0] > 0
        assert set(counts[1:]) == {counts[0]}, counts
