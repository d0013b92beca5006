"""What a test costs, in seconds that a busy machine changes little.

A test of the quick tier has 5 seconds. One that needs more says why:

    @pytest.mark.budget(12, reason="starts two runs as real processes, which import torch each")

`pytest --budget` (as `make test` does) fails a test that takes four times as much, both by the clock and in processor
time: its own, its pool of ranks' and its subprocesses'. A neighbour that takes the processor away lengthens the first
and hardly the second; ranks that work side by side add up in the second only. Fixtures are not charged.
"""

import os
import resource
import time
from pathlib import Path

import pytest

SECONDS = 5.0
TOLERANCE = 4.0  # processor time itself grows on a busy machine, and four workers share two cores
_TICKS = os.sysconf("SC_CLK_TCK")


class Charge:
    """The time since it was made."""

    def __init__(self) -> None:
        self._clock, self._processor = time.monotonic(), processor_seconds()

    def seconds(self) -> float:
        """The smaller of the clock's and the processor's seconds."""
        return min(time.monotonic() - self._clock, processor_seconds() - self._processor)


def allowed(item: pytest.Item) -> float:
    """The budget of a test, in seconds."""
    if item.get_closest_marker("slow"):
        return float("inf")
    marker = item.get_closest_marker("budget")
    if marker is None:
        return SECONDS
    assert marker.kwargs.get("reason"), f"{item.nodeid}: budget without a reason; expected budget(seconds, reason='…')"
    return float(marker.args[0])


def processor_seconds() -> float:
    """Processor time of this process, of its children that ended, and of those that live."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used) + sum(map(_tree_seconds, _children(os.getpid())))


def _tree_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended, and counts among the children that did
        return 0.0
    own = sum(map(int, fields[11:15])) / _TICKS  # utime, stime, and both of children that ended
    return own + sum(map(_tree_seconds, _children(pid)))


def _children(pid: int) -> list[int]:
    """Empty where the kernel does not list them: then their time is not charged."""
    try:
        lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        return [int(child) for some in lists for child in some]
    except OSError:
        return []
