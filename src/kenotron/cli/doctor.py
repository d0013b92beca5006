"""`kenotron doctor`: print a page about this machine, with a self-test, to paste into a bug report."""

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

MIN_WIDTH, MAX_WIDTH, FILE_WIDTH = 80, 120, 100
COLORS = {"title": "bold", "error": "bold red", "warning": "yellow", "hint": "cyan", "good": "green", "": ""}


def doctor(
    folder: Annotated[
        Path, typer.Option(help="The folder of a run: its disk is checked, and the self-test runs there.")
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
    from kenotron.doctor.page import as_json as report_as_json
    from kenotron.doctor.page import page

    if folder.is_file():
        raise InputError(f"--folder: expected a folder, found the file {folder}")
    if not folder.is_dir():
        raise no_such_path("--folder", str(folder))
    with Console(stderr=True).status("facts") as status:
        report = examine(folder, quick=quick, say=lambda line: status.update(line))
    if as_json:
        print(report_as_json(report))
    else:
        columns = shutil.get_terminal_size((FILE_WIDTH, 24)).columns if sys.stdout.isatty() else FILE_WIDTH
        console = Console(highlight=False, soft_wrap=True)
        for style, line in page(report, max(MIN_WIDTH, min(columns, MAX_WIDTH))):
            console.print(line, style=COLORS[style] or None, markup=False)
    if not report.passed:
        raise typer.Exit(1)
