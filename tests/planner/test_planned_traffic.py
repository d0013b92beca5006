"""What a planned step sends, against arithmetic: every byte of every axis."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kenotron.config import Config
from kenotron.config.errors import InputError
from kenotron.models import build
from kenotron.planner.hardware import GPUS
from kenotron.planner.memory import plan_memory
from kenotron.planner.trace import FREE, Began, Communicated, Ran, Waited, tensors_moved
from support import plans


def config_of(case: str) -> Config:
    """A model of two layers: what is sent and computed is compared by layer."""
    return plans.config_of(f"{case}|model.model_config.num_hidden_layers=2")


def transfers(case: str, in_machine: int = 8) -> list[Communicated]:
    """What the first rank of `case` exchanges in a step."""
    (plan,) = plan_memory(config_of(case), GPUS["h100"]._replace(in_machine=in_machine), [0])
    return [event for event in plan.events if isinstance(event, Communicated)]


def traffic(case: str) -> Counter[tuple[str, str]]:
    """Bytes that the first rank of `case` exchanges in a step, by (kind, axis)."""
    moved: Counter[tuple[str, str]] = Counter()
    for event in transfers(case):
        moved[event.kind, event.group.name] += int(event.moved)
    return moved


@pytest.mark.budget(20, reason="a plan of two micro-batches")
def test_zero_3_gathers_blocks_twice_a_micro_batch_and_sums_each_gradient_once() -> None:
    config = config_of("llama|dp=2 zero=3 accum=2")
    parameters = {name: each.numel() for name, each in build(config.model).named_parameters()}
    blocks = sum(count for name, count in parameters.items() if ".layers." in name)
    others = sum(parameters.values()) - blocks
    moved = traffic("llama|dp=2 zero=3 accum=2")
    assert moved["gather", "dp"] == pytest.approx(2 * 4 * (2 * blocks + others), rel=0.01)  # fp32
    assert moved["scatter", "dp"] == pytest.approx(2 * 4 * (blocks + others), rel=0.01)


@pytest.mark.budget(20, reason="a plan")
def test_tensor_parallelism_sums_four_times_a_layer() -> None:
    """In forward and backward once for attention and once for the MLP, each of all tokens."""
    config = config_of("llama|tp=2 accum=1")
    tokens = config.tokens.micro_batch_size * max(config.sequence_lengths.values())
    layers, hidden = config.model.decoder.num_hidden_layers, config.model.decoder.hidden_size
    moved = traffic("llama|tp=2 accum=1")["sum", "tp"]
    of_layers = 4 * layers * tokens * hidden * 4
    assert of_layers < moved < of_layers + 3 * tokens * hidden * 4 + 1e5  # embedding, head and the loss


@pytest.mark.budget(20, reason="a plan")
def test_a_stage_sends_hidden_states_forward_and_gets_as_many_gradients() -> None:
    config = config_of("llama|pp=2 engine=1f1b accum=4")
    tokens = config.tokens.micro_batch_size * max(config.sequence_lengths.values())
    moved = traffic("llama|pp=2 engine=1f1b accum=4")
    assert moved["send", "pp"] == moved["receive", "pp"] == 4 * tokens * config.model.decoder.hidden_size * 4


@pytest.mark.budget(20, reason="a plan")
def test_experts_get_each_token_as_often_as_it_chooses_and_send_it_back() -> None:
    """Rows, then their weights; both once more in backward."""
    config = config_of("mixtral|dp=4 ep=2 accum=1|model.dtype=bfloat16")
    tokens = config.tokens.micro_batch_size * max(config.sequence_lengths.values())
    layers, hidden, chosen = config.model.decoder.num_hidden_layers, config.model.decoder.hidden_size, 2
    moved = traffic("mixtral|dp=4 ep=2 accum=1|model.dtype=bfloat16")["exchange", "ep"]
    rows = layers * tokens * chosen
    assert moved == pytest.approx(rows * (4 * hidden * 2 + 2 * 4), rel=0.05)


@pytest.mark.budget(20, reason="a plan")
def test_hybrid_sharding_gathers_within_a_machine() -> None:
    groups = {(each.kind, each.group.size, each.group.on_machine) for each in transfers("llama|dp=4 zero=hybrid", 2)}
    assert {("gather", 2, 2), ("scatter", 2, 2), ("sum", 2, 1)} <= groups
    assert not {group for group in groups if group[0] in ("gather", "scatter")} - {("gather", 2, 2), ("scatter", 2, 2)}


@pytest.mark.slow
def test_experts_that_tp_splits_are_planned_too() -> None:
    """Their norm is summed over a group of several axes, which the mesh has no name for."""
    groups = {
        each.group for each in transfers("mixtral|dp=4 tp=2 ep=2 zero=1 mode=REDUCE_SCATTER|model.dtype=bfloat16")
    }
    assert {("tp", 2), ("ep", 2)} <= {(group.name, group.size) for group in groups}
    assert all(group.on_machine == group.size for group in groups)


@pytest.mark.budget(20, reason="a plan")
def test_gradients_of_float16_are_divided_by_the_loss_scale() -> None:
    """In place: they are read and written."""
    config = config_of("llama|dp=1 accum=1|model.dtype=float16")
    operators = [each.operator for each in plan_memory(config, GPUS["h100"], [0])[0].events if isinstance(each, Ran)]
    scaled = sum(each.moved for each in operators if each.site == "optim.clip:scale_gradients")
    assert scaled == 2 * 4 * sum(each.numel() for each in build(config.model).parameters())


@pytest.mark.budget(20, reason="plans of one rank each")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_experts_compute_the_rows_that_chose_them_in_every_dtype(dtype: str) -> None:
    """Three products of each of the two rows of a token, forward, and twice as many backward."""
    config = config_of(f"mixtral|dp=1 accum=1|model.dtype={dtype}")
    model = config.model.decoder
    rows = 2 * config.tokens.micro_batch_size * max(config.sequence_lengths.values())
    operators = [each.operator for each in plan_memory(config, GPUS["h100"], [0])[0].events if isinstance(each, Ran)]
    products = [each for each in operators if each.kind == "product" and each.site.startswith("kernels.experts:")]
    work = 9 * 2 * rows * model.hidden_size * model.intermediate_size
    assert sum(each.flops for each in products) == work * model.num_hidden_layers
    assert {str(each.dtype) for each in products} == {f"torch.{dtype}"}


@pytest.mark.budget(20, reason="plans of one rank each")
@pytest.mark.parametrize(
    ("gpu", "dtype", "head_dim"),
    [("h100", "bfloat16", 16), ("h100", "float32", 16), ("mi300x", "bfloat16", 16), ("h100", "float32", 8)],
)
def test_a_sliding_window_is_all_that_attention_computes(gpu: str, dtype: str, head_dim: int) -> None:
    """Token i sees min(i + 1, window): forward, and 2.5 times backward. By flex_attention, too; under a mask, all."""
    shape = f"model.model_config.sliding_window=8|model.model_config.head_dim={head_dim}"
    config = config_of(f"mistral|dp=1 accum=1|model.dtype={dtype}|{shape}")
    model, length = config.model.decoder, max(config.sequence_lengths.values())
    seen = length**2 if head_dim == 8 else sum(min(i + 1, 8) for i in range(length))
    events = plan_memory(config, GPUS[gpu], [0])[0].events
    found = [each.operator.flops for each in events if isinstance(each, Ran) and each.operator.kind == "attention"]
    work = 4 * model.num_attention_heads * head_dim * seen * model.num_hidden_layers * config.tokens.micro_batch_size
    assert sum(found) == pytest.approx(3.5 * work, rel=0.03)


@pytest.mark.slow
def test_every_method_of_context_parallelism_computes_the_same_attention() -> None:
    """Half of the square of the sequence over the ranks, whichever keys a rank has: forward, and 2.5 times backward."""
    for method in ("ring", "allgather", "ulysses"):
        config = config_of(f"llama|cp=2 method={method} accum=1|model.dtype=bfloat16")
        model, length = config.model.decoder, max(config.sequence_lengths.values())
        work = 4 * model.hidden_size * length**2 / 2 / 2 * config.tokens.micro_batch_size * model.num_hidden_layers
        events = plan_memory(config, GPUS["h100"], [0])[0].events
        found = [each.operator.flops for each in events if isinstance(each, Ran) and each.operator.kind == "attention"]
        assert sum(found) == pytest.approx(3.5 * work), method


@pytest.mark.budget(20, reason="a plan")
def test_flash_attention_3_is_planned_where_it_is_not_installed() -> None:
    three = "model.model_config._attn_implementation=flash_attention_3"
    config = config_of(f"llama|dp=1 accum=1|model.dtype=bfloat16|{three}")
    (plan,) = plan_memory(config, GPUS["h100"])
    assert [event for event in plan.events if isinstance(event, Ran) and event.operator.kind == "attention"]
    with pytest.raises(InputError, match=r"flash_attention_3 needs compute capability 9.x, found 8.0"):
        plan_memory(config, GPUS["a100"])


@pytest.mark.budget(20, reason="a plan")
def test_the_host_asks_for_the_update_before_it_waits_for_the_norm() -> None:
    """As in a run whose hooks do not look at gradients: AdamW clips by itself."""
    (plan,) = plan_memory(config_of("llama|dp=1 accum=1"), GPUS["h100"])
    update = plan.events.index(Began("update"))
    assert not [event for event in plan.events[:update] if isinstance(event, Waited) and event.queue is None]
    assert not [event for event in plan.events if isinstance(event, Ran) and "scale_gradients" in event.operator.site]


@pytest.mark.parametrize("fake", [False, True])
def test_what_is_changed_in_place_is_read_and_written(fake: bool) -> None:
    moved = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out, name = function(*args, **(kwargs or {})), function.overloadpacket.__name__
            if name not in FREE:
                moved.append(sum(each.numel() for each in tensors_moved(name, args, kwargs, out)))
            return out

    with FakeTensorMode() if fake else nullcontext():
        a, b = torch.ones(2, 10), torch.ones(2, 10)
        first, second = b[:1], b[1:]
        with Counted():
            a + b
            a.add_(b)
            a.copy_(b)
            torch._foreach_mul_([a, b], 2.0)
            torch.mul(a, 2.0, out=b)
            torch._chunk_cat([a], dim=0, num_chunks=2, out=b)
            torch.split_with_sizes_copy(a, [1, 1], out=[first, second])
    assert moved == [60, 60, 40, 80, 40, 40, 40]
