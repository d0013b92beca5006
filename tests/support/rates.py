"""The learning rate of an optimizer that is stepped by hand."""

import torch

from kenotron.config.optimizer import LearningRateScheduler
from kenotron.optim.groups import set_learning_rates


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """As a step of training at that rate."""
    set_learning_rates(optimizer, LearningRateScheduler(learning_rate=rate, lr_decay_style="constant"), 1, 1)
