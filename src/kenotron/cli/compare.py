"""`kenotron compare my.yaml parallelism.tp=2 parallelism.pp=2`: compare two layouts of one config.

The exit code is 0 if they agree, else 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kenotron.cli.tables import print_table, to_stderr
from kenotron.config.errors import InputError, counted

if TYPE_CHECKING:
    from kenotron.training.compare import Comparison


def compare(
    file: Annotated[Path, typer.Argument(help="The YAML file of the run; with --hf a checkpoint.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="The other layout, such as parallelism.tp=2, or a YAML file of it.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to train on each layout.", min=1)] = 10,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Run both layouts in this dtype; float32 sees much smaller faults."),
    ] = None,
    hf: Annotated[
        bool, typer.Option("--hf", help="Compare a checkpoint in training, in decoding and in transformers.")
    ] = False,
) -> None:
    """Train a few steps on two layouts, and check that they agree up to rounding.

    Of two folders of runs (logs/a logs/b) print the keys and losses in which they differ instead, and of a checkpoint
    with --hf log-probabilities of tokens.
    """
    from kenotron.config import load

    if hf:
        if overrides:
            raise InputError(f"--hf: expected a checkpoint alone, found {counted(len(overrides) + 1, 'argument')}")
        _compare_with_hf(file)
        return
    if not overrides:
        raise InputError("expected another layout, such as parallelism.tp=2, a second YAML or run, or --hf")
    second = Path(overrides[0])
    if file.is_dir() or second.is_dir():
        from kenotron.cli.compare_runs import compare_runs

        if len(overrides) > 1:
            raise InputError(f"expected two folders of runs, found {counted(len(overrides) + 1, 'argument')}")
        compare_runs(file, second)
        return
    from kenotron.launch.comparing import compare as compare_layouts

    other = second if second.is_file() and _is_complete(second) else None
    comparison = compare_layouts(file, overrides[other is not None :], other=other, steps=steps, dtype=dtype)
    _print(comparison, dtype or load(file).model.dtype)
    if not comparison.agrees:
        raise typer.Exit(1)


def _is_complete(file: Path) -> bool:
    """Return whether a YAML file has all sections that a config needs, and not only some to lay over another file."""
    from kenotron.config.loading import overlay

    return {"checkpoints", "data_stages", "optimizer", "tokens"} <= overlay(file, (), lambda line: None).data.keys()


def _print(comparison: Comparison, dtype: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("step", "", "A", "B", "|A - B|", "rounding explains", "", box=None, header_style="bold")
    for number in comparison.numbers:
        cells = f"{number.a:.7g}", f"{number.b:.7g}", f"{abs(number.a - number.b):.1e}", f"{number.allowed:.1e}"
        table.add_row(str(number.step), number.name, *cells, "" if number.agrees else "differs")
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


def _compare_with_hf(checkpoint: Path) -> None:
    from kenotron.evaluation.mismatch import find_mismatch

    mismatch = find_mismatch(checkpoint, report=to_stderr)
    count = sum(map(len, mismatch.texts))
    print(f"Log-probabilities of {count} tokens, drawn by decoding, beside those of transformers in float32:")
    rows = []
    for distance in mismatch.distances:
        token = mismatch.texts[distance.text][distance.token]
        place = f"token {distance.token + 1} of text {distance.text + 1}, id {token}"
        rows.append((distance.side, f"{distance.mean:.2e}", f"{distance.worst:.2e}", place))
    print_table(("", "mean", "worst", "where"), rows)
    if mismatch.apart:
        sides = " and ".join(distance.side for distance in mismatch.apart)
        print(f"They DIFFER: {sides} by more than {mismatch.allowed:.1e} on average, which rounding explains.")
        raise typer.Exit(1)
    print(f"They agree: rounding explains {mismatch.allowed:.1e} on average.")
