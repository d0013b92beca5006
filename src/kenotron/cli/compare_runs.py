"""`kenotron compare logs/a logs/b`: what two runs have logged, side by side, and the keys in which they differ."""

from math import nan
from pathlib import Path

from kenotron.config.errors import InputError
from kenotron.runs.logged import read_run

ROWS = 12  # steps of the table


def compare_runs(a: Path, b: Path) -> None:
    """Print how the configs of two runs' folders differ, and their losses at the steps that both have."""
    from kenotron.config import diff, load

    for path, old, new in diff(load(config_file(a)), load(config_file(b))):
        print(f"{path}: {old!r} -> {new!r}")
    ours, theirs = (read_run(run).steps for run in (a, b))
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        raise InputError(f"{a} and {b} have no step in common")
    names = [name for name in ("lm_loss", "val_loss") if any(name in ours[s] and name in theirs[s] for s in both)]
    for name in names:
        steps = [step for step in both if name in ours[step] and name in theirs[step]]
        pairs = {step: (_number(ours[step][name]), _number(theirs[step][name])) for step in steps}
        apart = next((step for step in steps if str(pairs[step][0]) != str(pairs[step][1])), None)  # nan is nan
        print(f"{name}: " + ("equal at every step" if apart is None else f"equal until step {apart}"))
        shown = steps[:: max(1, len(steps) // ROWS)]
        for step in dict.fromkeys([*shown, *steps[-1:]]):
            x, y = pairs[step]
            print(f"  step {step}: {x:.6g}  {y:.6g}  difference {y - x:+.3g}")


def _number(value: object) -> float:
    """A logged number; NaN where the loss was not finite, which JSON has no number for."""
    return float(value) if isinstance(value, int | float) else nan


def config_file(path: Path) -> Path:
    """A config, or that of a run's or checkpoint's folder. Raises InputError for a folder without one."""
    if not path.is_dir():
        return path
    if not (path / "config.yaml").exists():
        raise InputError(f"{path}: expected a config, or the folder of a run or checkpoint, with config.yaml")
    return path / "config.yaml"
