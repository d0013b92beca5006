"""`kenotron data`: tokens on disk, looked at, made and changed.

Each command takes what it needs as arguments and says what it did; torch is never imported.
"""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="Look at tokens on disk, make them, change their format.")
