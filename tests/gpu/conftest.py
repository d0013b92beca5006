"""What the tests of one GPU share. Where there is none they are skipped.

make test-gpu                               or: pytest -m gpu tests/gpu
KENOTRON_TEST_DEVICE=cpu make test-gpu      the same tests on the CPU, to test the tests; what needs a GPU is skipped
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

DEVICE = os.environ.get("KENOTRON_TEST_DEVICE", "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder `gpu`, and skip it where the device is missing."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    missing = bool(here) and DEVICE != "cpu" and not torch.cuda.is_available()
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if missing:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and torch.cuda.is_available() is False"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device under test. float32 is exact on it: no TF32, which keeps 10 bits of 23.

    Off by default in torch, but for convolutions; NVIDIA_TF32_OVERRIDE=1 would turn it on for everything.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    tested = torch.device(DEVICE)
    a, b = (torch.randn(256, 256, generator=torch.Generator().manual_seed(seed)).to(tested) for seed in (0, 1))
    exact = a.double() @ b.double()
    error = float(((a @ b).double() - exact).norm() / exact.norm())
    assert error < 1e-5, f"float32 products on {tested} are off by {error:.0e}: unset NVIDIA_TF32_OVERRIDE"
    return tested


@pytest.fixture
def gpu_only(device: torch.device) -> torch.device:
    """The device, for a test of which nothing is left on a CPU."""
    if device.type == "cpu":
        pytest.skip("nothing of it can be computed on a CPU")
    return device


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """What a test leaves on the GPU does not add to the next one's memory; compiled code is dropped."""
    yield
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
