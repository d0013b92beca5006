"""Rotary angles against float64, as far as a long context goes."""

import pytest
import torch

from kenotron.models.blocks.rope import Rope

POSITIONS = 4096
LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(("scaling", "stretch"), [(None, 1.0), (LINEAR, 4.0)])
def test_angles_at_4096_positions_are_those_of_float64(scaling: dict[str, object] | None, stretch: float) -> None:
    """fp32 is off by 4096 * 2^-24 radians; positions in bf16 would be off by up to 8 whole positions."""
    head_dim, theta = 64, 10_000.0
    cos, sin = Rope(head_dim, theta, scaling, POSITIONS)(torch.arange(POSITIONS))
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64)
    angles = torch.arange(POSITIONS, dtype=torch.float64)[:, None] * theta ** (-pairs / head_dim) / stretch
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=5e-4)
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=5e-4)
