"""What a rule returns; `findings` fills in its name."""

from __future__ import annotations

from kenotron.doctor.facts import Finding


def error(what: str, do: str) -> Finding:
    """Training fails, or computes something else."""
    return Finding("", "error", what, do)


def warning(what: str, do: str) -> Finding:
    """Training may fail later, or a run is slow for a reason that is easily removed."""
    return Finding("", "warning", what, do)


def hint(what: str, do: str) -> Finding:
    """The machine works; this would make it faster, or is good to know."""
    return Finding("", "hint", what, do)
