"""Layers of one kind share their compiled code, however many there are: no number of theirs is guarded on."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from kenotron.kernels.attention import attention
from kenotron.models import Context
from kenotron.models.blocks.attention import Attention
from kenotron.models.blocks.latent_attention import LatentAttention
from kenotron.parallel.context import shared_attention

LAYERS = 12
LATENT = {"q_rank": 4, "kv_rank": 4, "still": 4, "turning": 4, "v_dim": 4, "bias": False, "rope_interleaved": False}
KINDS: dict[str, Callable[[], nn.Module]] = {
    "heads": partial(Attention, 16, 2, 2, 8),
    "window": partial(Attention, 16, 2, 2, 8, window=3),
    "latent": partial(LatentAttention, 16, 2, scale=0.5, **LATENT),
}


@pytest.mark.cases(2)
@pytest.mark.budget(20, reason="Dynamo traces twelve layers")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["documents", "over_ranks"])
def test_twelve_layers_compile_as_often_as_two(kind: str, way: str) -> None:
    function: Any = attention if way == "documents" else shared_attention(None, "ulysses")  # type: ignore[arg-type]
    channels = 4 if kind != "latent" else 2
    rope = (torch.ones(1, 8, channels), torch.zeros(1, 8, channels))
    graphs = []
    for layers in (2, LAYERS):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            x = torch.randn(8, 16, requires_grad=True)
            for borders in ((0, 3, 8), (0, 2, 5, 8)):
                ctx = Context((1, 8), torch.arange(8), function, cu_seqlens=borders)
                modules = [KINDS[kind]() for _ in range(layers)]
                for module in modules:
                    module.compile(backend="eager")
                    x = module(x, rope, ctx)
            x.sum().backward()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    assert 0 < graphs[0] == graphs[1]
