"""A model's weights as they were sent: an image, mapped privately, and how much of it is there."""

import mmap
import os
import struct
import weakref

from gpu_manager.devices.loads import LoadUrgency

_POPULATE_READ = 22  # madvise: have every page ready for reading


# How much of an image a worker may copy: the manager tells it through a pipe, piece by piece.
#
# Each message is the number of bytes that are there, from the image's beginning; the last one says
# that the image's content has the right digest. A pipe that closes before means that it never
# will.

VERIFIED = (1 << 64) - 1
_NUMBER = struct.Struct("<Q")
_MOST_READ_BYTES = 512 * _NUMBER.size


def packed(number: int) -> bytes:
    """Return a message; one write passes it whole."""
    return _NUMBER.pack(number)


class Arrival:
    """What is there of one image; without a pipe, everything."""

    def __init__(self, total_bytes: int, pipe: int | None = None) -> None:
        """Takes ownership of the pipe."""
        self._total_bytes = total_bytes
        self._pipe = pipe
        self._present = 0 if pipe is not None else VERIFIED

    def wait_for(self, end: int) -> int:
        """Wait until the bytes before this offset are there; return where those there end.

        OSError if they will never be.
        """
        while self._present < end:
            self._receive()
        return min(self._present, self._total_bytes)

    def wait_verified(self) -> None:
        """Wait until the image's content is known to be right; OSError if it is not."""
        while self._present != VERIFIED:
            self._receive()

    def close(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def _receive(self) -> None:
        assert self._pipe is not None, "without a pipe everything is there"
        told = os.read(self._pipe, _MOST_READ_BYTES)
        if not told:
            raise OSError("the weights did not arrive")
        (self._present,) = _NUMBER.unpack(told[-_NUMBER.size :])


class ImageFile:
    """An image's bytes, mapped; nothing that is written to the mapping leaves this process."""

    def __init__(
        self,
        digest: str,
        table: list[list[int]],
        total_bytes: int,
        fd: int,
        arrival: Arrival | None = None,
        urgency: LoadUrgency | None = None,
    ) -> None:
        """`arrival` tells what is there of an image that is still being read.

        `urgency` says whether a request waits for it.
        """
        self.urgency = urgency or LoadUrgency()
        self.arrival = arrival or Arrival(total_bytes)
        self.digest = digest
        self.total_bytes = total_bytes
        self.table = [(int(offset), int(size)) for offset, size in table]
        self.descriptor = fd
        self.memory = mmap.mmap(fd, max(total_bytes, 1), flags=mmap.MAP_PRIVATE)

    def close(self) -> bool:
        """Let the image go; return whether nothing refers to its memory any more."""
        os.close(self.descriptor)
        memory = weakref.ref(self.memory)
        del self.memory
        return memory() is None

    def populate(self) -> None:
        """Have the pages mapped before the first call needs them, as they arrive."""
        present = 0
        while present < self.total_bytes:
            arrived = self.arrival.wait_for(present + 1)
            begin = present - present % mmap.PAGESIZE
            present = arrived
            try:
                self.memory.madvise(_POPULATE_READ, begin, arrived - begin)
            except OSError:
                continue  # before Linux 5.14 the first call maps them

    def read(self, number: int) -> bytes:
        """The content of one storage as it was sent."""
        offset, size = self.table[number]
        return os.pread(self.descriptor, size, offset)
