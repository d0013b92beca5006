"""Copy tensors into the ring in blocks, with threads that release the GIL.

    copier.mark(tensors)       # the copies will include work queued on the devices so far, but no later work
    copier.copy(tensors, …)    # now or later, in any thread: CPU memory by memcpy, device memory by its copy engine

The tensors are referenced until their last byte is copied. A device is read on a separate stream, which waits for the
event that `mark` recorded; a block counts as copied when the stream has finished it.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kenotron.checkpoint.engines.client import BLOCK_BYTES, SaveStream
from kenotron.checkpoint.engines.ring import Ring

SMALL_BYTES = 1 << 16
"""Up to this size a copy costs less than handing it to a thread."""


class Copier:
    """Copies into one ring with `threads` threads; `pin` page-locks the memory, so that devices can copy to it."""

    def __init__(self, ring: Ring, threads: int, pin: bool) -> None:
        self.ring, self.threads, self.pin = ring, threads, pin
        self.target = np.frombuffer(ring.memory, np.uint8)
        self.pool = ThreadPoolExecutor(threads, "checkpoint-copy")
        self.streams: dict[torch.device, _SideStream] = {}

    def mark(self, tensors: Sequence[Tensor]) -> None:
        """Record, for each device, the work queued so far, after which the copies are made."""
        for device in {tensor.device for tensor in tensors} - {torch.device("cpu")}:
            if device not in self.streams:
                self.streams[device] = _SideStream(device, self.target if self.pin else None)
            self.streams[device].mark()

    def copy(self, tensors: Sequence[Tensor], stream: SaveStream) -> None:
        """Copy `tensors` one after another, waiting whenever the ring is full. Raises GivenUp."""
        position = 0
        pending: deque[tuple[Future[None], int]] = deque()

        def finish(most: int) -> None:
            while len(pending) > most:
                done, end = pending.popleft()
                done.result()
                stream.copied(end)

        for tensor in tensors:
            source = self._bytes_of(tensor)
            start, size = 0, len(source)
            while start < size:
                begin, end = self.ring.span(position, min(BLOCK_BYTES, size - start))
                length = end - begin
                block = source[start : start + length]
                position, start = position + length, start + length
                if stream.fits(position):
                    finish(self.threads - 1)
                else:
                    finish(0)
                    stream.wait(position)
                if length > SMALL_BYTES:
                    pending.append((self.pool.submit(self._copy_block, begin, block), position))
                else:
                    finish(0)
                    self._copy_block(begin, block)
                    stream.copied(position)
        finish(0)

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        for stream in self.streams.values():
            stream.close()

    def _bytes_of(self, tensor: Tensor) -> Any:
        """Return the elements in row-major order as bytes: a numpy array over CPU memory, or a tensor on the device."""
        if tensor.device.type == "cpu":
            return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        with self.streams[tensor.device].use():
            return tensor.detach().contiguous().view(-1).view(torch.uint8)

    def _copy_block(self, begin: int, block: Any) -> None:
        target = self.target[begin : begin + len(block)]
        if isinstance(block, np.ndarray):
            np.copyto(target, block)
            return
        stream = self.streams[block.device]
        with stream.use():
            torch.from_numpy(target).copy_(block, non_blocking=True)
        stream.wait()


class _SideStream:
    """A device's stream for copies, besides the training stream. `pinned`: host memory to register with the device."""

    def __init__(self, device: torch.device, pinned: np.ndarray | None) -> None:
        self.device, self.pinned = device, pinned
        self.stream = torch.cuda.Stream(device)
        if pinned is not None:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(pinned.ctypes.data, pinned.nbytes, 0))

    def mark(self) -> None:
        """Make the stream wait for the work that is queued on the current stream now."""
        self.stream.wait_event(torch.cuda.current_stream(self.device).record_event())

    def use(self) -> torch.cuda.StreamContext:
        """Return a context in which this thread queues work on the stream."""
        torch.cuda.set_device(self.device)  # a new thread would use device 0, where a context takes 0.5 GB
        return torch.cuda.stream(self.stream)

    def wait(self) -> None:
        """Wait until all work queued on the stream is done."""
        self.stream.synchronize()

    def close(self) -> None:
        """Unregister the host memory from the device."""
        if self.pinned is not None:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.pinned.ctypes.data))
