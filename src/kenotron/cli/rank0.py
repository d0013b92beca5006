"""Let rank 0 act for all ranks: above all, report wrong input once."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

RANK0_REPORTS_WITHIN_S = 10.0  # imports may take this long on a loaded machine


def on_rank_0() -> bool:
    """Return whether this process is alone, or rank 0 of torchrun or srun, which reads and prints for all ranks."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def report_once() -> Iterator[None]:
    """Report an InputError on one rank only, because all ranks of torchrun have the same command line and config.

    Rank 0 reports it, also in the summary that torchrun prints last. The other ranks wait to be ended by torchrun,
    which would end rank 0 before its report if they exited first. A rank that is not ended in time reports the error,
    too: rank 0 may have another file, on another machine.
    """
    from kenotron.config.errors import InputError

    try:
        yield
    except InputError as error:
        rank = os.environ.get("RANK", "0")
        if rank.isdecimal() and rank != "0":  # a RANK that is no number is reported at once
            time.sleep(RANK0_REPORTS_WITHIN_S)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from kenotron.launch.error_records import record

            record(error)
        raise
