"""Compare two layouts of one config by five short runs: `kenotron compare` and `kn.compare`.

The runs are the config itself, three times the config with small changes of its weights (as rounding may make), and the
config on the other layout. `training.compare` compares their losses, gradients and weights.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kenotron.config import Config, load, refuse_unsupported, same_run_difference
from kenotron.config.errors import InputError, counted
from kenotron.config.overrides import check_overrides
from kenotron.config.runs import same_batch_overrides
from kenotron.text.progress import Report

if TYPE_CHECKING:
    from kenotron.training.compare import Comparison


def compare(
    config: Config | str | Path,
    overrides: Sequence[str] = (),
    *,
    other: Config | str | Path | None = None,
    steps: int = 10,
    dtype: str | None = None,
    say: Report = lambda line: print(line, file=sys.stderr),
) -> Comparison:
    """Train `steps` steps on both layouts, and return the differences and whether rounding explains them.

    The other layout is `config` with `overrides`, or the config `other` with them; it keeps the global batch. `dtype`
    replaces the dtype of both: float32 shows much smaller faults than bfloat16. `say` gets a line for each run.

    Raises InputError for two different runs, more steps than they have, or a config that cannot be trained.
    """
    check_overrides(overrides)
    check_count("steps", steps)
    common = [] if dtype is None else [f"model.dtype={dtype}"]
    plain = load(config, common)
    other_layout = on_layout(other or config, plain, [*overrides, *common], say)
    _check(plain, other_layout, steps)
    from kenotron.interop import resolve_architecture
    from kenotron.launch import work_on_ranks
    from kenotron.launch.training import record
    from kenotron.training.compare import SEEDS, backward_order, distances, judge

    runs = [("as it is", plain, 0)]
    runs += [("weights changed as rounding might", plain, seed) for seed in SEEDS]
    runs += [(" ".join(overrides) or "the other layout", other_layout, 0)]
    measured = []
    names = backward_order(resolve_architecture(plain))
    with tempfile.TemporaryDirectory(prefix="kenotron-compare-") as temporary:
        for number, (name, run, seed) in enumerate(runs):
            ranks = counted(run.parallelism.world_size, "rank")
            say(f"run {number + 1} of {len(runs)}: {name}, {counted(steps, 'step')} on {ranks}")
            folder = Path(temporary) / str(number)
            work_on_ranks(run, record, steps=steps, seed=seed, folder=str(folder))
            measured.append(distances(Path(temporary) / "0", folder, names))
            if number:
                shutil.rmtree(folder)  # its size is four times the weights
    a, *rounding, b = measured
    return judge(a, rounding, b)


def check_count(name: str, value: object) -> None:
    """Raise InputError unless `value`, the argument `name` of a function, is an integer of 1 or more."""
    if not isinstance(value, int) or value < 1:
        raise InputError(f"{name}: expected an integer of 1 or more, found {value!r:.60}")


def on_layout(config: Config | str | Path, plain: Config, overrides: Sequence[str], say: Report) -> Config:
    """Return `config` with `overrides`, and with micro-batches divided to keep the global batch of `plain`."""
    # A ramp may be valid only with the divided micro-batches, so it is left out at first.
    ramps = (i for i, stage in enumerate(plain.data_stages) if stage.batch_size_ramp is not None)
    no_ramps = [f"data_stages.{i}.batch_size_ramp=null" for i in ramps]
    other = load(config, [*overrides, *no_ramps])
    batch = plain.global_batch_size
    if other.global_batch_size == batch:
        return load(config, overrides)
    if any(override.startswith("tokens.") for override in overrides):
        raise InputError(
            f"the other layout has a global batch of {other.global_batch_size} sequences, this config {batch}: they "
            "would be different runs"
        )
    split = same_batch_overrides(plain, other.parallelism.dp)
    say(f"The global batch stays {batch}: {' '.join(split)}")
    return load(config, [*overrides, *split])


def _check(plain: Config, other: Config, steps: int) -> None:
    """Raise InputError before the first run if the two configs cannot be compared."""
    for config in (plain, other):
        refuse_unsupported(config)
    difference = same_run_difference(plain, other)
    if difference is not None:
        key, first, second = difference
        raise InputError(
            f"{key}: {first!r} and {second!r} are different runs; expected two layouts of "
            "one run (`kenotron config diff` lists the keys; `kenotron compare logs/A logs/B` compares logged losses)"
        )
    fewest = min(plain.tokens.train_steps, other.tokens.train_steps)
    if steps > fewest:
        raise InputError(f"--steps: expected at most tokens.train_steps {fewest}, found {steps}")
