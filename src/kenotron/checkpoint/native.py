"""The writer `native`: files written past the page cache by threads of native.cpp; the bytes are those of `HashedFile`.

    with NativeFile(folder / "rank0.safetensors", size=1 << 30) as file:
        file.write(header)
        file.write(tensor)          # hashed and copied here; threads write it, without Python's lock
    file.record                     # FileRecord(bytes=…, xxh3="…")

Importing this module compiles native.cpp, unless that has been done before: where there is no compiler, a config that
asks for the writer is refused at the start of the run.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash

from kenotron.checkpoint.durable import BLOCK_BYTES, FileRecord, refusal
from kenotron.storage.native import load_library

THREADS = 4  # of each file: requests that the disk has at once

LIBRARY = load_library(Path(__file__).with_name("native.cpp"))
LIBRARY.file_open.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
LIBRARY.file_open.restype = ctypes.c_void_p
LIBRARY.file_append.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
LIBRARY.file_close.argtypes = [ctypes.c_void_p, ctypes.c_int]


class NativeFile:
    """A new file of `size` bytes, or however many are written; a `FileWriter`."""

    record: FileRecord

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._hash = xxhash.xxh3_64()
        self._bytes = 0
        error = ctypes.c_int(0)
        self._file = LIBRARY.file_open(os.fsencode(path), size, THREADS, ctypes.byref(error))
        self._check("create", error.value)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of `data`. An error may be that of an earlier call."""
        if not len(data):
            return
        view = np.frombuffer(data, np.uint8)
        for start in range(0, len(view), BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            self._hash.update(block.data)
            self._check("write", LIBRARY.file_append(self._file, block.ctypes.data, len(block)))
        self._bytes += len(view)

    def __enter__(self) -> NativeFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = LIBRARY.file_close(self._file, kind is None)
        if kind is None:
            self._check("write", failed)
            self.record = FileRecord(self._bytes, self._hash.hexdigest())

    def _check(self, doing: str, error: int) -> None:
        if error:
            raise refusal(doing, self.path, OSError(error, os.strerror(error)))
