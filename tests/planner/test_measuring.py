"""`kenotron plan --measure`: rates of this machine's device, and plans for what a file describes."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from kenotron.config.errors import InputError
from kenotron.parallel.device import matmul_ceiling
from kenotron.planner import measuring
from kenotron.planner.hardware import GPUS, Gpu, gpu_called
from kenotron.planner.rates import LINK, seconds_between, seconds_of
from kenotron.planner.trace import Group, Operator
from support.preload import fork_server

CPU = torch.device("cpu")
UNKNOWN = Gpu("a GPU", "", 24.0, "nvidia")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SECONDS", 0.2)


@pytest.mark.usefixtures("quick")
def test_what_a_device_reaches() -> None:
    told: list[tuple[int, int]] = []
    found = measuring.measure(UNKNOWN, CPU, lambda *each: told.append(each), scale=32)
    assert told == [(number, 6) for number in range(6)]
    assert (found.products, found.memory) == (1.0, 1.0)  # of what was measured
    assert min(found.attention.values()) > 0
    assert 0.1 < found.fp32 / matmul_ceiling(CPU, "float32") < 10
    product = Operator("product", "", 1.0, 2.0 * 4096**3, (4096, 4096, 4096), torch.bfloat16)
    assert seconds_of(product, found) == pytest.approx(product.flops / found.flops)


@pytest.mark.usefixtures("quick")
def test_peaks_that_are_known_stay_and_shares_of_them_are_measured() -> None:
    known = UNKNOWN._replace(flops=1e15, fp32=1e14, bandwidth=1e12, link=1e11, network=3e10)
    found = measuring.measure(known, CPU, scale=32)
    assert (found.flops, found.bandwidth, found.link, found.network) == (1e15, 1e12, 1e11, 3e10)
    assert 0 < found.products < 0.1
    assert 0 < found.memory < 0.5
    reached = measuring.products(256, torch.float32, CPU)
    assert 0.1 < found.products * found.fp32 / reached < 10  # in one unit, on a machine that may be busy


def test_flops_of_attention_are_half_of_those_that_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch counts whole squares."""
    monkeypatch.setattr(measuring, "average_seconds", lambda work, device: 1.0)
    shape = (2, 16, 64, 32)
    whole = sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(shape, shape, shape, shape)
    assert measuring.attention(64, 32, CPU) == whole / 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"memory_gib": -1}, "memory_gib: Input should be greater than 0"),
        ({"link": 0}, "link: Input should be greater than 0"),
        ({"in_machine": 0}, "in_machine: Input should be greater than 0"),
        ({"attention": {}}, "attention: Dictionary should have at least 1 item"),
        ({"products": 75}, "products: Input should be less than or equal to 1.5"),
        ({"vendor": "intel"}, "vendor: Input should be 'nvidia' or 'amd'"),
        ({"network": None}, "expected fp32, bandwidth, link and network beside flops"),
    ],
)
def test_a_file_with_rates_that_nothing_can_have_is_refused(tmp_path: Path, change: Any, expected: str) -> None:
    """They would be a division by zero, or a time below zero, in a plan."""
    fields = GPUS["h100"]._asdict() | {"capability": [9, 0]} | change
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in fields.items() if value is not None}))
    with pytest.raises(InputError, match=re.escape(expected)):
        gpu_called(str(path))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="no valid YAML"):
        gpu_called(str(path))


@pytest.mark.usefixtures("quick")
@pytest.mark.cases(1)
def test_a_link_is_what_a_sum_over_ranks_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that is planned for such a sum is the one that was measured. Its ranks are forks, not interpreters."""
    fork_server()
    monkeypatch.setattr(measuring.mp, "spawn", partial(measuring.mp.start_processes, start_method="forkserver"))
    link = measuring.bytes_sent(2, 1 << 20, "cpu")
    gpu = UNKNOWN._replace(link=link)
    sent = 2 * 4 * (1 << 20) / 2
    assert seconds_between("sum", 4 << 20, Group("dp", 2, 2), gpu) == pytest.approx(sent / (LINK * link), rel=0.2)


def test_a_file_describes_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    gpu = GPUS["h100"]._replace(name="mine", attention={64: 0.2, 128: 0.3}, products=0.5)
    measuring.write_gpu(path, gpu)
    assert gpu_called(str(path)) == gpu


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x", "device: "),
        ("name: [", "no valid YAML"),
        ("{name: x, device: x, memory_gib: much, vendor: nvidia}", "memory_gib: Input should be a valid number"),
        ("{name: x, device: x, memory_gib: 1, vendor: nvidia, flop: 1}", "flop: Extra inputs"),
    ],
)
def test_a_file_that_describes_none_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        gpu_called(str(path))
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(InputError, match="cannot read"):
        gpu_called(str(tmp_path / "none.yaml"))
