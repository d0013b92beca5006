"""What a user might bring: hooks, an optimizer, a token source. Named in configs as ``user_parts.…``."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from kenotron.train import Hook


class SlowStep(Hook):
    """Sleeps within every step, once the step has been written down."""

    def after_step(self, run: Any, result: Any) -> None:
        time.sleep(30)


class Poison(Hook):
    """Puts NaN into a weight's gradient (by a hook on the tensor) at the given steps."""

    def __init__(self, steps: list[int], value: float = float("nan")) -> None:
        self.steps, self.value = steps, value
        self.handle: Any = None

    def before_step(self, run: Any) -> None:
        if run.step + 1 in self.steps:
            parameter = next(run.model.parameters())
            self.handle = parameter.register_post_accumulate_grad_hook(self._spoil)

    def _spoil(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.fill_(self.value)

    def after_step(self, run: Any, result: Any) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


def counting(sequence_length: int, seed: int, start: int = 0, rows: int = 1000) -> list[np.ndarray]:
    """A token source: sample i is i, i + 1, … modulo 64, from `start` on."""
    base = np.arange(sequence_length + 1, dtype=np.int64)
    return [(base + row + start) % 64 for row in range(rows)]
