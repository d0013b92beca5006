"""A run: what it is made of, and its life from the first line to the last.

    prepare ─▶ restore ─▶ fit ─▶ close

    run = prepare(config, mesh, device, start)      # hooks → model → optimizer → data
    restore(run, start)                             # from a checkpoint, if there is one
    fit(run)                                        # for every batch: train_step, then the hooks

`train` does all of it. Read `fit` first: it is the loop.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kenotron.checkpoint.ranks import gather
from kenotron.parallel.collectives import any_rank
from kenotron.train.console import logger
from kenotron.train.hooks import Hook
from kenotron.train.step import train_step, with_wait

if TYPE_CHECKING:
    import torch
    from torch import nn

    from kenotron.config import Config
    from kenotron.data import RunData, Tokenizer
    from kenotron.models import LanguageModel
    from kenotron.parallel.mesh import Mesh
    from kenotron.parallel.pipeline import Pipeline


@dataclass
class Run:
    """Everything of one training run. `step` counts the steps done."""

    config: Config
    mesh: Mesh
    device: torch.device
    parts: list[LanguageModel]  # the whole model; with pp, this rank's stages in the order of the model
    optimizer: torch.optim.Optimizer
    data: RunData
    tokenizer: Tokenizer | None
    hooks: list[Hook] = field(default_factory=list)
    pipeline: Pipeline | None = None  # with pp: runs the parts of all ranks as one model
    step: int = 0
    stop_reason: str | None = None
    wish: str | None = None  # this rank's reason to stop, until the ranks agree on it
    seconds: float = 0.0  # of this process's steps, and how much of it they waited for data
    data_wait_seconds: float = 0.0
    last_metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> LanguageModel:
        """The whole model, or this rank's first part of it."""
        return self.parts[0]

    @property
    def roots(self) -> Sequence[nn.Module]:
        """The modules that are called, which data parallelism wraps: the model, or with pp the stages around it."""
        return self.parts if self.pipeline is None else self.pipeline.stages

    @property
    def consumed_samples(self) -> int:
        return self.data.samples_before(self.step + 1)

    @property
    def consumed_tokens(self) -> int:
        return self.data.tokens_before(self.step + 1)

    @property
    def last_step(self) -> int:
        """Where the run ends: after `train_steps`, or where the data of the stages so far allow no further step."""
        return self.data.last_step(max(self.step, 1))

    @property
    def total_tokens(self) -> int:
        return self.data.tokens_before(self.last_step + 1)

    @property
    def step_tokens(self) -> int:
        """Tokens of the last step done."""
        return self.consumed_tokens - self.data.tokens_before(self.step)

    @property
    def interrupted(self) -> bool:
        """Somebody asked the run to stop before its last step: nothing that can wait should still be begun."""
        return self.stop_reason is not None and not self.finished

    @property
    def finished(self) -> bool:
        """Every step is done, or there are no data for another one."""
        return self.step >= self.config.tokens.train_steps or self.data.exhausted(self.step + 1) is not None

    def agree(self) -> None:
        """Stop on every rank what was asked to stop on one: a signal reaches ranks at different steps."""
        if self.mesh.world_size > 1 and self.stop_reason is None and any_rank(self.wish is not None, self.device):
            self.stop_reason = next(reason for reason in gather(self.wish) if reason)

    def stop(self, reason: str) -> None:
        """End the run in good order after the current step; with several ranks as soon as all have agreed."""
        self.wish = self.wish or reason
        if self.mesh.world_size == 1:
            self.stop_reason = self.wish

    def call(self, moment: str, *args: Any) -> None:
        """Every hook's method `moment`, in order."""
        for hook in self.hooks:
            getattr(hook, moment)(self, *args)


def fit(run: Run) -> None:
    """Train until `train_steps`, until the data allow no further step, or until somebody asks the run to stop."""
    run.call("on_train_start")
    last = run.config.tokens.train_steps
    loader = run.data.loader(run.step + 1, last + 1, run.mesh.dp_rank, run.mesh.dp_degree)
    with contextlib.closing(loader):
        while not run.finished and run.stop_reason is None:
            started = time.perf_counter()
            batches = next(loader)
            waited = time.perf_counter() - started
            run.call("before_step")
            result = with_wait(train_step(run, batches), waited)
            run.step += 1
            run.seconds += result.seconds + waited
            run.data_wait_seconds += waited
            run.call("after_step", result)
            run.agree()
    if run.step < last and run.stop_reason is None:
        run.stop_reason = run.data.exhausted(run.step + 1)
    run.call("on_train_end")


def close(run: Run) -> None:
    """Let every hook let go, whatever happened before; the first failure is the one that is told."""
    closers: list[Callable[[], None]] = [partial(hook.on_close, run) for hook in run.hooks]
    for closer in [*closers, run.data.close]:
        try:
            closer()
        except Exception as error:
            logger.error("while closing the run: %s", error)
