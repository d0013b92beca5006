"""`kenotron doctor`: a page about this machine, with a self-test; made to be pasted into a bug report."""

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

NARROWEST, WIDEST, OF_A_FILE = 80, 120, 100
COLORS = {"title": "bold", "error": "bold red", "warning": "yellow", "hint": "cyan", "good": "green", "": ""}


def doctor(
    folder: Annotated[
        Path, typer.Option(help="Where a run would write: its disk is looked at, and the self-test runs there.")
    ] = Path("."),
    quick: Annotated[bool, typer.Option("--quick", help="Train nothing: takes seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Describe this machine, name what is wrong with it, and train and resume a tiny model on every device.

    Takes under a minute. Exit code 0: training works here; 1: the page names what failed.
    """
    from rich.console import Console

    from kenotron.config.errors import InputError, no_such_path
    from kenotron.doctor import examine
    from kenotron.doctor.report import as_json as json_of
    from kenotron.doctor.report import page

    if folder.is_file():
        raise InputError(f"--folder: expected a folder, found the file {folder}")
    if not folder.is_dir():
        raise no_such_path("--folder", str(folder))
    with Console(stderr=True).status("facts") as status:
        report = examine(folder, quick=quick, say=lambda line: status.update(line))
    if as_json:
        print(json_of(report))
    else:
        columns = shutil.get_terminal_size((OF_A_FILE, 24)).columns if sys.stdout.isatty() else OF_A_FILE
        console = Console(highlight=False, soft_wrap=True)
        for style, line in page(report, max(NARROWEST, min(columns, WIDEST))):
            console.print(line, style=COLORS[style] or None, markup=False)
    if not report.passed:
        raise typer.Exit(1)
