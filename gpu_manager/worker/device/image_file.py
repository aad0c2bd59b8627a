"""A model's weights as they were sent: the bytes of an image, mapped privately."""

import mmap
import os
import weakref

from gpu_manager.transfers.load_urgency import LoadUrgency
from gpu_manager.worker.device.arrival import Arrival

_POPULATE_READ = 22  # madvise: have every page ready for reading


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
