"""`kenotron compare my.yaml parallelism.tp=2 parallelism.pp=2`: two layouts of one config, one verdict.

Five short runs: the config as it is, three times with its weights changed a little (what rounding may do), and the
config on the other layout. Exit code 0: they agree; 1: they do not.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kenotron.config.errors import InputError, counted, no_such_path

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.training.compare import Comparison


class Dtype(StrEnum):
    """Values of `--dtype`."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def compare(
    file: Annotated[Path, typer.Argument(help="The YAML file of the run.")],
    overrides: Annotated[
        list[str], typer.Argument(help="The other layout, such as parallelism.tp=2, or a YAML file with it.")
    ],
    steps: Annotated[int, typer.Option(help="Steps to train on each layout.", min=1)] = 10,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Run both layouts in this dtype; float32 sees much smaller faults.")
    ] = None,
) -> None:
    """Train a few steps on two layouts, and check that they agree up to rounding.

    Of two folders of runs (logs/a logs/b) print the keys and losses in which they differ instead.
    """
    from kenotron.config import load

    second = Path(overrides[0]) if "=" not in overrides[0] else None
    if second is not None and (file.is_dir() or second.is_dir()):
        from kenotron.cli.compare_runs import compare_runs

        if len(overrides) > 1:
            raise InputError(f"expected two folders of runs, found {counted(len(overrides) + 1, 'argument')}")
        compare_runs(file, second)
        return
    both = [] if dtype is None else [f"model.dtype={dtype}"]
    plain = load(file, both)
    if second is not None and not second.exists():
        raise no_such_path("expected an override key=value, or another config", second)
    other = on_layout(second or file, plain, [*overrides[second is not None :], *both])
    _check(plain, other, steps)
    from kenotron.interop import resolve_architecture
    from kenotron.launch import work_on_ranks
    from kenotron.launch.training import record
    from kenotron.training.compare import SEEDS, backward_order, distances, judge

    runs = [("as it is", plain, 0)]
    runs += [("weights changed as rounding might", plain, seed) for seed in SEEDS]
    runs += [(" ".join(overrides), other, 0)]
    measured = []
    names = backward_order(resolve_architecture(plain))
    with tempfile.TemporaryDirectory(prefix="kenotron-compare-") as temporary:
        for number, (name, config, seed) in enumerate(runs):
            ranks = config.parallelism.world_size
            print(
                f"run {number + 1} of {len(runs)}: {name}, {counted(steps, 'step')} on {counted(ranks, 'rank')}",
                file=sys.stderr,
            )
            folder = Path(temporary) / str(number)
            work_on_ranks(config, record, steps=steps, seed=seed, folder=str(folder))
            measured.append(distances(Path(temporary) / "0", folder, names))
            if number:
                shutil.rmtree(folder)  # four times the weights
    a, *rounding, b = measured
    comparison = judge(a, rounding, b)
    _print(comparison, plain.model.dtype)
    if not comparison.agrees:
        raise typer.Exit(1)


def on_layout(file: Path, plain: Config, overrides: Sequence[str]) -> Config:
    """The config of `file` with `overrides`, at the batch sizes that it has as `plain`."""
    from kenotron.config import load

    return load(file, at_one_batch_size(file, plain, overrides))


def at_one_batch_size(file: Path | Config, plain: Config, overrides: Sequence[str]) -> list[str]:
    """The overrides, with the micro-batches divided so that the global batch stays that of `plain`."""
    from kenotron.config import load
    from kenotron.config.runs import same_batch_overrides

    # A ramp comes out for micro-batches that are divided already: until then it is left out.
    no_ramps = [f"data_stages.{i}.batch_size_ramp=null" for i in range(len(plain.data_stages))]
    other = load(file, [*overrides, *no_ramps])
    wanted, found = plain.global_batch_size, other.global_batch_size
    if wanted == found:
        return list(overrides)
    if any(override.startswith("tokens.") for override in overrides):
        raise InputError(
            f"the other layout has a global batch of {found} sequences, this config {wanted}: they would be "
            "different runs"
        )
    split = same_batch_overrides(plain, other.parallelism.dp)
    print(f"The global batch stays {wanted}: {' '.join(split)}", file=sys.stderr)
    return [*overrides, *split]


def _check(plain: Config, other: Config, steps: int) -> None:
    """Everything that is wrong with the two configs, before the first run."""
    from kenotron.config import refuse_unsupported, same_run_difference, to_dict

    for config in (plain, other):
        refuse_unsupported(config)
    difference = same_run_difference(to_dict(plain), other)
    if difference is not None:
        key, ours, theirs = difference
        raise InputError(
            f"{key}: {ours!r} and {theirs!r} are different runs; expected two layouts of "
            "one run (`kenotron config diff` lists the keys; `kenotron compare logs/A logs/B` compares logged losses)"
        )
    fewest = min(plain.tokens.train_steps, other.tokens.train_steps)
    if steps > fewest:
        raise InputError(f"--steps: expected at most tokens.train_steps {fewest}, found {steps}")


def _print(comparison: Comparison, dtype: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("step", "", "A", "B", "|A - B|", "rounding explains", "", box=None, header_style="bold")
    for number in comparison.numbers:
        shown = f"{number.a:.7g}", f"{number.b:.7g}", f"{abs(number.a - number.b):.1e}", f"{number.allowed:.1e}"
        table.add_row(str(number.step), number.name, *shown, "" if number.agrees else "differs")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for kind, tensors in (
        ("gradients of step 1", comparison.gradients),
        ("update of step 1", comparison.update),
        ("movement of the weights", comparison.movement),
    ):
        if not tensors:
            print(f"{kind}: not compared, the gradients are too uncertain in {dtype}")
            continue
        worst = max(tensors, key=lambda tensor: tensor.difference / tensor.allowed)
        print(
            f"{kind}: {sum(tensor.agrees for tensor in tensors)} of {len(tensors)} parameters agree; the farthest "
            f"apart is {worst.name}, by {worst.difference:.1e} of its norm where rounding explains {worst.allowed:.1e}"
        )
    usual, worst = comparison.blind_below()
    print(
        f"Blind below: a gradient off by less than {usual:.1e} of its norm ({worst.name}: {worst.allowed:.1e}) looks "
        f"like {dtype} rounding" + ("." if dtype == "float32" else "; --dtype float32 sees far less.")
    )
    print(_verdict(comparison))


def _verdict(comparison: Comparison) -> str:
    if comparison.agrees:
        return "The layouts agree: all differences are within rounding."
    parts = []
    origin, number = comparison.origin(), comparison.first_number()
    if origin is not None:
        kind, parameter = origin
        parts.append(
            f"look at {parameter.name}, whose {kind} differs by {parameter.difference:.1e} (rounding explains "
            f"{parameter.allowed:.1e})"
        )
    if number is not None:
        parts.append(f"{number.name} differs from step {number.step} on")
        if origin is None and number.step == 1:
            parts[-1] += ", though the gradients of step 1 agree"
    return f"The layouts DIFFER: {'; '.join(parts)}."
