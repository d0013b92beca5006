"""Damage to files, and what reading a damaged one may do: be right, or one line by InputError; never anything else.

Time and memory stay small whatever a header claims: a claim is held against the size of the file before it is
believed. And no code of the file is run: some damage puts in a pickle, or a tag of YAML, which calls `sing`.
"""

import io
import os
import resource
import sys
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kenotron.config.errors import InputError

FUZZ = settings(suppress_health_check=list(HealthCheck))
MOST_MEMORY = 64 << 20
MEASURED = 8 if "EXAMPLES" in os.environ else 1  # of so many calls one: measuring takes four times what reading does
calls = count()
if "EXAMPLES" in os.environ:  # a million inputs: what would take all of the machine's memory fails instead
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, resource.getrlimit(resource.RLIMIT_DATA)[1]))


# ---- canaries: files that call `sing` where they are loaded as what they are --------------------------------

songs: list[str] = []
watching: list[bool] = []
CALLS = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pickle.find_class"}
"""Events of Python's auditing that no reader causes. That of `exec` is caused by every import."""


def sing(*_: object) -> None:
    """What a canary calls."""
    songs.append("sing")


def _listen(event: str, _: object) -> None:
    if watching and event in CALLS:
        songs.append(event)


sys.addaudithook(_listen)


@contextmanager
def silence() -> Iterator[None]:
    """Fails if a canary sings, or a program or a pickle's function is called, whatever the block raises."""
    songs.clear()
    watching.append(True)
    try:
        yield
    finally:
        watching.pop()
        assert not songs, f"code of the file was run: {songs}"


class _Singer:
    def __reduce__(self) -> tuple[Callable[..., None], tuple[()]]:
        return sing, ()


def _zipped(pickled: bytes) -> bytes:
    """As torch.save writes it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n"}.items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()


def _array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([_Singer()], dtype=object), allow_pickle=True)
    return file.getvalue()


PICKLE = b"csupport.damage\nsing\n(tR."
CANARIES = {
    "pickle": PICKLE,
    "torch": _zipped(PICKLE),
    "numpy": _array(),
    "yaml": b"!!python/object/apply:support.damage.sing []\n",
    "yaml of a config": b"general: !!python/object/apply:support.damage.sing []\n",
    "yaml of a program": b"general:\n  project: !!python/object/apply:os.system ['true']\n",
}

# ---- damage -------------------------------------------------------------------------------------------------


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """What happens to a file: some bytes are other ones, gone, there twice, or the largest number; or a canary."""
    kind = draw(st.sampled_from(["flip", "cut", "grow", "double", "huge", "drop", "plant", "replace"]))
    canary = CANARIES[draw(st.sampled_from(sorted(CANARIES)))] if kind in ("plant", "replace") else b""
    place, more = draw(st.floats(0, 1, exclude_max=True)), draw(st.binary(min_size=1, max_size=9))
    huge = draw(st.sampled_from([b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\xff" * 4, b"\xff\xff\xff\x7f", b"\0" * 8]))

    def damage(raw: bytes) -> bytes:
        at = int(place * len(raw))
        if kind == "flip":
            return raw[:at] + bytes(byte ^ 0x55 for byte in raw[at : at + len(more)]) + raw[at + len(more) :]
        if kind == "cut":
            return raw[:at]
        if kind in ("plant", "replace"):
            return raw[:at] + canary + raw[at:] if kind == "plant" else canary
        if kind == "drop":
            return raw[:at] + raw[at + len(more) :]
        if kind == "huge":
            return raw[:at] + huge + raw[at + len(huge) :]
        return raw[:at] + (more if kind == "grow" else raw[at:]) + raw[at:]

    return damage


def harmless(read: Callable[[], object], *, lines: bool = False) -> object | None:
    """What `read` gives, or None where it says in one line what is wrong; in little memory and in silence either way.

    `lines`: a line for each of several problems will do.
    """
    measured = next(calls) % MEASURED == 0
    if measured:
        tracemalloc.start()
    try:
        with warnings.catch_warnings(), silence():
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
