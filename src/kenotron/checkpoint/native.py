"""The writer `native`: threads of native.cpp write files past the page cache, with the same bytes as `HashedFile`.

    with NativeFile(folder / "rank0.safetensors", size=1 << 30) as file:
        file.write(header)
        file.write(tensor)          # hashed and copied in the call; threads write it without the GIL
    file.record                     # FileRecord(bytes=…, xxh3="…")

Importing this module compiles native.cpp, unless it has been compiled before: without a compiler, a config that names
the writer is refused at the start of the run.
"""

import ctypes
import os
from pathlib import Path

import numpy as np

from kenotron.checkpoint.durable import HashedFile, refusing
from kenotron.storage.native import load_library

THREADS = 4  # per file, the number of concurrent write requests

LIBRARY = load_library(Path(__file__).with_name("native.cpp"))
LIBRARY.file_open.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
LIBRARY.file_open.restype = ctypes.c_void_p
LIBRARY.file_append.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
LIBRARY.file_close.argtypes = [ctypes.c_void_p, ctypes.c_int]


class NativeFile(HashedFile):
    """A new file with an expected `size` in bytes. An error may belong to an earlier call."""

    def _open(self, size: int) -> int:
        error = ctypes.c_int(0)
        file: int = LIBRARY.file_open(os.fsencode(self.path), size, THREADS, ctypes.byref(error))
        _check(error.value)
        return file

    def _append(self, block: memoryview) -> None:
        _check(LIBRARY.file_append(self._file, np.frombuffer(block, np.uint8).ctypes.data, len(block)))

    def _close(self, sync: bool) -> None:
        error = LIBRARY.file_close(self._file, sync)
        with refusing("write", self.path):
            _check(error if sync else 0)


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))
