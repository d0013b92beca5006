"""The interface of `checkpoints.writer`, which writes the files of tensors.

    with open_file(temporary / "model" / "rank0.safetensors", size) as file:       # OpenFile
        file.write(header)
        file.write(tensor)
    file.record                                     # FileRecord(bytes=…, xxh3="…"), once the `with` block has ended

`durable.HashedFile` implements it in Python, `native.NativeFile` in C++.
"""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from kenotron.checkpoint.durable import FileRecord


class FileWriter(Protocol):
    """A new file, never an existing one. Errors are CheckpointErrors, made by `durable.refusal`."""

    record: FileRecord
    """Size and XXH3 of the written bytes; set when the `with` block has ended without an error."""

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`; the caller may change its memory afterwards."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Sync the file to disk and close it; after an error, only close it."""


OpenFile = Callable[[Path, int], FileWriter]
"""(path, number of bytes that will be written) → a FileWriter."""
