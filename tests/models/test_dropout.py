"""Dropout by counters: the right share, without bias, and the same for a sample wherever it is computed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_foreign_models import Running, config_of, of_user
from torch import Tensor, nn

from kenotron.config.errors import InputError
from kenotron.kernels.attention import attention
from kenotron.kernels.hashing import derive_key, hash64
from kenotron.models import Context
from kenotron.models.dropout import CounterDropout
from kenotron.parallel.mesh import Mesh
from kenotron.training.step import to_device
from support.foreign_models import folder_of
from support.layout_runs import prepared
from support.tiny_run import losses, train_and_listen


def context(ids: list[int], length: int = 4) -> Context:
    positions = torch.arange(length).repeat(len(ids))
    return Context((len(ids), length), positions, attention, sample_ids=torch.tensor(ids))


def test_bits_are_those_of_the_hash() -> None:
    x = torch.ones(2, 3, 5)
    with CounterDropout("layers.1", context([7, 9])):
        F.dropout(x, 0.5)  # the first of two
        found = F.dropout(x, 0.3)
    key, dropped = derive_key("dropout", "layers.1", 1), round(0.3 * 65536)
    for row, sample in enumerate([7, 9]):
        start = hash64(key, sample)
        for place, value in enumerate(found[row].flatten().tolist()):
            level = hash64(key, start + place // 4) >> 16 * (place % 4) & 0xFFFF
            signed = level - 65536 if level >= 32768 else level
            assert value == pytest.approx(65536 / (65536 - dropped) if signed >= dropped - 32768 else 0.0)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_the_share_is_p_and_the_mean_is_kept(p: float) -> None:
    with CounterDropout("", context([*range(64)])):
        found = nn.Dropout(p)(torch.ones(64, 1000))
        assert torch.equal(nn.Dropout(p).eval()(torch.ones(64, 1000)), torch.ones(64, 1000))
    assert float((found == 0).float().mean()) == pytest.approx(p, abs=0.005)
    assert float(found.mean()) == pytest.approx(0.0 if p == 1 else 1.0, abs=0.01)
    assert len(found.unique(dim=0)) == (1 if p in (0.0, 1.0) else 64)  # no two samples alike


def test_a_sample_is_dropped_alike_in_any_batch_and_dtype() -> None:
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    with CounterDropout("a", context([3, 5, 8, 2])):
        whole = F.dropout(x, 0.2)
    with CounterDropout("a", context([8, 3])):
        folded = F.dropout(x[[2, 0]].flatten(0, 1).bfloat16(), 0.2).view(2, 6, 8)
    assert torch.equal(folded == 0, whole[[2, 0]] == 0)
    with CounterDropout("b", context([3, 5, 8, 2])):
        assert not torch.equal(F.dropout(x, 0.2) == 0, whole == 0)
    with CounterDropout("a", context([3, 5, 8])), pytest.raises(InputError, match="begin with the 3 sequences"):
        F.dropout(x, 0.2)


@pytest.mark.parametrize(
    ("causal", "mask", "gqa", "scale"),
    [(True, None, False, None), (False, "bool", True, 0.3), (False, "added", False, 0.3)],
)
def test_attention_is_torchs_on_average(causal: bool, mask: str | None, gqa: bool, scale: float | None) -> None:
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, 5, 8, generator=random) for heads in (4, 2 if gqa else 4, 2 if gqa else 4))
    options = {"is_causal": causal, "enable_gqa": gqa, "scale": scale}
    if mask:
        allowed = torch.rand(1, 1, 5, 5, generator=random) > 0.3
        allowed |= torch.eye(5, dtype=torch.bool)
        options["attn_mask"] = allowed if mask == "bool" else torch.where(allowed, 0.0, -1e9)
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    many = 4000
    q, k, v = (each.expand(many, -1, -1, -1) for each in (q, k, v))
    with CounterDropout("", context([*range(many)])):
        assert torch.allclose(F.scaled_dot_product_attention(q[:1], k[:1], v[:1], **options), expected, atol=1e-6)
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, **options)
        almost = F.scaled_dot_product_attention(q, k, v, dropout_p=1e-9, **options)
    assert torch.allclose(almost[:1], expected, atol=1e-6)
    assert not torch.allclose(found[:1], expected, atol=1e-2)
    assert torch.allclose(found.mean(0, keepdim=True), expected, atol=0.05)


def test_training_drops_and_validation_does_not(tmp_path: Path) -> None:
    source = folder_of("gpt2", tmp_path)
    config = config_of(tmp_path, source, training_dropout=True)
    with prepared(config, Mesh()) as run:
        micro_batch = to_device(run.data.batch(1, 0, 1)[0], run)

        def loss() -> float:
            return float(run.model(micro_batch.tokens, micro_batch.ctx, micro_batch.labels)[0].detach())

        dropped, again = loss(), loss()
        assert dropped == again
        other = replace(micro_batch.ctx, sample_ids=micro_batch.ctx.sample_ids + 100)
        assert float(run.model(micro_batch.tokens, other, micro_batch.labels)[0]) != dropped
        run.model.eval()
        whole = loss()
        run.model.train()
        assert loss() == dropped
    with prepared(config_of(tmp_path, source), Mesh()) as run:
        assert float(run.model(micro_batch.tokens, micro_batch.ctx, micro_batch.labels)[0]) == whole != dropped


class Drawing(Running):
    def forward(self, tokens: Tensor) -> Tensor:
        found = super().forward(tokens)
        return found + torch.rand(()) if self.training else found


def test_other_random_numbers_of_training_are_refused(tmp_path: Path) -> None:
    drawing = f"{__name__}.Drawing"
    train_and_listen(of_user(tmp_path, module=drawing))  # never in training mode
    on = of_user(tmp_path / "on", module=drawing, training_dropout=True)
    with pytest.raises(InputError, match=rf"{drawing} gives other logits when it reads the same tokens again"):
        train_and_listen(on)


def test_a_dropout_that_is_off_is_said_once(tmp_path: Path) -> None:
    config = of_user(tmp_path / "off")
    _, said = train_and_listen(config)
    assert said.count("dropout of test_foreign_models.Running is off: training_dropout: true trains with it") == 1
    on = of_user(tmp_path / "on", training_dropout=True)
    _, said = train_and_listen(on)
    assert "is off" not in said
    assert losses(on)[0] != losses(config)[0]
