"""Data that functions pass to each other, as one model's calls see it: put, taken, handed over."""

import fcntl
import mmap
import os
import threading

from gpu_manager.worker.call_errors import CallRefused
from gpu_manager.worker.device.worker_device import WorkerDevice
from gpu_manager.worker.program.channel_state import InputStorage, KeptStorages
from gpu_manager.worker.program.tensor_specs import bytes_of
from gpu_manager.worker.shared_memory.published_data import PublishedData, PublishedTensor
from torch_shim.wire.protocol import MOST_ABOUT_BYTES, FailureKind

_MOST_HANDLE_CHARACTERS = 300
_PIECE_BYTES = 16 << 20


class DataInWorker:
    """The data of one model's sessions. `gate` is held while no call of the model runs."""

    def __init__(
        self, device: WorkerDevice, gate: threading.Lock, published: PublishedData
    ) -> None:
        """`published` is what was put with any model of the process."""
        self._device = device
        self._gate = gate
        self._published = published

    def publish(self, kept: KeptStorages, key: int, epoch: int, handle: str, about: bytes) -> None:
        """Let every function that knows the handle use a storage that this session keeps."""
        if not 0 < len(handle) <= _MOST_HANDLE_CHARACTERS or len(about) > MOST_ABOUT_BYTES:
            raise CallRefused(FailureKind.BAD_FRAME, "no handle of data, or too much about it")
        with self._gate:
            held = kept.find(key, epoch)
            if held is None:
                raise CallRefused(FailureKind.MISSING, f"key {key}", {"missing": [key]})
            tensor = PublishedTensor(held.storage, about, self, parked=held.parked)
            if not self._published.add(handle, tensor):
                raise CallRefused(FailureKind.NO_ROOM, "the worker has enough data of functions")
            held.shared = True

    def take(self, kept: KeptStorages, handle: str, key: int) -> tuple[int, bytes]:
        """Keep, for this session and under this key, a storage that was published here.

        Return its size and its description.
        """
        with self._gate:
            found = self._published.find(handle)
            if found is None or key <= 0:
                raise CallRefused(FailureKind.NO_DATA, "no such data in this worker")
            _check_room(kept, found.size_bytes)
            storage, shared = found.storage, not found.parked
            if found.parked:
                storage = self._device.unpark(storage)
            kept.keep(InputStorage(storage, key, shared=shared))
            return found.size_bytes, found.about

    def take_file(
        self, kept: KeptStorages, descriptor: int, key: int, start: int, size_bytes: int
    ) -> None:
        """The same of a storage in a file; it is read where it lies, if its size is sealed."""
        if key <= 0 or start < 0 or size_bytes <= 0:
            raise CallRefused(FailureKind.BAD_FRAME, "data in a file has a key, a start and a size")
        _check_room(kept, size_bytes)
        memory, is_mapped = _read(descriptor, start, size_bytes)
        with self._gate:
            if is_mapped and self._device.device.type == "cpu":
                self._device.share(memory)  # it takes addresses
                storage, shared = self._device.borrow(memory, start, size_bytes), True
            else:
                offset = start if is_mapped else 0
                storage, shared = self._device.receive(memory, offset, size_bytes), False
            kept.keep(InputStorage(storage, key, shared=shared))

    def hand_over(self, handle: str, room: memoryview) -> bool:
        """Copy published data to this memory; return whether it is here."""
        with self._gate:
            found = self._published.find(handle)
            if found is None or found.storage.nbytes() != len(room):
                return False
            self._device.send([bytes_of(found.storage, 0, len(room))], [room])
            return True

    def withdraw(self, handle: str) -> None:
        """Publish this data no more."""
        self._published.withdraw(handle)

    def park(self) -> None:
        """Move what this model's memory holds to the host; the gate is held."""
        for found in self._published.of_model(self).values():
            if not found.parked:
                found.storage, found.parked = self._device.park(found.storage), True

    def clear(self) -> None:
        """Publish nothing of this model any more."""
        for handle in self._published.of_model(self):
            self.withdraw(handle)


def _check_room(kept: KeptStorages, size_bytes: int) -> None:
    """Refuse what a session would not keep: its calls send the bytes."""
    if size_bytes > kept.budget_bytes:
        raise CallRefused(FailureKind.NO_ROOM, "a session keeps no storage of this size")


def _read(descriptor: int, start: int, size_bytes: int) -> tuple[memoryview, bool]:
    """Return the bytes and whether they are mapped: then they begin at `start`.

    A file that could shrink is copied: who reads a mapping behind its end is killed.
    """
    try:
        end = start + size_bytes
        if os.fstat(descriptor).st_size < end:
            raise CallRefused(FailureKind.BAD_FRAME, "data is longer than its file")
        if _is_sealed(descriptor):
            return memoryview(mmap.mmap(descriptor, end, flags=mmap.MAP_PRIVATE)), True
        content = bytearray(size_bytes)
        with memoryview(content) as room:
            done = 0
            while done < size_bytes:
                count = os.preadv(descriptor, [room[done : done + _PIECE_BYTES]], start + done)
                if not count:
                    raise CallRefused(FailureKind.BAD_FRAME, "data is longer than its file")
                done += count
        return memoryview(content), False
    except (OSError, ValueError, OverflowError) as error:
        raise CallRefused(FailureKind.BAD_FRAME, f"data in a file: {error}") from error


def _is_sealed(descriptor: int) -> bool:
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # a file on disk
        return False


def map_room(descriptor: int, size_bytes: int) -> memoryview:
    """Map memory that the manager gave to be filled; OSError or ValueError if that cannot be."""
    how = mmap.MAP_SHARED | mmap.MAP_POPULATE  # a fault for each page takes longer than the copy
    return memoryview(mmap.mmap(descriptor, size_bytes, flags=how))
