"""Log ranks that are slower than the others, since all ranks wait for them.

    warning: all ranks wait for a slow one: rank 5 on node12 takes 2.1 times as long as the others for the same products
    warning: all ranks wait for a slow one: rank 3 on node04 has waited 31% of the time for its batches

Ranks wait for each other several times a step, so a step takes equally long on all ranks, whichever is slow. Only local
work differs: every EVERY steps each rank times a few matrix products (6 ms on a CPU core, less on a GPU) and its waits
for batches, and the times are gathered. A rank is logged when it has been slow three times in a row, and again only
after it was as fast as the others in between. If ranks share cores, the times are random, and products are not timed.
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

EVERY = 50  # steps between measurements
IN_A_ROW = 3
SLOW = 1.5  # times the median of all ranks
WAITING = 0.1  # share of the time
PRODUCTS = 16


@dataclass(frozen=True)
class RankPace:
    """One rank's machine, the seconds of its products (None: not timed), and the share of time that it waited."""

    host: str
    seconds: float | None
    waited: float


class Stragglers(Hook):
    """See the module; on all ranks, which gather their measurements after the same steps."""

    priority: ClassVar[int] = -35

    def __init__(self, every: int = EVERY) -> None:
        self.every, self.host = every, socket.gethostname()
        self.slow_for: dict[int, int] = {}
        self.products: Products | None = None  # None if ranks share cores

    def on_train_start(self, run: Run) -> None:
        """Prepare to time products, if the machine has a core for every thread."""
        threads = gather(self.host).count(self.host) * torch.get_num_threads()
        if run.device.type != "cpu" or threads <= (os.cpu_count() or 1):
            self.products = Products(run.device)
        self.waited, self.since = 0.0, time.monotonic()

    def after_step(self, run: Run, result: StepResult) -> None:
        """Compare the ranks, every `every` steps."""
        self.waited += result.data_wait_seconds
        if run.step % self.every:
            return
        waited = self.waited / max(time.monotonic() - self.since, 1e-6)
        paces = gather(RankPace(self.host, self.products.seconds() if self.products else None, waited))
        self.waited, self.since = 0.0, time.monotonic()
        slow = slow_ranks(paces)
        self.slow_for = {rank: self.slow_for.get(rank, 0) + 1 for rank in slow}
        if run.mesh.is_first:
            for rank, what in slow.items():
                if self.slow_for[rank] == IN_A_ROW:
                    where = f"rank {rank} on {paces[rank].host}"
                    logger.warning("all ranks wait for a slow one: %s %s", where, what)


def slow_ranks(paces: Sequence[RankPace]) -> dict[int, str]:
    """Return the ranks that compute or wait for batches much longer than the median rank, each with a description."""
    usual = statistics.median_low([pace.seconds for pace in paces if pace.seconds is not None] or [0.0])
    usual_wait = statistics.median_low(pace.waited for pace in paces)
    slow = {}
    for rank, pace in enumerate(paces):
        if pace.waited > WAITING and pace.waited > 2 * usual_wait:
            slow[rank] = f"has waited {pace.waited:.0%} of the time for its batches"
        if pace.seconds is not None and pace.seconds > SLOW * usual:
            slow[rank] = f"takes {pace.seconds / usual:.1f} times as long as the others for the same products"
    return slow


class Products:
    """Matrix products on a rank's device. Their memory (16 MB on a GPU) is allocated before the device is full."""

    def __init__(self, device: torch.device) -> None:
        side, dtype = (256, torch.float32) if device.type == "cpu" else (2048, torch.bfloat16)
        self.device = device
        self.factor, self.out = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))

    def seconds(self) -> float:
        """Return the seconds of `PRODUCTS` products, after queued work and a product to warm up."""
        torch.mm(self.factor, self.factor, out=self.out)
        synchronize(self.device)
        started = time.perf_counter()
        for _ in range(PRODUCTS):
            torch.mm(self.factor, self.factor, out=self.out)
        synchronize(self.device)
        return time.perf_counter() - started
