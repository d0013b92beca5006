"""Loss and both gradients against the formula in float64: chunks, padding rows, ignored labels, z-loss, dtypes."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kenotron.kernels import linear_cross_entropy as kernel
from kenotron.kernels import products
from kenotron.kernels.linear_cross_entropy import VocabularyRanks, linear_cross_entropy

RISING = torch.linspace(0.0, 1.0, 57)  # a weight for each token of `problem`
LIMITS = {torch.float32: (1e-6, 2e-6), torch.bfloat16: (2e-3, 8e-3)}  # relative: loss, gradients


def formula(hidden, weight, labels, scale, z_loss, valid_rows, softcap=None, token_weights=None):
    """``scale * sum (lse - logit[label] + z lse**2)`` written out, and its z part."""
    logits = (hidden @ weight.T)[:, :valid_rows]
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    real = labels != -100
    lse = logits.logsumexp(-1)[real]
    weights = 1.0 if token_weights is None else token_weights[real].double()
    z_part = scale * z_loss * (weights * lse**2).sum()
    return scale * (weights * (lse - logits[real, labels[real]])).sum() + z_part, z_part


def problem(tokens=57, hidden=24, rows=72, valid=65, dtype=torch.float32, ignored=7):
    torch.manual_seed(1)
    x = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    w = (torch.randn(rows, hidden) * 0.5).to(dtype).requires_grad_()
    labels = torch.randint(0, valid, (tokens,))
    if ignored:
        labels[::ignored] = -100
    return x, w, labels


def check(x, w, labels, valid, upstream=0.37, **options):
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    more = options.get("z_loss", 0.0), valid, options.get("softcap"), options.get("token_weights")
    expected, expected_z = formula(*exact, labels, options["scale"], *more)
    (expected * upstream).backward()
    x.grad = w.grad = None
    loss, z_part = linear_cross_entropy(x, w, labels, valid_rows=valid, **options)
    (loss * upstream).backward()
    loss_limit, gradient_limit = LIMITS[x.dtype]
    assert loss.dtype == z_part.dtype == torch.float32
    assert not z_part.requires_grad
    assert abs(float(loss.detach()) - float(expected.detach())) <= loss_limit * abs(float(expected.detach()))
    assert abs(float(z_part) - float(expected_z.detach())) <= loss_limit * abs(float(expected_z.detach()))
    for ours, reference in ((x.grad, exact[0].grad), (w.grad, exact[1].grad)):
        assert ours.dtype == x.dtype
        assert float((ours.double() - reference).norm()) <= gradient_limit * float(reference.norm())
    assert w.grad[valid:].abs().sum() == 0


@pytest.mark.parametrize(
    ("dtype", "emulated"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
@pytest.mark.parametrize(
    "options",
    [{}, *({"z_loss": 1e-2} | more for more in ({}, {"softcap": 1.5}, {"softcap": 15.0}, {"token_weights": RISING}))],
    ids=lambda options: " ".join(options) or "plain",
)
@pytest.mark.parametrize("chunk_tokens", [None, 1, 10, 19, 57, 1000])
def test_loss_and_gradients_equal_float64(dtype, emulated, options, chunk_tokens, monkeypatch):
    monkeypatch.setattr(products, "EMULATED", emulated)  # bf16 by a CPU without a fast instruction for it
    chunk_bytes = None if chunk_tokens is None else chunk_tokens * 4 * 72
    check(*problem(dtype=dtype), 65, scale=0.02, chunk_bytes=chunk_bytes, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_paths_for_one_and_for_several_threads_agree(dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(*problem(300, 32, 2100, 2050, dtype), 2050, scale=0.01, z_loss=1e-3)
        check(*problem(300, 32, 2100, 2050, dtype), 2050, scale=0.01, z_loss=1e-3, chunk_bytes=4 * 2100 * 70)
    finally:
        torch.set_num_threads(before)


@given(st.integers(1, 40), st.integers(1, 20), st.integers(2, 50), st.integers(0, 9), st.integers(1, 50), st.booleans())
def test_any_shape_padding_and_chunking(tokens, hidden, valid, padding, chunk, with_z):
    x, w, labels = problem(tokens, hidden, valid + padding, valid, ignored=3)
    options = {"z_loss": 0.1 * with_z, "valid_rows": valid, "chunk_bytes": chunk * 4 * (valid + padding)}
    loss, z_part = linear_cross_entropy(x, w, labels, scale=0.5, **options)
    loss.backward()
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    expected, expected_z = formula(*exact, labels, 0.5, 0.1 * with_z, valid)
    expected.backward()
    torch.testing.assert_close(loss.detach().double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(z_part.double(), expected_z.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), exact[0].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(w.grad.double(), exact[1].grad, rtol=1e-4, atol=1e-5)


def test_very_large_logits_stay_finite():
    x, w, labels = problem()
    check((x.detach() * 1e4).requires_grad_(), w, labels, 65, scale=0.02)


@pytest.fixture
def made(monkeypatch):
    """Where the gradients of hidden and weight of each call are in memory; None for one that is not computed."""
    whole, made = kernel._loss_and_gradients, []

    def spy(*arguments):
        result = whole(*arguments)
        made.append([None if gradient is None else gradient.data_ptr() for gradient in result[2:]])
        return result

    monkeypatch.setattr(kernel, "_loss_and_gradients", spy)
    return made


@pytest.mark.parametrize(("needs_hidden", "needs_weight"), list(itertools.product([True, False], repeat=2)))
def test_only_gradients_that_are_needed_are_made(needs_hidden, needs_weight, made):
    x, w, labels = problem()
    x.requires_grad_(needs_hidden)
    w.requires_grad_(needs_weight)
    loss, _ = linear_cross_entropy(x, w, labels, scale=1.0)
    with torch.no_grad():
        evaluated, _ = linear_cross_entropy(x, w, labels, scale=1.0)
    assert [[each is not None for each in both] for both in made] == [[needs_hidden, needs_weight], [False, False]]
    assert float(loss.detach()) == float(evaluated)
    if loss.requires_grad:
        loss.backward()
    assert (x.grad is not None) == needs_hidden
    assert (w.grad is not None) == needs_weight


def test_a_label_outside_the_vocabulary_is_an_error():
    x, w, labels = problem()
    labels[5] = 70  # a padding row
    with pytest.raises(IndexError):
        linear_cross_entropy(x, w, labels, scale=1.0, valid_rows=65)


def test_gradients_are_handed_over_without_a_copy(made):
    x, w, labels = problem()
    linear_cross_entropy(x, w, labels, scale=1.0)[0].backward()
    assert [[x.grad.data_ptr(), w.grad.data_ptr()]] == made


@pytest.mark.parametrize("chunk_bytes", [None, 4 * 72 * 10])
def test_the_gradient_of_fp32_weights_sums_chunks_without_a_rounding_to_bf16(chunk_bytes):
    x, low, labels = problem(dtype=torch.bfloat16)
    master = low.detach().float().requires_grad_()
    for w in (low, master):
        linear_cross_entropy(x, w, labels, scale=0.5, chunk_bytes=chunk_bytes)[0].backward()
    assert master.grad.dtype == torch.float32
    assert torch.equal(master.grad.bfloat16(), low.grad)
    assert torch.equal(master.grad, low.grad.float()) == (chunk_bytes is None)  # a CPU rounds each product


def test_no_tensor_of_all_logits_in_fp32_is_ever_made(monkeypatch):
    monkeypatch.setattr(products, "EMULATED", False)
    tokens, rows = 512, 4096
    x, w, labels = problem(tokens, 16, rows, rows, torch.bfloat16)
    with torch.profiler.profile(profile_memory=True) as profile:
        linear_cross_entropy(x, w, labels, scale=1.0)[0].backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest <= tokens * rows * 2 + 4096


# Ranks that share the vocabulary: threads here, which meet where ranks would -----------------------


class Meeting:
    """What `count` threads hand to a collective, one after the other."""

    def __init__(self, count: int) -> None:
        self.barrier, self.parts, self.met = Barrier(count, timeout=30), [None] * count, 0

    def combine(self, rank, tensor, how):
        self.parts[rank] = tensor.clone()
        self.barrier.wait()
        tensor.copy_(how(torch.stack(self.parts)))
        self.met += rank == 0
        self.barrier.wait()
        return tensor


def on_ranks(count, x, w, labels, valid, **options):
    """[(loss, z, gradient of hidden, gradient of its rows)] of every rank, and how often they met."""
    meeting = Meeting(count)
    rows = len(w) // count

    def rank_work(rank):
        own_x, own_w = x.detach().requires_grad_(), w.detach()[rank * rows : (rank + 1) * rows].requires_grad_()
        ranks = VocabularyRanks(
            rank * rows,
            lambda t: meeting.combine(rank, t, lambda parts: parts.amax(0)),
            lambda t: meeting.combine(rank, t, lambda parts: parts.sum(0)),
        )
        loss, z_part = linear_cross_entropy(own_x, own_w, labels, valid_rows=valid, ranks=ranks, **options)
        loss.backward()
        return loss.detach(), z_part, own_x.grad, own_w.grad

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(rank_work, range(count))), meeting.met


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("z_loss", "softcap"), [(0.0, None), (1e-2, None), (1e-2, 1.5)])
@pytest.mark.parametrize("valid", [72, 65, 50, 13])  # of 72 rows: at 50 the last of 4 ranks has padding only
def test_ranks_that_share_the_vocabulary_get_the_formula_in_float64(dtype, count, z_loss, softcap, valid):
    x, w, labels = problem(valid=valid, dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    expected, expected_z = formula(*exact, labels, 0.02, z_loss, valid, softcap)
    expected.backward()
    loss_limit, gradient_limit = LIMITS[dtype]
    options = {"scale": 0.02, "z_loss": z_loss, "softcap": softcap, "chunk_bytes": 4 * 19 * (72 // count)}
    results, met = on_ranks(count, x, w, labels, valid, **options)
    assert met == 2 * 3  # twice a chunk
    for loss, z_part, *_ in results:
        assert float(loss) == pytest.approx(float(expected), rel=loss_limit)
        assert float(z_part) == pytest.approx(float(expected_z), rel=2 * loss_limit)
    summed = sum(r[2].double() for r in results)
    whole = torch.cat([r[3] for r in results]).double()
    for ours, reference in ((summed, exact[0].grad), (whole, exact[1].grad)):
        assert float((ours - reference).norm()) <= gradient_limit * float(reference.norm())
    assert whole[valid:].abs().sum() == 0


def test_labels_on_a_rank_far_below_the_largest_logit_keep_their_gradient():
    x, w, labels = problem(valid=72)
    w = w.detach() * torch.tensor([1.0, 400.0]).repeat_interleave(36)[:, None]  # exp of the difference underflows
    results, _ = on_ranks(2, x, w, labels, 72, scale=0.02)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    expected, _ = formula(*exact, labels, 0.02, 0.0, 72)
    expected.backward()
    assert float(results[0][0]) == pytest.approx(float(expected), rel=1e-6)
    summed, whole = results[0][2] + results[1][2], torch.cat([r[3] for r in results])
    for ours, reference in ((summed, exact[0].grad), (whole, exact[1].grad)):
        assert float((ours.double() - reference).norm()) <= 1e-5 * float(reference.norm())


@pytest.mark.parametrize("label", [65, -1])
def test_a_label_that_no_rank_has_is_an_error(label):
    x, w, labels = problem()
    labels[5] = label
    with pytest.raises(RuntimeError, match="a label outside the vocabulary"):
        on_ranks(2, x, w, labels, 65, scale=1.0)


@pytest.mark.parametrize(("rows", "expected"), [(128256, 2048), (32000, 8192), (256000, 1024), (2_000_000, 256)])
def test_chunks_on_a_gpu_are_whole_tiles_of_its_products(rows, expected):
    hidden = torch.empty(1, 8, dtype=torch.bfloat16, device="meta")
    assert kernel._tokens_in_chunk(hidden, rows, None) == expected
