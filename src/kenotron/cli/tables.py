"""Lines, tables and progress bars on the console."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


def to_stderr(line: str) -> None:
    """Print a line to stderr at once."""
    print(line, file=sys.stderr, flush=True)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with borders on a terminal, and columns of plain text elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*header)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for line in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on a terminal and yield its update function of (done, total); elsewhere yield None."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)
