"""A run: what it consists of, and the loop.

    build_run ─▶ fit ─▶ close

    run = build_run(config, mesh, device, start)    # model → optimizer → data → checkpoint
    fit(run)                                        # for every batch: train_step, then the hooks

`kenotron.training.train` does all of it. Read `fit` first: it is the loop.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from kenotron.checkpoint.start import Start
from kenotron.config.errors import InputError
from kenotron.kernels.attention import attention
from kenotron.parallel.collectives import any_rank
from kenotron.parallel.ranks import gather
from kenotron.training.console import logger
from kenotron.training.hooks import Hook
from kenotron.training.step import StepResult, train_step

if TYPE_CHECKING:
    import torch
    from torch import nn

    from kenotron.checkpoint.checkpoints import Checkpoints
    from kenotron.config import Config
    from kenotron.data import RunData, TextTokenizer, TokenBatch
    from kenotron.models import MicroBatch
    from kenotron.models.decoder import Decoder
    from kenotron.parallel.mesh import Mesh
    from kenotron.parallel.pipeline import Pipeline

REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {"mean": statistics.fmean, "min": min, "max": max}


class StopWhileWaiting(BaseException):
    """Raised in a rank that is asked to stop while it waits for data; not an `Exception`, which readers would retry."""


@dataclass
class Run:
    """Everything of one training run. `step` counts the steps done."""

    config: Config
    mesh: Mesh
    device: torch.device
    skeleton: Decoder  # the whole model without memory: its names, sizes and FLOPs
    parts: list[Decoder]  # the model; with pp, this rank's stages in the order of the model
    optimizer: torch.optim.Optimizer
    data: RunData
    hooks: list[Hook] = field(default_factory=list)
    pipeline: Pipeline | None = None  # with pp: runs the parts of all ranks as one model
    start: Start = Start()  # noqa: RUF009
    attention: Callable[..., torch.Tensor] = attention  # `_attn_implementation`
    teach: Callable[[MicroBatch], MicroBatch] | None = None  # with distillation, where the head is
    checkpoints: Checkpoints = field(kw_only=True)

    # Where the run is: these change from step to step, those above do not.
    step: int = 0
    loss_scale: float = 1.0  # of the step that is computed: float16's gradients are multiplied by it
    stop_requested: str | None = None  # this rank's reason to stop
    waiting_for_data: bool = False
    batches: Sequence[TokenBatch] = ()  # this rank's of the step that is computed, or was last
    stop_reason: str | None = None  # the reason that all ranks agreed on: no further step
    seconds: float = 0.0  # spent in this process's steps, and the part of it spent waiting for data
    data_wait_seconds: float = 0.0
    last_result: StepResult | None = None
    recorded: dict[str, float] = field(default_factory=dict)  # by hooks, for the next line of metrics
    off_console: set[str] = field(default_factory=set)  # names of those that the console does not show
    last_metrics: dict[str, float] = field(default_factory=dict)  # the last line; on rank 0

    @property
    def model(self) -> Decoder:
        """The model; with pp, this rank's first part of it."""
        return self.parts[0]

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """The tokenizer of the data; None where they are tokens."""
        return self.data.tokenizer

    @property
    def roots(self) -> Sequence[nn.Module]:
        """The modules that are called, which data parallelism wraps: the model, or with pp the stages around it."""
        return self.parts if self.pipeline is None else self.pipeline.stages

    @property
    def consumed_samples(self) -> int:
        """Samples of all steps done."""
        return self.data.samples_before(self.step + 1)

    @property
    def consumed_tokens(self) -> int:
        """Tokens of all steps done."""
        return self.data.tokens_before(self.step + 1)

    @property
    def end(self) -> int:
        """The step after which the run has done all its steps: `tokens.train_steps`, unless it is a restart."""
        return self.start.end(self.config)

    @property
    def last_step(self) -> int:
        """Where the run ends: after all its steps, or where the data of the stages so far allow no further one."""
        return self.data.last_step(max(self.step, 1, self.start.data_start + 1))

    @property
    def total_tokens(self) -> int:
        """Tokens of all steps up to `last_step`."""
        return self.data.tokens_before(self.last_step + 1)

    @property
    def step_tokens(self) -> int:
        """Tokens of the last step done."""
        return self.consumed_tokens - self.data.tokens_before(self.step)

    @property
    def interrupted(self) -> bool:
        """Whether the run stops before its last step: whatever can wait should not be started."""
        return self.stop_reason is not None and not self.finished

    @property
    def finished(self) -> bool:
        """Whether every step is done, or the data allow no further one."""
        return self.step >= self.end or self.data.exhausted(self.step + 1) is not None

    def stop(self, reason: str) -> None:
        """Ask the run to end after the current step. May be called on one rank alone, also from a signal handler.

        There it ends a wait for data, by `StopWhileWaiting`: a source that hangs must not cost the steps since the
        last checkpoint.
        """
        self.stop_requested = self.stop_requested or reason
        if self.waiting_for_data and threading.current_thread() is threading.main_thread():
            self.waiting_for_data = False
            raise StopWhileWaiting

    def sync_stop_request(self) -> None:
        """Set `stop_reason` on all ranks once any was asked to stop: a signal reaches ranks at different steps."""
        if self.stop_reason is not None or self.mesh.world_size == 1:
            self.stop_reason = self.stop_reason or self.stop_requested
        elif any_rank(self.stop_requested is not None, self.mesh.world_size, self.device):
            self.stop_reason = next(reason for reason in gather(self.stop_requested) if reason)

    def record_metric(
        self, name: str, value: float, reduce: Literal["mean", "min", "max"] | None = None, *, on_console: bool = True
    ) -> None:
        """Add a number to the next line of metrics: in ``metrics.jsonl``, `on_console` and in TensorBoard.

        Up to a hook's `after_step` that is the current step's line. The value of rank 0 is written; `reduce` combines
        those of all ranks instead, and all of them have to make the call. A name that the line has already is an
        error when the line is written.
        """
        if not isinstance(name, str):
            raise InputError(f"record_metric: expected a name, found {name!r}")
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:  # of a text, a list, a tensor of several
            raise InputError(f"record_metric: {name}: expected a number, found {value!r}") from error
        if not on_console:
            self.off_console.add(name)
        self.recorded[name] = number if reduce is None else REDUCTIONS[reduce](gather(number))


