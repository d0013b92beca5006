"""`logging.sample_prompts`: completions of some prompts, before and after training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kenotron.generation import ModelOnRanks, SamplingOptions, generate
from kenotron.runs.files import SAMPLES
from kenotron.training.console import logger
from kenotron.training.hooks import Hook
from kenotron.training.metrics import drop_later_steps
from kenotron.training.run_folder import append_line, log_folder

if TYPE_CHECKING:
    from kenotron.training.run import Run


class SampleCompletions(Hook):
    """Logs completions of `logging.sample_prompts` before the first step and after the last, also in `samples.jsonl`.

    All ranks of the run decode the same prompts in lockstep, because they gather sharded weights together.
    """

    priority = -70
    MAX_NEW_TOKENS = 64

    def on_train_start(self, run: Run) -> None:
        """Complete the prompts with the initial weights."""
        if run.mesh.is_first:
            drop_later_steps(log_folder(run.config) / SAMPLES, run.step - 1)  # this step's lines are written again
        self._show(run, "before training" if run.step == 0 else f"after step {run.step}")

    def on_train_end(self, run: Run) -> None:
        """Complete the prompts with the final weights."""
        self._show(run, f"after step {run.step}")

    def _show(self, run: Run, when: str) -> None:
        prompts = run.config.logging.sample_prompts or []
        completions = generate(
            ModelOnRanks(run.parts, run.mesh, run.device, run.pipeline, lockstep=True),
            run.tokenizer,
            prompts,
            SamplingOptions(
                max_new_tokens=self.MAX_NEW_TOKENS, temperature=0.8, top_p=0.95, seed=run.config.general.seed
            ),
        )
        for prompt, completion in zip(prompts, completions):
            logger.info("Sample %s, continuing %r:\n%s", when, prompt, prompt + completion.text)
            if run.mesh.is_first:
                line = {"iteration": run.step, "prompt": prompt, "completion": completion.text}
                append_line(run.config, SAMPLES, line)
