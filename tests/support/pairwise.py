"""A few layouts in which every pair of options meets that meets in many.

    covering([{"dp", "tp"}, {"dp"}, {"tp", "cp"}])      # [0, 2]: the second adds nothing to the first

Most faults of a layout need one option or two together, so a subset in which all pairs occur finds nearly what the full
list finds (Kuhn, Wallace, Gallo: Software Fault Interactions, IEEE TSE 2004).
"""

from collections.abc import Set as AbstractSet
from itertools import combinations

AXES = ("dp", "tp", "pp", "cp")
DEFAULTS = {"dp": ("zero", "0"), "tp": ("mode", "ALL_REDUCE"), "pp": ("engine", "1f1b"), "cp": ("method", "ring")}


def options(problem: str, layout: str) -> set[str]:
    """What a layout chooses; a model counts together with the axes that split it: `{"dp", "zero=3", "tied on dp"}`."""
    given = dict(part.split("=", 1) for part in layout.split())
    axes = [axis for axis in AXES if axis in given]
    chosen = {*axes, *(f"{problem} on {axis}" for axis in axes)}
    for axis in axes:
        key, default = DEFAULTS[axis]
        chosen.add(f"{key}={given.get(key, default)}")
    if "recompute" in given:
        chosen.add(f"recompute={given['recompute']}")
    return chosen | ({"shard", "async"} & given.keys())


def pairs(chosen: AbstractSet[str]) -> set[tuple[str, ...]]:
    """Options that meet, two at a time; a model counts by itself."""
    of_model = {option for option in chosen if " on " in option}
    return {(option,) for option in of_model} | set(combinations(sorted(chosen - of_model), 2))


def covering(layouts: list[set[str]]) -> list[int]:
    """Positions of layouts that have all pairs of the list: greedily by most new pairs, superfluous ones removed."""
    found = [pairs(layout) for layout in layouts]
    missing = set[tuple[str, ...]]().union(*found)
    chosen: list[int] = []
    while missing:
        best = max(range(len(found)), key=lambda i: len(found[i] & missing))
        chosen.append(best)
        missing -= found[best]
    for i in list(chosen):
        others = set[tuple[str, ...]]().union(*(found[j] for j in chosen if j != i))
        if found[i] <= others:
            chosen.remove(i)
    return sorted(chosen)
