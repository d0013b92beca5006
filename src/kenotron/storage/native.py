"""Compile a C++ file at first use, and call it through ctypes.

    library = load_library(Path(__file__).with_name("sums.cpp"))     # extern "C" double total(const double*, long);
    library.total.argtypes, library.total.restype = [ctypes.c_void_p, ctypes.c_long], ctypes.c_double
    library.total(numbers.ctypes.data, len(numbers))                 # without the GIL

ctypes needs neither Python's headers nor torch's, so a C++ compiler is enough. The library is cached under a name with
a hash of its source, flags and kind of machine.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from kenotron.config.errors import InputError, os_errors
from kenotron.storage.files import cache_root, temporary_beside

# Without -march=native, because the machines of a cluster may share one cache.
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread")
COMPILERS = ("c++", "g++", "clang++")


def find_compiler() -> list[str] | None:
    """Return the command of the C++ compiler: ``$CXX``, else the first of `COMPILERS` that exists; None without one."""
    for command in [shlex.split(os.environ.get("CXX", "")), *([name] for name in COMPILERS)]:
        if command and shutil.which(command[0]):
            return command
    return None


def load_library(source: Path, *flags: str) -> ctypes.CDLL:
    """Return the library of the C++ file `source`, compiled with `flags` after `FLAGS`.

    Raises InputError, in one line, without a compiler, or with the compiler's error.
    """
    with os_errors(f"{source}: cannot be read"):
        content = repr((source.read_bytes(), FLAGS, flags, sys.platform, platform.machine())).encode()
    library = cache_root() / "native" / f"{source.stem}-{hashlib.sha256(content).hexdigest()[:16]}.so"
    with os_errors(f"{source}: cannot load {library}"):
        if not library.exists():
            _compile(source, flags, library)
        return ctypes.CDLL(str(library))


def _compile(source: Path, flags: tuple[str, ...], library: Path) -> None:
    """Compile to a temporary file and rename it, so that several processes may do this concurrently."""
    compiler = find_compiler()
    if compiler is None:
        known = ", ".join(COMPILERS)
        raise InputError(f"{source}: no C++ compiler to compile it: expected $CXX, or one of {known} on the PATH")
    library.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(library)
    command = [*compiler, *FLAGS, *flags, str(source), "-o", str(temporary)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        temporary.unlink(missing_ok=True)
        lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
        reason = next((line for line in lines if "error" in line), lines[-1])
        raise InputError(f"{source}: {compiler[0]} cannot compile it: {reason}")
    os.rename(temporary, library)
