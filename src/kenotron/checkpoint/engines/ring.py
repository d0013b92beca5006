"""Memory that the training process fills and the writer empties: a ring of bytes, reused by every save.

A save is a stream of bytes, the tensors of its files one after another; byte p of it is at p % capacity. What was
written is free again, so a ring that is smaller than the stream makes the copies wait for the disk, and a tensor may be
larger than the ring.

The memory has no name that a killed process could leave behind. No torch here: the writer imports this.
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
        """The descriptor of new shared memory, of no size yet; it may be inherited by a child process."""
        if hasattr(os, "memfd_create"):
            return os.memfd_create("kenotron-checkpoint")
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())

    def span(self, position: int, most: int) -> tuple[int, int]:
        """(begin, end) in the memory of at most `most` bytes from `position` of the stream on, in one stretch."""
        begin = position % self.capacity
        return begin, min(begin + most, self.capacity)
