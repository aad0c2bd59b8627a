"""A model's weights as they were sent: the bytes of an image, mapped privately."""

import mmap
import os
import weakref

_POPULATE_READ = 22  # madvise: have every page ready for reading


class ImageFile:
    """An image's bytes, mapped; nothing that is written to the mapping leaves this process."""

    def __init__(self, digest: str, table: list[list[int]], total_bytes: int, fd: int) -> None:
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
        """Have the pages mapped before the first call needs them."""
        try:
            self.memory.madvise(_POPULATE_READ)
        except OSError:
            return  # before Linux 5.14 the first call maps them

    def read(self, number: int) -> bytes:
        """The content of one storage as it was sent."""
        offset, size = self.table[number]
        return os.pread(self.descriptor, size, offset)
