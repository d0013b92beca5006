"""Which layouts a model can be decoded on: pipeline stages of at least one layer, heads that tp divides."""

from __future__ import annotations

from kenotron.config.decoder import DecoderArchitecture
from kenotron.config.errors import InputError
from kenotron.config.parallelism import Parallelism


def check_layout(model: DecoderArchitecture, layout: Parallelism) -> None:
    """Raise InputError if the model's shapes do not allow a degree; it is named as on the command line, ``--tp``."""
    problems = [f"--tp: {problem}" for problem in model.tp_problems(layout.tp)]
    if layout.pp > model.num_hidden_layers:
        problems.append(f"--pp: expected at most num_hidden_layers {model.num_hidden_layers} stages, found {layout.pp}")
    if problems:
        raise InputError("\n".join(problems))
