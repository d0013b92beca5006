"""`kenotron runs [FOLDER…]` lists the runs below log folders; `kenotron plot RUN…` and `report` plot them."""

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from kenotron.config.errors import human_format, no_such_path, os_errors


def runs(
    folders: Annotated[list[Path] | None, typer.Argument(help="Folders with runs, such as logging.log_dir.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects.")] = False,
) -> None:
    """List runs with their state, steps, tokens and losses; by default those in logs."""
    from kenotron.cli.tables import print_table
    from kenotron.runs.summary import find_runs, summary_of

    summaries = [(run, summary_of(run)) for run in find_runs(folders or [Path("logs")])]
    if as_json:
        print(json.dumps([asdict(summary) | {"folder": str(run.folder)} for run, summary in summaries], indent=2))
        return
    rows = [
        (
            summary.name,
            summary.state,
            f"{summary.step} of {summary.end}" if summary.end else str(summary.step),
            human_format(summary.tokens),
            "" if summary.loss is None else f"{summary.loss:.4g}",
            "" if summary.val_loss is None else f"{summary.val_loss:.4g}",
            "" if summary.tokens_per_sec is None else human_format(summary.tokens_per_sec),
            datetime.fromtimestamp(summary.written_at).isoformat(" ", "minutes"),
            summary.reason or "",
        )
        for _, summary in summaries
    ]
    header = "run", "state", "steps", "tokens", "loss", "val loss", "tokens/s", "last step", "reason"
    print_table(header, rows)


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, such as logs/my_run, or metrics.jsonl files.")],
) -> None:
    """Plot the losses of runs over tokens in the terminal; `kenotron report` draws them, and more, on a page."""
    from kenotron.runs.logged import read_runs
    from kenotron.runs.plot import loss_plot

    typer.echo(loss_plot(read_runs(runs)))


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, such as logs/my_run, or metrics.jsonl files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file.")] = Path("report.html"),
) -> None:
    """Write one HTML page of runs: curves, samples, configs, and what differs between them. It needs no network."""
    from kenotron.runs.logged import read_runs
    from kenotron.runs.report import report_page

    page = report_page(read_runs(runs))
    if not output.absolute().parent.is_dir():
        raise no_such_path("--output", output.parent)
    with os_errors(f"--output: cannot write {output}"):
        output.write_text(page, encoding="utf-8")
    typer.echo(f"Page: {output}")
