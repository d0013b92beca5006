"""`kenotron compare logs/a logs/b`: compare the configs and the logged losses of two runs."""

from math import nan
from pathlib import Path

from kenotron.config.errors import InputError
from kenotron.runs.logged import read_run

ROWS = 12  # steps of the table


def compare_runs(a: Path, b: Path) -> None:
    """Print the differences between the configs of two run folders, and the losses at the steps that both have."""
    from kenotron.config import diff, load

    steps_a, steps_b = read_run(a).steps, read_run(b).steps
    for path, old, new in diff(load(config_file(a)), load(config_file(b))):
        print(f"{path}: {old!r} -> {new!r}")
    common = sorted(steps_a.keys() & steps_b.keys())
    if not common:
        raise InputError(f"{a} and {b} have no step in common")
    for name in ("lm_loss", "val_loss"):
        steps = [step for step in common if name in steps_a[step] and name in steps_b[step]]
        if not steps:
            continue
        pairs = {step: (_number(steps_a[step][name]), _number(steps_b[step][name])) for step in steps}
        differing = next((step for step in steps if str(pairs[step][0]) != str(pairs[step][1])), None)  # NaN equals NaN
        print(f"{name}: " + ("equal at every step" if differing is None else f"equal until step {differing}"))
        sampled = steps[:: max(1, len(steps) // ROWS)]
        for step in dict.fromkeys([*sampled, *steps[-1:]]):
            x, y = pairs[step]
            print(f"  step {step}: {x:.6g}  {y:.6g}  difference {y - x:+.3g}")


def _number(value: object) -> float:
    """Return a logged number; NaN if the loss was not finite, which JSON has no number for."""
    return float(value) if isinstance(value, int | float) else nan


def config_file(path: Path) -> Path:
    """Return `path`, or the config of a folder of a run or checkpoint."""
    return path / "config.yaml" if path.is_dir() else path
