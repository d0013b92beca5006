"""Two layouts of one config, compared by five short runs: `kenotron compare` and `kn.compare`.

The config as it is, three times with its weights changed a little (what rounding may do), and the config on the other
layout. What is compared, and how, is in `training.compare`.
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
    """Train `steps` steps of `config` and of the other layout: what differs, and whether rounding explains it.

    The other layout is `config` with `overrides`, or the config `other` with them; it keeps the global batch. `dtype`
    replaces that of both: float32 sees much smaller faults than bfloat16. `say` gets a line for each of the five runs.

    Raises InputError: two different runs, more steps than they have, a config that cannot be trained.
    """
    both = [] if dtype is None else [f"model.dtype={dtype}"]
    plain = load(config, both)
    there = on_layout(other or config, plain, [*overrides, *both], say)
    _check(plain, there, steps)
    from kenotron.interop import resolve_architecture
    from kenotron.launch import work_on_ranks
    from kenotron.launch.training import record
    from kenotron.training.compare import SEEDS, backward_order, distances, judge

    runs = [("as it is", plain, 0)]
    runs += [("weights changed as rounding might", plain, seed) for seed in SEEDS]
    runs += [(" ".join(overrides) or "the other layout", there, 0)]
    measured = []
    names = backward_order(resolve_architecture(plain))
    with tempfile.TemporaryDirectory(prefix="kenotron-compare-") as temporary:
        for number, (name, each, seed) in enumerate(runs):
            ranks = counted(each.parallelism.world_size, "rank")
            say(f"run {number + 1} of {len(runs)}: {name}, {counted(steps, 'step')} on {ranks}")
            folder = Path(temporary) / str(number)
            work_on_ranks(each, record, steps=steps, seed=seed, folder=str(folder))
            measured.append(distances(Path(temporary) / "0", folder, names))
            if number:
                shutil.rmtree(folder)  # four times the weights
    a, *rounding, b = measured
    return judge(a, rounding, b)


def on_layout(config: Config | str | Path, plain: Config, overrides: Sequence[str], say: Report) -> Config:
    """`config` with `overrides`, the micro-batches divided so that the global batch stays that of `plain`."""
    # A ramp comes out for micro-batches that are divided already: until then it is left out.
    ramps = (i for i, stage in enumerate(plain.data_stages) if stage.batch_size_ramp is not None)
    no_ramps = [f"data_stages.{i}.batch_size_ramp=null" for i in ramps]
    other = load(config, [*overrides, *no_ramps])
    wanted, found = plain.global_batch_size, other.global_batch_size
    if wanted == found:
        return load(config, overrides)
    if any(override.startswith("tokens.") for override in overrides):
        raise InputError(
            f"the other layout has a global batch of {found} sequences, this config {wanted}: they would be "
            "different runs"
        )
    split = same_batch_overrides(plain, other.parallelism.dp)
    say(f"The global batch stays {wanted}: {' '.join(split)}")
    return load(config, [*overrides, *split])


def _check(plain: Config, other: Config, steps: int) -> None:
    """Everything that is wrong with the two configs, before the first run."""
    for config in (plain, other):
        refuse_unsupported(config)
    difference = same_run_difference(plain, other)
    if difference is not None:
        key, ours, theirs = difference
        raise InputError(
            f"{key}: {ours!r} and {theirs!r} are different runs; expected two layouts of "
            "one run (`kenotron config diff` lists the keys; `kenotron compare logs/A logs/B` compares logged losses)"
        )
    fewest = min(plain.tokens.train_steps, other.tokens.train_steps)
    if steps > fewest:
        raise InputError(f"--steps: expected at most tokens.train_steps {fewest}, found {steps}")
