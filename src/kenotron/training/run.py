"""A run: its parts and state, and the training loop.

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
    """Raised on a rank that is asked to stop while it waits for data; no `Exception`, which readers would retry."""


@dataclass
class Run:
    """All parts and the state of one training run. `step` counts completed steps."""

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
    teach: Callable[[MicroBatch], MicroBatch] | None = None  # with distillation, on ranks with the head
    checkpoints: Checkpoints = field(kw_only=True)

    # The state of the run, which changes from step to step; the fields above are constant.
    step: int = 0
    loss_scale: float = 1.0  # of the current step: float16's gradients are multiplied by it
    stop_requested: str | None = None  # this rank's reason to stop
    waiting_for_data: bool = False
    batches: Sequence[TokenBatch] = ()  # this rank's micro-batches of the current or last step
    stop_reason: str | None = None  # set once all ranks agreed to do no further step
    seconds: float = 0.0  # spent in this process's steps, including waits for data
    data_wait_seconds: float = 0.0
    last_result: StepResult | None = None
    recorded: dict[str, float] = field(default_factory=dict)  # metrics of hooks for the next line
    off_console: set[str] = field(default_factory=set)  # names of recorded metrics that the console does not show
    last_metrics: dict[str, float] = field(default_factory=dict)  # the last line, on rank 0

    @property
    def model(self) -> Decoder:
        """The model; with pp, this rank's first part of it."""
        return self.parts[0]

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """The tokenizer of the data; None if they are token ids without one."""
        return self.data.tokenizer

    @property
    def roots(self) -> Sequence[nn.Module]:
        """The modules that are called, which data parallelism wraps: the model, or with pp the stages around it."""
        return self.parts if self.pipeline is None else self.pipeline.stages

    @property
    def consumed_samples(self) -> int:
        """The number of samples of all completed steps."""
        return self.data.samples_before(self.step + 1)

    @property
    def consumed_tokens(self) -> int:
        """The number of tokens of all completed steps."""
        return self.data.tokens_before(self.step + 1)

    @property
    def end(self) -> int:
        """The run's last step: `tokens.train_steps`, or later for a run that restarts the schedule."""
        return self.start.end(self.config)

    @property
    def last_step(self) -> int:
        """The last step that the run can do: `end`, or earlier if the data of the stages so far are exhausted."""
        return self.data.last_step(max(self.step, 1, self.start.data_start + 1))

    @property
    def total_tokens(self) -> int:
        """The number of tokens of all steps up to `last_step`."""
        return self.data.tokens_before(self.last_step + 1)

    @property
    def step_tokens(self) -> int:
        """The number of tokens of the last completed step."""
        return self.consumed_tokens - self.data.tokens_before(self.step)

    @property
    def interrupted(self) -> bool:
        """Whether the run stops before its last step, so that hooks should not start optional work."""
        return self.stop_reason is not None and not self.finished

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or the data allow no further step."""
        return self.step >= self.end or self.data.exhausted(self.step + 1) is not None

    def stop(self, reason: str) -> None:
        """Ask the run to end after the current step; may be called on a single rank, also from a signal handler.

        In a signal handler it interrupts a wait for data with `StopWhileWaiting`: a source that hangs must not cost the
        steps since the last checkpoint.
        """
        self.stop_requested = self.stop_requested or reason
        if self.waiting_for_data and threading.current_thread() is threading.main_thread():
            self.waiting_for_data = False
            raise StopWhileWaiting

    def sync_stop_request(self) -> None:
        """Set `stop_reason` on all ranks if any rank was asked to stop: a signal reaches ranks at different steps."""
        if self.stop_reason is not None or self.mesh.world_size == 1:
            self.stop_reason = self.stop_reason or self.stop_requested
        elif any_rank(self.stop_requested is not None, self.mesh.world_size, self.device):
            self.stop_reason = next(reason for reason in gather(self.stop_requested) if reason)

    def record_metric(
        self, name: str, value: float, reduce: Literal["mean", "min", "max"] | None = None, *, on_console: bool = True
    ) -> None:
        """Add a number to the next line of metrics: in ``metrics.jsonl``, `on_console` and in TensorBoard.

        Until a hook's `after_step`, this is the current step's line. The value of rank 0 is written; with `reduce`,
        the reduced value of all ranks, which then all have to make the call. A name that the line already has raises
        an error when the line is written.
        """
        if not isinstance(name, str):
            raise InputError(f"record_metric: expected a name, found {name!r}")
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:  # a text, a list, a tensor of several numbers
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
    """Return the micro-batches of the next step, or None if this rank is asked to stop, even if it waits for data."""
    try:
        run.waiting_for_data = True
        batches = None if run.stop_requested else next(loader)
        run.waiting_for_data = False
        return batches
    except StopWhileWaiting:
        return None


def report_failure(run: Run, error: Exception) -> None:
    """Call every hook's `on_error`, and log its errors, so that `error` remains the cause of the failure."""
    _call_each([partial(hook.on_error, run, error) for hook in run.hooks], "a hook's on_error")


def close(run: Run) -> None:
    """Release the resources of hooks and data, and log errors, so that an earlier error remains the cause."""
    hooks = (partial(hook.on_close, run) for hook in run.hooks)
    _call_each([*hooks, run.checkpoints.close, run.data.close], "closing the run")


def _call_each(calls: Sequence[Callable[[], None]], what: str) -> None:
    for call in calls:
        try:
            call()
        except Exception as error:
            logger.error("%s: %s: %s", what, type(error).__name__, error)
