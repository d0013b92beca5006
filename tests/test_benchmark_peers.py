"""Peers of the benchmarks that are imported from a checkout: what is said without one; their weights are ours."""

import sys
from typing import Any

import pytest
import torch

from kenotron.kernels.rope import apply_rope
from support.tiny_run import REPOSITORY

MODULES = ("checkout", "work", "worker", "picotron_step", "lingua_step")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the folder, by name."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks" / "peers"))
    before = set(sys.modules)
    yield {name: __import__(name) for name in MODULES}
    for name in set(MODULES) - before:
        sys.modules.pop(name, None)


def test_every_weight_has_a_name_of_its_own_there(peers: Any) -> None:
    names = peers["work"].SIZES["17M"].shapes()
    for module in ("picotron_step", "lingua_step"):
        theirs = {peers[module].renamed(name) for name in names}
        assert len(theirs) == len(names)
        assert not any("self_attn" in name or "model." in name for name in theirs)
    assert peers["lingua_step"].renamed("model.layers.3.self_attn.q_proj.weight") == "layers.3.attention.wq.weight"
    assert peers["picotron_step"].renamed("model.layers.3.self_attn.o_proj.weight") == (
        "decoder_layers.3.attention.out_proj.weight"
    )


def test_queries_of_pairs_side_by_side_are_those_of_halves_in_another_order(peers: Any) -> None:
    """The scores of queries and keys, rotated as each library rotates them, are the same."""
    heads, head_dim, tokens = 2, 8, 5
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 12, generator=draw)
    q, k = (torch.randn(heads * head_dim, 12, generator=draw) for _ in range(2))
    angles = torch.rand(1, tokens, head_dim // 2, generator=draw)

    def scores(q: torch.Tensor, k: torch.Tensor, interleaved: bool) -> torch.Tensor:
        rows = ((x @ weight.T).view(1, tokens, heads, head_dim) for weight in (q, k))
        turned = [apply_rope(each, angles.cos(), angles.sin(), interleaved)[0].transpose(0, 1) for each in rows]
        return turned[0] @ turned[1].transpose(1, 2)

    q_there, k_there = (peers["lingua_step"].pairs_side_by_side("q_proj", weight, heads) for weight in (q, k))
    assert torch.allclose(scores(q, k, False), scores(q_there, k_there, True), atol=1e-5)
    assert torch.equal(peers["lingua_step"].pairs_side_by_side("v_proj", q, heads), q)
