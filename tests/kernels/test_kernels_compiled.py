"""The kernels inside torch.compile: one graph, the same numbers, no recompilation for every batch's documents."""

from types import SimpleNamespace

import pytest
import torch
import torch._dynamo

from kenotron.kernels import products
from kenotron.kernels.attention import attention
from kenotron.kernels.rms_norm import rms_norm
from kenotron.kernels.rope import apply_rope
from kenotron.kernels.swiglu import swiglu

SEQUENCES, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 32, 4, 2, 16
HIDDEN = HEADS * HEAD_DIM


def block(x, weights, cos, sin, ctx):
    """A transformer block, as the models write it, without its output projections."""
    norm, wq, wk, wv, wg, wu = weights
    h = rms_norm(x, norm, 1e-5)
    q, k, v = ((h @ w.T).view(SEQUENCES, LENGTH, -1, HEAD_DIM) for w in (wq, wk, wv))
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    y = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), ctx)
    x = x + y.transpose(1, 2).flatten(2).flatten(0, 1)
    h = rms_norm(x, norm, 1e-5)
    return x + swiglu(h @ wg.T, h @ wu.T)


def arguments(dtype):
    torch.manual_seed(0)
    kv = KV_HEADS * HEAD_DIM
    shapes = [(HIDDEN,), (HIDDEN, HIDDEN), (kv, HIDDEN), (kv, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN)]
    weights = [(torch.randn(shape) * HIDDEN**-0.5).to(dtype).requires_grad_() for shape in shapes]
    x = torch.randn(SEQUENCES * LENGTH, HIDDEN).to(dtype).requires_grad_()
    turns = torch.arange(LENGTH)[:, None] * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = (table.expand(SEQUENCES, LENGTH, -1) for table in (turns.cos(), turns.sin()))
    return x, weights, cos, sin


def gradients(function, x, weights, cos, sin, ctx):
    out = function(x, weights, cos, sin, ctx)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, *weights])]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def difference(ours, theirs):
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(ours, theirs))


def test_the_explicit_backward_is_one_operator_in_the_compiled_graph(monkeypatch):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    monkeypatch.setattr(products, "EMULATED", False)
    targets = []

    def record(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    given = arguments(torch.bfloat16)
    compiled = torch.compile(block, backend=aot_autograd(fw_compiler=record, bw_compiler=record), fullgraph=True)
    ours = gradients(compiled, *given, SimpleNamespace(cu_seqlens=None))
    assert sum("kenotron.causal_attention_backward" in target for target in targets) == 1
    assert difference(ours, gradients(block, *given, SimpleNamespace(cu_seqlens=None))) < 2e-2


def test_new_document_borders_are_no_recompilation():
    from torch._dynamo.testing import CompileCounter

    given = arguments(torch.float32)
    counter = CompileCounter()
    compiled = torch.compile(block, backend=counter)
    compiled_once = None
    for border in range(3, 15):
        ctx = SimpleNamespace(cu_seqlens=(0, border, LENGTH, 2 * LENGTH - border, 2 * LENGTH))
        assert difference(gradients(compiled, *given, ctx), gradients(block, *given, ctx)) < 1e-5
        compiled_once = compiled_once or counter.frame_count
    assert counter.frame_count == compiled_once
