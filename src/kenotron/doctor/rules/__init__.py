"""Combinations that are known to be bad, and what would make a machine faster: a table of small pure functions.

    def small_shm(facts: Facts) -> Finding | None:          memory.py
        …
    findings(Facts(memory=Memory(shm_total=64 << 20)))      [Finding("small-shm", "warning", "/dev/shm has …", …)]

A rule says what it can decide from facts, and nothing of facts that are unknown. To add one: the function, its name in
`RULES` below it, and a line in tests/doctor/test_rules.py with facts that it finds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kenotron.doctor.facts import Facts, Finding
from kenotron.doctor.rules import accelerators, memory, network, processor, software

RULES: tuple[Callable[[Facts], Finding | None], ...] = (
    *software.RULES,
    *accelerators.RULES,
    *processor.RULES,
    *memory.RULES,
    *network.RULES,
)
SEVERITIES = ("error", "warning", "hint")


def name_of(rule: Callable[[Facts], Finding | None]) -> str:
    """``small-shm`` of the function `small_shm`."""
    return rule.__name__.replace("_", "-")


def findings(facts: Facts) -> list[Finding]:
    """What the rules say of `facts`, the gravest first."""
    found = [replace(finding, name=name_of(rule)) for rule in RULES if (finding := rule(facts)) is not None]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
