"""The ledger counts bytes as one does by hand."""

from __future__ import annotations

import torch
from torch import nn

from kenotron.planner.ledger import Ledger

KB = 1024


def kilobytes(count: int) -> torch.Tensor:
    return torch.zeros(count * KB, dtype=torch.uint8)


def test_the_peak_is_the_largest_sum_at_one_moment() -> None:
    """10 + 5 live together, then 5 + 8: views have no bytes of their own."""
    with Ledger() as ledger:
        first = kilobytes(10)
        second = kilobytes(5)
        del first
        third = kilobytes(8)
        view = third[: 4 * KB].view(2, -1)
        assert ledger.bytes == 13 * KB
        assert ledger.peak().bytes == 15 * KB
        late = ledger.clock
        del second
        assert ledger.peak(since=late).bytes == 13 * KB
        ledger.name("weights", [view])
        assert ledger.peak(since=ledger.clock).of == {"weights": 8 * KB}


def test_storages_that_are_resized_count_as_large_as_they_are() -> None:
    """FSDP2 frees and allocates what it gathers so."""
    with Ledger() as ledger:
        gathered = kilobytes(64)
        gathered.untyped_storage().resize_(0)
        assert ledger.bytes == 0
        other = kilobytes(20)
        gathered.untyped_storage().resize_(48 * KB)
        assert ledger.bytes == 68 * KB
        assert ledger.peak(since=ledger.clock).bytes == 68 * KB
        del other


def test_what_a_backward_pass_makes_is_told_from_what_a_forward_pass_keeps() -> None:
    with Ledger() as ledger:
        linear = nn.Linear(16, 16, bias=False)
        ledger.name("weights", linear.parameters())
        x = linear(torch.ones(4, 16)).relu()
        kept = ledger.peak(since=ledger.clock).of
        x.sum().backward()
        ledger.name("gradients", [linear.weight.grad])
    assert kept == {"weights": 4 * 16 * 16, "activations": 4 * (4 * 16 + 4 * 16)}  # the input, and what relu made
    assert ledger.peak(since=ledger.clock).of["gradients"] == 4 * 16 * 16
