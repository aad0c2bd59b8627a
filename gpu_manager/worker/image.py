"""A model's weights as the worker holds them: an immutable image, its storages on the device."""

import mmap
import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from gpu_manager.worker.device import Device

_POPULATE_READ = 22  # madvise: have every page ready for reading


class ImageFile:
    """An image's bytes, mapped; nothing that is written to the mapping leaves this process."""

    def __init__(self, digest: str, table: list[list[int]], total_bytes: int, fd: int) -> None:
        self.digest = digest
        self.total_bytes = total_bytes
        self.table = [(int(offset), int(size)) for offset, size in table]
        self.descriptor = fd
        self.memory = mmap.mmap(fd, max(total_bytes, 1), flags=mmap.MAP_PRIVATE)

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


class Image:
    """The storages of one model. They are the image's content whenever no call runs."""

    def __init__(self, file: ImageFile, device: "Device") -> None:
        self.digest = file.digest
        self.total_bytes = file.total_bytes
        self._file = file
        self._device = device
        self._storages = device.load(file)
        self._numbers = {entry: number for number, entry in enumerate(file.table)}

    def storage(self, offset: int, size_bytes: int) -> torch.UntypedStorage | None:
        """The storage that lies there; None if the image has none of that place and size."""
        number = self._numbers.get((offset, size_bytes))
        return None if number is None else self._storages[number]

    def restore(self, offset: int, size_bytes: int) -> None:
        """Undo what a program wrote to a storage."""
        number = self._numbers[(offset, size_bytes)]
        self._device.restore(self._file, number, self._storages[number])
