"""The command line: one file per command. `main` is the only place that turns errors into exit codes.

0 done · 1 the run failed · 2 the input was wrong (one line on stderr; --debug shows the traceback)
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

RANK0_REPORTS_WITHIN_S = 10.0  # modules may take this long to import on a rank of a loaded machine


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command in `arguments` (default: the process's own) and exit with its code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [argument for argument in given if argument != "--debug"]
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # a crash, or a mapped file that is cut short (SIGBUS), shows where it was
    try:
        code = _exit_code(given, debug)
    except KeyboardInterrupt:  # while modules are being imported, too
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


def _exit_code(arguments: list[str], debug: bool) -> int:
    from kenotron.config.errors import InputError, PeerFailed, RunFailed

    try:
        return _run(arguments)
    except InputError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe went away: `kenotron config show | head`
        sys.stderr.close()
        return 0
    except PeerFailed:
        if debug:
            raise
        return 1  # the rank that failed first reports why
    except RunFailed as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1


@contextmanager
def said_once() -> Iterator[None]:
    """What is wrong with the command line or the config is wrong on every rank that torchrun has started.

    Rank 0 reports it, also in the summary that torchrun prints last. The others wait to be ended by torchrun, which
    would end rank 0 before its report if they exited first.
    """
    from kenotron.config.errors import InputError

    try:
        yield
    except InputError as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(RANK0_REPORTS_WITHIN_S)
            sys.exit(2)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from kenotron.launch.error_records import record

            record(error)
        raise


def _run(arguments: list[str]) -> int:
    from kenotron.cli.app import build_app

    return build_app()(arguments)
