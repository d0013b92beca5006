"""Damage to files, and what reading a damaged one may do: be right, or one line by InputError; never anything else.

Time and memory stay small whatever a header claims: a claim is held against the size of the file before it is
believed.
"""

from __future__ import annotations

import os
import resource
import tracemalloc
import warnings
from collections.abc import Callable
from itertools import count

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kenotron.config.errors import InputError

FUZZ = settings(suppress_health_check=list(HealthCheck))
MOST_MEMORY = 64 << 20
MEASURED = 8 if "EXAMPLES" in os.environ else 1  # of so many calls one: measuring takes four times what reading does
calls = count()
if "EXAMPLES" in os.environ:  # a million inputs: what would take all of the machine's memory fails instead
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, resource.getrlimit(resource.RLIMIT_DATA)[1]))


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """What happens to a file: some of its bytes are other ones, gone, there twice, or the largest number."""
    kind = draw(st.sampled_from(["flip", "cut", "grow", "double", "huge", "drop"]))
    place, more = draw(st.floats(0, 1, exclude_max=True)), draw(st.binary(min_size=1, max_size=9))
    huge = draw(st.sampled_from([b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\xff" * 4, b"\xff\xff\xff\x7f", b"\0" * 8]))

    def damage(raw: bytes) -> bytes:
        at = int(place * len(raw))
        if kind == "flip":
            return raw[:at] + bytes(byte ^ 0x55 for byte in raw[at : at + len(more)]) + raw[at + len(more) :]
        if kind == "cut":
            return raw[:at]
        if kind == "drop":
            return raw[:at] + raw[at + len(more) :]
        if kind == "huge":
            return raw[:at] + huge + raw[at + len(huge) :]
        return raw[:at] + (more if kind == "grow" else raw[at:]) + raw[at:]

    return damage


def harmless(read: Callable[[], object], *, lines: bool = False) -> object | None:
    """What `read` gives, or None where it says in one line what is wrong; in little memory either way.

    `lines`: a line for each of several problems will do.
    """
    measured = next(calls) % MEASURED == 0
    if measured:
        tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return read()
    except InputError as error:
        assert str(error)  # noqa: PT017
        assert lines or "\n" not in str(error)  # noqa: PT017
        return None
    finally:
        if measured:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < MOST_MEMORY
