"""The memory of a process and of all that it started."""

from __future__ import annotations

from pathlib import Path


def tree_mib(process: int) -> float:
    """MiB of a process and its descendants: Linux's proportional set sizes (PSS), which count shared pages once."""
    folder = Path(f"/proc/{process}")
    try:
        lines = (folder / "smaps_rollup").read_text().splitlines()
        children = [int(child) for each in folder.glob("task/*/children") for child in each.read_text().split()]
    except OSError:  # it has ended
        return 0.0
    own = next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return own / 2**10 + sum(map(tree_mib, children))
