"""`tokens`: how long a sequence is, how many make a step, how many steps make the run, and validation."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from kenotron.config.section import OURS, Section, key


def _never_or_positive(value: int) -> int:
    if value == 0 or value < -1:
        raise PydanticCustomError("expected", "-1 (never) or a number of steps above 0")
    return value


class Tokens(Section):
    sequence_length: int = key("Tokens of one training sequence.", ge=1)
    train_steps: int = key("Optimizer steps of the whole run.", ge=1)
    micro_batch_size: int = key("Sequences that go through the model at once on one replica.", ge=1)
    batch_accumulation_per_replica: int = key("Micro-batches whose gradients are summed into one optimizer step.", ge=1)
    val_check_interval: Annotated[int, AfterValidator(_never_or_positive)] = key(
        "Steps between two validations; -1: never.", -1
    )
    limit_val_batches: int = key(
        "Global batches of held-out sequences that one validation runs; 0: none, -1: all.", 0, ge=-1
    )
    limit_test_batches: int = key(
        "Global batches of a test after the run; 0: none, -1: all (only 0 is supported yet).", 0, ge=-1
    )
    val_samples: int | None = key(
        "Cap on the held-out sequences of one validation, beside limit_val_batches (which is then not 0).",
        None,
        ge=1,
        mark=OURS,
    )
    val_fraction: float = key(
        "Share of the documents held out, chosen by their hash (of two or more at least one); also where the run "
        "never validates.",
        0.005,
        gt=0,
        lt=1,
        mark=OURS,
    )

    @property
    def validates(self) -> bool:
        """Whether the run validates. Documents are held out in any case: the training data do not depend on it."""
        return self.val_check_interval > 0 and self.limit_val_batches != 0
