"""The writer `native`: files written past the page cache by threads of native.cpp; the bytes are those of `HashedFile`.

    with NativeFile(folder / "rank0.safetensors", size=1 << 30) as file:
        file.write(header)
        file.write(tensor)          # hashed and copied here; threads write it, without Python's lock
    file.record                     # FileRecord(bytes=…, xxh3="…")

Importing this module compiles native.cpp, unless that has been done before: where there is no compiler, a config that
asks for the writer is refused at the start of the run.
"""

import ctypes
import os
from pathlib import Path

import numpy as np

from kenotron.checkpoint.durable import HashedFile, refusing
from kenotron.storage.native import load_library

THREADS = 4  # of each file: requests that the disk has at once

LIBRARY = load_library(Path(__file__).with_name("native.cpp"))
LIBRARY.file_open.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
LIBRARY.file_open.restype = ctypes.c_void_p
LIBRARY.file_append.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
LIBRARY.file_close.argtypes = [ctypes.c_void_p, ctypes.c_int]


class NativeFile(HashedFile):
    """A new file of `size` bytes, or however many are written. An error may be that of an earlier call."""

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
