"""`tokens`: sequence length, batch size, number of steps, and validation."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

from kenotron.config.data_stages import PlainDataset
from kenotron.config.section import Section, key, our_key


def _never_or_positive(value: int) -> int:
    if value == 0 or value < -1:
        raise PydanticCustomError("expected", "-1 (never) or a number of steps above 0")
    return value


def _not_zero(value: object) -> object:
    if value == 0 and not isinstance(value, bool):
        raise PydanticCustomError(
            "expected", "a number above 0 (1e-9 holds out one document, or sample, and trains on all others)"
        )
    return value


class Tokens(Section):
    """Sequence length, batch size, steps, validation."""

    sequence_length: int = key("Tokens of one training sequence.", ge=1)
    train_steps: int = key("Optimizer steps of the whole run.", ge=1)
    micro_batch_size: int = key("Sequences per forward pass on one replica.", ge=1)
    batch_accumulation_per_replica: int = key("Micro-batches accumulated per optimizer step on each replica.", ge=1)
    val_check_interval: Annotated[int, AfterValidator(_never_or_positive)] = key(
        "Steps between validations, or as many of val_check_unit; -1: never.", -1
    )
    val_check_unit: Literal["steps", "tokens", "epochs"] = our_key(
        "What val_check_interval counts; epochs are those of the first source of a stage.", "steps"
    )
    limit_val_batches: int = key("Global batches of held-out sequences per validation; 0: none, -1: all.", 0, ge=-1)
    val_samples: int | None = our_key(
        "Maximum number of held-out sequences per validation, in addition to limit_val_batches (which must not be 0).",
        None,
        ge=1,
    )
    val_fraction: Annotated[float, BeforeValidator(_not_zero)] = our_key(
        "Fraction of the documents that is held out, chosen by their hash (at least one of two or more documents). "
        "They are held out even if the run never validates.",
        0.005,
        gt=0,
        lt=1,
    )
    val_datasets: list[PlainDataset] | None = our_key(
        "Datasets to validate on, each completely; null: the documents held out of the first stage.", None, min_length=1
    )
    limit_test_batches: int = key(
        "Global batches of test_datasets that the run is tested on after its last step; 0: none, -1: all.", 0, ge=-1
    )
    test_datasets: list[PlainDataset] | None = our_key(
        "Datasets to test on, each completely, once after the last step (limit_test_batches).", None, min_length=1
    )

    @property
    def validates(self) -> bool:
        """Whether the run validates. Documents are held out either way, so the training data do not depend on it."""
        return self.val_check_interval > 0 and self.limit_val_batches != 0

    @property
    def evaluated(self) -> list[tuple[str, PlainDataset]]:
        """(config key, dataset) of the datasets for validation, then for test."""
        lists = {"tokens.val_datasets": self.val_datasets, "tokens.test_datasets": self.test_datasets}
        return [(f"{key}.{i}", dataset) for key, datasets in lists.items() for i, dataset in enumerate(datasets or ())]
