"""What gzip and xz make of the validation text, beside the model's bits per byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kenotron.data.held_out_texts import compression_baselines
from kenotron.training.console import logger
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from kenotron.training.metrics import ValidationResult
    from kenotron.training.run import Run


class Compressors(Hook):
    """Beside the last validation, what gzip and xz make of the same text. After the last save: it takes a while."""

    priority = -60

    def __init__(self) -> None:
        self.last: ValidationResult | None = None

    def after_validation(self, run: Run, result: ValidationResult) -> None:
        """Keep the result: the last one is compared at the end."""
        self.last = result

    def on_train_end(self, run: Run) -> None:
        """Compress the validation text and log the sizes; nothing if the run stopped early or its bytes are unknown."""
        if not run.finished or self.last is None or self.last.bits_per_byte is None:
            return
        baselines = compression_baselines(run.data)
        if baselines:
            beside = " | ".join(f"{name}: {bits:.3f}" for name, bits in baselines.items())
            logger.info(
                "bits per byte on the validation text: %.3f | for comparison: %s",
                self.last.bits_per_byte,
                beside,
            )
