"""Compressed files as streams."""

import gzip
import io
import zlib
from typing import IO, Any

SUFFIXES = (".gz", ".zst")

DAMAGE = (gzip.BadGzipFile, zlib.error, EOFError)
"""What reading a damaged file raises."""


def decompressed(raw: IO[bytes], suffix: str) -> IO[bytes]:
    """The content of a file that is compressed by its suffix, as a stream. Raises `DAMAGE`."""
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    return io.BufferedReader(_Zstd(raw), 1 << 17) if suffix == ".zst" else raw  # type: ignore[return-value]


class _Zstd(io.RawIOBase):
    """What a zstd file unpacks to, by Arrow (Python has zstd from 3.14 on)."""

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
            if error.errno is not None:  # the disk's, not Arrow's
                raise
            raise EOFError(str(error)) from None
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def tell(self) -> int:
        return self._place
