"""A rank that is slower than the others is named in the log, since all of them wait for it.

    warning: all ranks wait for a slow one: rank 5 on node12 takes 2.1 times as long as the others for the same products
    warning: all ranks wait for a slow one: rank 3 on node04 has waited 31% of the time for its batches

Ranks wait for each other several times a step, so a step takes equally long on all of them, whoever is slow. What
differs is what each does by itself: now and then every rank times a few matrix products of its own (6 ms on a CPU core,
less on a GPU), counts how long it has waited for its batches, and the numbers are gathered. A rank is named when it
has been slow three times in a row, and again after it was as fast as the others in between. Where ranks share cores,
chance decides which is slow, and products are not timed.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from kenotron.parallel.device import synchronize
from kenotron.parallel.ranks import gather
from kenotron.training.console import logger
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult

EVERY = 50  # steps
IN_A_ROW = 3
SLOW = 1.5  # times the others
WAITING = 0.1  # of the time
PRODUCTS = 16


@dataclass(frozen=True)
class RankPace:
    """Of one rank: its machine, the seconds of its products (None: not timed), and the share of time that it waited."""

    host: str
    seconds: float | None
    waited: float


class Stragglers(Hook):
    """See the module; on all ranks, which gather their paces after the same steps."""

    priority: ClassVar[int] = -35

    def __init__(self, every: int = EVERY) -> None:
        self.every, self.host = every, socket.gethostname()
        self.slow_for: dict[int, int] = {}
        self.products: Products | None = None  # where ranks share cores

    def on_train_start(self, run: Run) -> None:
        """See whether the machine has a core for every thread."""
        threads = gather(self.host).count(self.host) * torch.get_num_threads()
        if run.device.type != "cpu" or threads <= (os.cpu_count() or 1):
            self.products = Products(run.device)
        self.waited, self.since = 0.0, time.monotonic()

    def after_step(self, run: Run, result: StepResult) -> None:
        """Every `every` steps: compare the ranks."""
        self.waited += result.data_wait_seconds
        if run.step % self.every:
            return
        waited = self.waited / max(time.monotonic() - self.since, 1e-6)
        paces = gather(RankPace(self.host, self.products.seconds() if self.products else None, waited))
        self.waited, self.since = 0.0, time.monotonic()
        found = slow_ranks(paces)
        self.slow_for = {rank: self.slow_for.get(rank, 0) + 1 for rank in found}
        if run.mesh.is_first:
            for rank, what in found.items():
                if self.slow_for[rank] == IN_A_ROW:
                    where = f"rank {rank} on {paces[rank].host}"
                    logger.warning("all ranks wait for a slow one: %s %s", where, what)


def slow_ranks(paces: Sequence[RankPace]) -> dict[int, str]:
    """Ranks that take much longer than most, or wait much more for their batches, and in words how much."""
    usual = statistics.median_low([pace.seconds for pace in paces if pace.seconds is not None] or [0.0])
    usual_wait = statistics.median_low(pace.waited for pace in paces)
    found = {}
    for rank, pace in enumerate(paces):
        if pace.waited > WAITING and pace.waited > 2 * usual_wait:
            found[rank] = f"has waited {pace.waited:.0%} of the time for its batches"
        if pace.seconds is not None and pace.seconds > SLOW * usual:
            found[rank] = f"takes {pace.seconds / usual:.1f} times as long as the others for the same products"
    return found


class Products:
    """Matrix products on a rank's device. Their memory, 16 MB on a GPU, is taken at once: it may be full later."""

    def __init__(self, device: torch.device) -> None:
        side, dtype = (256, torch.float32) if device.type == "cpu" else (2048, torch.bfloat16)
        self.device = device
        self.factor, self.out = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))

    def seconds(self) -> float:
        """Of `PRODUCTS` of them, after one to warm up and what is queued on the device."""
        torch.mm(self.factor, self.factor, out=self.out)
        synchronize(self.device)
        started = time.perf_counter()
        for _ in range(PRODUCTS):
            torch.mm(self.factor, self.factor, out=self.out)
        synchronize(self.device)
        return time.perf_counter() - started
