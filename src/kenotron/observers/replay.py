"""What `kenotron replay` adds to the run that it repeats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kenotron.config.errors import InputError
from kenotron.data.batch import NO_LOSS
from kenotron.data.provenance import SampleOrigin, step_origins
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from kenotron.data import TokenBatch
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult


class StopAfter(Hook):
    """Stops the run after a step; its length, on which the learning rate may depend, stays what it was."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, run: Run, result: StepResult) -> None:
        """Stop if this was the step."""
        if run.step >= self.step:
            run.stop("replayed")


class Without(Hook):
    """In one step the tokens of some documents carry no loss; they are context as before."""

    def __init__(self, step: int, documents: Sequence[str]) -> None:
        self.step, self.documents = step, documents

    def before_step(self, run: Run) -> None:
        """Mask the labels."""
        if run.step + 1 == self.step:
            masks = labels_of(step_origins(run.data, self.step), self.documents)
            run.batches = [_masked(batch, masks) for batch in run.batches]


def labels_of(origins: Iterable[SampleOrigin], documents: Sequence[str]) -> dict[int, list[slice]]:
    """Sample → its labels that are tokens of `documents`, each ``FILE:NUMBER``.

    Label i is token i + 1 of the sample. Raises InputError for a document that no sample has a label of, and for
    packed rows.
    """
    found: dict[int, list[slice]] = {}
    seen: set[str] = set()
    for origin in origins:
        if origin.pieces is not None:
            raise InputError(f"--without: {origin.source} is packed, where single documents cannot be left out")
        for each in origin.documents or []:
            name = f"{origin.file}:{each.document}"
            assert origin.first_token is not None
            begin, end = (token - origin.first_token - 1 for token in (each.first_token, each.end_token))
            if name in documents and end > 0:
                found.setdefault(origin.sample, []).append(slice(max(begin, 0), end))
                seen.add(name)
    if missing := [name for name in documents if name not in seen]:
        raise InputError(f"--without: the step has no label of {missing[0]}; `kenotron data which` lists its documents")
    return found


def _masked(batch: TokenBatch, masks: dict[int, list[slice]]) -> TokenBatch:
    labels = batch.labels.copy()
    for sample in set(batch.sample_ids.tolist()):
        rows = batch.sample_ids == sample  # several, where sequences are folded
        flat = labels[rows].reshape(-1)
        for place in masks.get(sample, []):
            flat[place] = NO_LOSS
        labels[rows] = flat.reshape(labels[rows].shape)
    return replace(batch, labels=labels)
