"""`launch.hangs.CollectiveTimer` counts by a clock that nobody sets."""

import time

import pytest

from kenotron.launch import hangs

GROUP = ("default_pg", "default")


def call(number: int, made_ns: int, waits: bool = True) -> dict[str, object]:
    """A collective as torch's flight recorder has it."""
    return {
        "process_group": GROUP,
        "collective_seq_id": number,
        "profiling_name": "gloo:all_reduce",
        "time_created_ns": made_ns,
        "waits": waits,
    }


class Clocks:
    """Seconds since the machine's start, and what its clock says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed, self.calls = 0.0, []
        self.made_ns = time.time_ns()
        monkeypatch.setattr(hangs.time, "monotonic", lambda: self.passed)
        monkeypatch.setattr(hangs.time, "time", lambda: self.made_ns / 1e9)
        monkeypatch.setattr(hangs.time, "time_ns", lambda: self.made_ns)
        monkeypatch.setattr(hangs, "_collectives", lambda: self.calls)


@pytest.mark.parametrize("jump_s", [-86_400, 0, 86_400])
def test_a_clock_that_is_set_makes_no_hang_and_hides_none(jump_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    clocks.calls = [call(7, clocks.made_ns)]  # of an earlier run: it never ends
    timer = hangs.CollectiveTimer(10.0)
    clocks.made_ns += jump_s * 10**9
    clocks.calls = [*clocks.calls, call(8, clocks.made_ns - jump_s * 10**9 + 1)]
    found = None
    for _ in range(30):
        clocks.passed += 0.5
        found = timer.timed_out()
        if found is not None:
            break
    assert found is not None
    assert (found.operation, found.group, found.number) == ("all_reduce", "default_pg", 8)
    assert 10 < clocks.passed <= 12


def test_collectives_that_end_are_no_hang_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    timer = hangs.CollectiveTimer(10.0)
    for number in range(100):
        clocks.passed += 1
        clocks.calls = [call(number, number, waits=False), call(number + 1, number + 1)]
        assert timer.timed_out() is None
