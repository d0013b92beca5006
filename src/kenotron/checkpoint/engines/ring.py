"""A ring of bytes in shared memory, which the training process fills and the writer empties, reused by every save.

A save is a stream of bytes, the tensors of its files one after another; byte p of the stream is at p % capacity. Bytes
that are written become free, so with a ring that is smaller than the stream, copies wait for the disk, and a tensor may
be larger than the ring.

The memory has no name that a killed process could leave behind. The writer imports this file, which must not need
torch.
"""

import mmap
import os
import tempfile


class Ring:
    """`capacity` bytes of the shared memory behind `descriptor`."""

    def __init__(self, descriptor: int, capacity: int) -> None:
        self.descriptor, self.capacity = descriptor, capacity
        self.memory = mmap.mmap(descriptor, capacity)

    @staticmethod
    def create() -> int:
        """Return the descriptor of new shared memory without a size, which a child process may inherit."""
        if hasattr(os, "memfd_create"):
            return os.memfd_create("kenotron-checkpoint")
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())

    def span(self, position: int, most: int) -> tuple[int, int]:
        """Return (begin, end) in the memory of at most `most` contiguous bytes from stream offset `position` on."""
        begin = position % self.capacity
        return begin, min(begin + most, self.capacity)
