"""What is the same on all ranks is done by one: above all, reporting input that is wrong."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

RANK0_REPORTS_WITHIN_S = 10.0  # modules may take this long to import on a rank of a loaded machine


def on_rank_0() -> bool:
    """Whether this process is alone, or speaks and reads for all that torchrun or srun has started."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def said_once() -> Iterator[None]:
    """What is wrong with the command line or the config is wrong on every rank that torchrun has started.

    Rank 0 reports it, also in the summary that torchrun prints last. The others wait to be ended by torchrun, which
    would end rank 0 before its report if they exited first. One that is still there then reports it, too: rank 0 may
    have another file, on another machine.
    """
    from kenotron.config.errors import InputError

    try:
        yield
    except InputError as error:
        rank = os.environ.get("RANK", "0")
        if rank.isdecimal() and rank != "0":  # what is no number has to be reported, too
            time.sleep(RANK0_REPORTS_WITHIN_S)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from kenotron.launch.error_records import record

            record(error)
        raise
