"""What writes the files of tensors: the interface of `checkpoints.writer`.

    with open_file(temporary / "model" / "rank0.safetensors", size) as file:       # OpenFile
        file.write(header)
        file.write(tensor)
    file.record                                     # FileRecord(bytes=…, xxh3="…"), once the `with` block has ended

`durable.HashedFile` is one in Python, `native.NativeFile` one in C++.
"""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from kenotron.checkpoint.durable import FileRecord


class FileWriter(Protocol):
    """A new file, never an existing one. Errors are CheckpointError, as `durable.refusal` makes it."""

    record: FileRecord
    """Size and XXH3 of what was written; set when the `with` block has ended without an error."""

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`, which the caller changes afterwards."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Without an error, return when the file is on the disk (synced); with one, close it."""


OpenFile = Callable[[Path, int], FileWriter]
"""Makes one from the file's path and the bytes that will be written."""
