"""Where a result's bytes are put: the arena if there is room, else a file or the frame's body."""

import mmap
import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from gpu_manager.worker.calls.channel_call import CallAnswer
from gpu_manager.worker.device.worker_device import WorkerDevice
from gpu_manager.worker.lending.lent_memory import make_file
from gpu_manager.worker.shared_memory.result_files import LEAST_BYTES, ResultFiles
from torch_shim.wire.protocol import places_behind


class Delivery:
    """Puts the bytes of one answer where the function reads them.

    With `files`, a large result goes to a file that the function gives back: `file_number`. After
    an error the function does not have the answer, and the worker has to `take_back` the file.
    """

    def __init__(
        self,
        device: WorkerDevice,
        arena: memoryview | None,
        files: ResultFiles | None,
        take_back: Callable[[int], None],
    ) -> None:
        self._device = device
        self._arena = arena
        self._files = files
        self._take_back = take_back
        self.body: Sequence[bytearray] = ()
        self.descriptors: list[int] = []
        self.file_number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
        if error is not None and self.file_number:
            self._take_back(self.file_number)

    def __call__(self, answer: CallAnswer) -> None:
        """Copy a result's bytes, and say in the result where they lie."""
        begun_s = time.perf_counter()
        sizes = answer.result.sizes()
        offsets, end = places_behind(answer.end_bytes, sizes)
        if self._arena is not None and end <= len(self._arena):
            answer.result.place(offsets)
            memory = self._arena
        else:
            answer.result.place([-1] * len(sizes))
            offsets, end = places_behind(0, sizes)
            memory = self.room(end)
        places = [memory[start : start + size] for start, size in zip(offsets, sizes, strict=True)]
        self._device.send(answer.result.parts, places)
        answer.times[3] = time.perf_counter() - begun_s
        answer.times[1] += answer.times[3]

    def room(self, size_bytes: int) -> memoryview:
        """Memory of at least this size that travels with the frame."""
        if self._arena is None:
            self.body = (bytearray(size_bytes),)
            return memoryview(self.body[0])
        if self._files is not None and size_bytes >= LEAST_BYTES:
            file = self._files.take(size_bytes, self._device.share)
            if file is not None:
                self.file_number = file.number
                self.descriptors = [os.dup(file.descriptor)]
                return file.memory
        descriptor = make_file(max(size_bytes, 1))
        self.descriptors = [descriptor]
        return memoryview(mmap.mmap(descriptor, max(size_bytes, 1)))

    def meta(self) -> list[int]:
        """What an answer says at its end: the number of the file to give back, if there is one."""
        return [self.file_number] if self.file_number else []
