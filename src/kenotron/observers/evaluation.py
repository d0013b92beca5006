"""`evaluation`: tasks of lm-evaluation-harness on each checkpoint, in a separate process beside training.

    save 10 ──▶ checkpoint 10 complete ──▶ evaluated beside the steps 12, 13, … ──▶ "evaluation: 10 | hellaswag acc …"

One evaluation runs at a time. The next checkpoint waits, protected from retention, and is replaced by a newer one: if
evaluations take longer than the steps between checkpoints, some are left out, with a warning. The run waits for the
last evaluation before it ends, unless it is asked to stop; then the next start does that evaluation.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kenotron.config.errors import InputError
from kenotron.evaluation.worker import Worker
from kenotron.runs.files import logged_step
from kenotron.training.console import logger
from kenotron.training.hooks import Hook
from kenotron.training.metrics import EvaluationResult
from kenotron.training.run_folder import log_folder

if TYPE_CHECKING:
    from typing import Any

    from kenotron.config.evaluation import Evaluation
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult


class EvaluationHook(Hook):
    """Passes each checkpoint that is due to a `Worker` for evaluation; only on rank 0."""

    priority = -65  # after the checkpoint and its export

    def __init__(self, settings: Evaluation) -> None:
        self.settings = settings
        self.worker: Worker | None = None
        self.current: Path | None = None  # the checkpoint that is being evaluated
        self.waiting: Path | None = None

    def on_train_start(self, run: Run) -> None:
        """Load the tasks, and repeat an interrupted evaluation. Raises InputError if a task cannot be loaded."""
        logger.info("Evaluation: loading %s", ", ".join(self.settings.tasks))
        folder = log_folder(run.config) / "evaluation"
        local = {} if self.settings.srun is None else {"srun": None, "device": "cpu"}
        self.worker = Worker(self.settings.model_copy(update=local), folder)
        answer = self.worker.answer(None)
        assert answer is not None
        if "problem" in answer:
            self.worker.stop()
            raise InputError(answer["problem"])
        if self.settings.srun is not None:  # the tasks are valid: training starts while the job waits in Slurm's queue
            self.worker.stop()
            self.worker = Worker(self.settings, folder)
        path = run.config.checkpoint_folder / str(run.start.durable_step)
        logged = logged_step(log_folder(run.config), run.start.durable_step)
        if path.is_dir() and not any(name.startswith("eval/") for name in logged):
            self.on_save(run, path)

    def on_save(self, run: Run, path: Path) -> None:
        """Evaluate the checkpoint, now or when the previous evaluation is done."""
        interval, step = self.settings.eval_interval, int(path.name)
        if interval is not None and step % interval and not run.finished:
            return
        run.checkpoints.protected.add(("evaluation", step))
        if self.waiting is not None:
            logger.warning("evaluation: %s is left out: evaluations take longer than the steps between", self.waiting)
            self._release(run, self.waiting)
        self.waiting = path
        self._next(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Log an evaluation that is done."""
        self._poll(run)

    def on_train_end(self, run: Run) -> None:
        """Wait for the remaining evaluations, unless a signal has ended the run."""
        if self.current is not None and not run.interrupted:
            logger.info("Waiting for the evaluation of step %s", (self.waiting or self.current).name)
        while self.current is not None and run.stop_requested is None:
            self._poll(run, wait_s=1)
        if self.current is not None:
            logger.warning("evaluation of step %s: the next start makes up for it", (self.waiting or self.current).name)

    def on_close(self, run: Run) -> None:
        """End the process."""
        if self.worker is not None:
            self.worker.stop()

    def _next(self, run: Run) -> None:
        """Start to evaluate the waiting checkpoint, if no evaluation runs."""
        if self.current is not None or self.waiting is None:
            return
        self.current, self.waiting = self.waiting, None
        try:
            if self.worker is None or self.worker.ended:
                self.worker = Worker(self.settings, log_folder(run.config) / "evaluation")
            self.worker.ask(self.current)
        except (InputError, OSError) as error:  # a full disk, no process left, a machine without srun
            self._finish(run, self.current, {"problem": str(error)})

    def _poll(self, run: Run, wait_s: float = 0) -> None:
        if self.current is None or self.worker is None or (answer := self.worker.answer(wait_s)) is None:
            return
        if "ready" not in answer:  # "ready" comes from a process that was restarted
            self._finish(run, self.current, answer)
            self._next(run)

    def _finish(self, run: Run, path: Path, answer: dict[str, Any]) -> None:
        """Complete the evaluation of a checkpoint: log its results or its problem."""
        self.current = None
        self._release(run, path)
        if "problem" in answer:
            logger.error("evaluation of step %s: %s; training goes on", path.name, answer["problem"])
        else:
            self._log(run, int(path.name), answer)

    def _log(self, run: Run, step: int, answer: dict[str, Any]) -> None:
        numbers, parts = {}, []
        for task, metrics in answer["results"].items():
            for name, (value, stderr) in metrics.items():
                numbers[f"eval/{task}/{name}"] = value
                if stderr is not None:
                    numbers[f"eval/{task}/{name}_stderr"] = stderr
            shown = (f"{name} {value:.4g}" + (f" ± {err:.2g}" if err else "") for name, (value, err) in metrics.items())
            parts.append(f"{task} {', '.join(shown)}")
        logger.info("%s", " | ".join([f"evaluation: {step}", *parts, f"seconds: {answer['seconds']:.1f}"]))
        for hook in run.hooks:
            hook.after_evaluation(run, EvaluationResult(step, numbers))

    def _release(self, run: Run, path: Path) -> None:
        run.checkpoints.protected.discard(("evaluation", int(path.name)))
