"""A model's weights on the worker's device: storages that are the image's whenever no call runs."""

import torch

from gpu_manager.worker.device.image_file import ImageFile
from gpu_manager.worker.device.worker_device import WorkerDevice


class DeviceImage:
    """The storages of one model. They are the image's content whenever no call runs."""

    def __init__(self, file: ImageFile, device: WorkerDevice) -> None:
        self.digest = file.digest
        self.total_bytes = file.total_bytes
        self._file = file
        self._device = device
        self._storages = device.load(file)
        self._numbers = {entry: number for number, entry in enumerate(file.table)}

    def close(self) -> bool:
        """Let the weights go; return whether nothing else refers to them."""
        self._storages.clear()
        return self._file.close()

    def storage(self, offset: int, size_bytes: int) -> torch.UntypedStorage | None:
        """The storage that lies there; None if the image has none of that place and size."""
        number = self._numbers.get((offset, size_bytes))
        return None if number is None else self._storages[number]

    def restore(self, offset: int, size_bytes: int) -> None:
        """Undo what a program wrote to a storage."""
        number = self._numbers[(offset, size_bytes)]
        self._device.restore(self._file, number, self._storages[number])
