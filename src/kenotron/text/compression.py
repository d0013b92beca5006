"""Read compressed files as streams."""

import gzip
import io
import zlib
from typing import IO, Any

SUFFIXES = (".gz", ".zst")

DAMAGE = (gzip.BadGzipFile, zlib.error, EOFError)
"""Errors of reading a damaged file."""


def decompressed(raw: IO[bytes], suffix: str) -> IO[bytes]:
    """Return the decompressed content of a file as a stream, by its suffix. Reading it may raise `DAMAGE`."""
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    return io.BufferedReader(_Zstd(raw), 1 << 17) if suffix == ".zst" else raw  # type: ignore[return-value]


class _Zstd(io.RawIOBase):
    """The decompressed content of a zstd file, by Arrow (Python has zstd from 3.14 on)."""

    def __init__(self, raw: IO[bytes]) -> None:
        import pyarrow

        self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")
        self._place = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except OSError as error:
            if error.errno is not None:  # an error of the disk, not Arrow's
                raise
            raise EOFError(str(error)) from None
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def tell(self) -> int:
        return self._place