def fit(run: Run) -> None:
    """Train until all steps are done, until the data allow no further step, or until the run is asked to stop."""
    for hook in run.hooks:
        hook.on_train_start(run)
    loader = run.data.loader(run.step + 1, run.end + 1, run.mesh.rank("batch"), run.mesh.degree("batch"))
    with contextlib.closing(loader):
        while not run.finished and run.stop_reason is None:
            started = time.perf_counter()
            batches = next_batches(run, loader)
            waited = time.perf_counter() - started
            run.sync_stop_request()
            if batches is None or run.stop_reason is not None:
                break
            run.batches = batches
            for hook in run.hooks:
                hook.before_step(run)
            result = replace(train_step(run, run.batches), data_wait_seconds=waited)
            run.step, run.last_result = run.step + 1, result
            run.seconds += result.seconds + waited
            run.data_wait_seconds += waited
            for hook in run.hooks:
                hook.after_step(run, result)
    if run.step < run.end and run.stop_reason is None:
        run.stop_reason = run.data.exhausted(run.step + 1)
    for hook in run.hooks:
        hook.on_train_end(run)


def next_batches(run: Run, loader: Iterator[list[TokenBatch]]) -> list[TokenBatch] | None:
    """The micro-batches of the next step; None once this rank is asked to stop, even while its data are late."""
    try:
        run.waiting_for_data = True
        batches = None if run.stop_requested else next(loader)
        run.waiting_for_data = False
        return batches
    except StopWhileWaiting:
        return None


def report_failure(run: Run, error: Exception) -> None:
    """Call every hook's `on_error`; what goes wrong there is logged, so `error` stays the cause of the failure."""
    _call_each([partial(hook.on_error, run, error) for hook in run.hooks], "a hook's on_error")


def close(run: Run) -> None:
    """Release what the hooks and the data hold; what goes wrong is logged, so an earlier error stays the cause."""
    hooks = (partial(hook.on_close, run) for hook in run.hooks)
    _call_each([*hooks, run.checkpoints.close, run.data.close], "closing the run")


def _call_each(calls: Sequence[Callable[[], None]], what: str) -> None:
    for call in calls:
        try:
            call()
        except Exception as error:
            logger.error("%s: %s: %s", what, type(error).__name__, error)
