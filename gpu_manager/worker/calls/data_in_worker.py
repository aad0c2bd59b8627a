"""Data that functions pass to each other, as one model's calls see it: put, taken, handed over."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gpu_manager.worker.call_errors import CallRefused, CannotBorrow, OutOfMemory
from gpu_manager.worker.device.worker_device import WorkerDevice
from gpu_manager.worker.lending.lent_memory import read_file
from gpu_manager.worker.lending.lent_storage import LentStorage
from gpu_manager.worker.program.channel_state import InputStorage, KeptStorages
from gpu_manager.worker.program.tensor_specs import bytes_of
from gpu_manager.worker.shared_memory.borrowed_data import BorrowedData
from gpu_manager.worker.shared_memory.published_data import (
    MOST_PUBLISHED_BYTES,
    PublishedData,
    PublishedTensor,
)
from torch_shim.wire.protocol import MOST_ABOUT_BYTES, FailureKind

MOST_HANDLE_CHARACTERS = 300
# A model that leaves waits for those who copy what it has lent, for so long at most.
_GIVEN_BACK_S = 2.0


class DataInWorker:
    """The data of one model's sessions. `gate` is held while no call of the model runs."""

    def __init__(
        self, device: WorkerDevice, gate: threading.Lock, published: PublishedData
    ) -> None:
        """`published` is what was put with any model of the process."""
        self._device = device
        self._gate = gate
        self._published = published

    def publish(
        self,
        kept: KeptStorages,
        key: int,
        epoch: int,
        handle: str,
        about: bytes,
        most_bytes: int = MOST_PUBLISHED_BYTES,
    ) -> int:
        """Let every function that knows the handle use a storage that this session keeps.

        Return its size; refuse a larger one than `most_bytes`.
        """
        if not 0 < len(handle) <= MOST_HANDLE_CHARACTERS or len(about) > MOST_ABOUT_BYTES:
            raise CallRefused(FailureKind.BAD_FRAME, "no handle of data, or too much about it")
        with self._gate:
            held = kept.find(key, epoch)
            if held is None:
                raise CallRefused(FailureKind.MISSING, f"key {key}", {"missing": [key]})
            tensor = PublishedTensor(held, about, self)
            if tensor.size_bytes > most_bytes or not self._published.add(handle, tensor):
                raise CallRefused(FailureKind.NO_ROOM, "the worker has enough data of functions")
            held.shared = True
            return tensor.size_bytes

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
                with _room_told():
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
        memory, is_mapped = read_file(descriptor, start, size_bytes)
        with self._gate:
            if is_mapped and self._device.device.type == "cpu":
                self._device.share(memory)  # it takes addresses
                storage, shared = self._device.borrow(memory, start, size_bytes), True
            else:
                offset = start if is_mapped else 0
                storage, shared = self._device.receive(memory, offset, size_bytes), False
            kept.keep(InputStorage(storage, key, shared=shared))

    def take_borrowed(
        self, kept: KeptStorages, borrowed: BorrowedData, key: int
    ) -> tuple[int, bytes]:
        """The same of a storage that another process has: used there, or copied from there."""
        lent = borrowed.lent
        if key <= 0:
            raise CallRefused(FailureKind.BAD_FRAME, "a key is a positive number")
        _check_room(kept, lent.size_bytes)
        try:
            with self._gate, _room_told():
                found = self._device.open_lent(lent, same_gpu=borrowed.same_gpu)
                use = borrowed.use if found.in_place else None
                kept.keep(InputStorage(found.storage, key, shared=found.in_place, use=use))
        except CannotBorrow as error:
            raise CallRefused(FailureKind.NO_DATA, str(error)) from error
        return lent.size_bytes, borrowed.about

    def lend(self, handle: str) -> LentStorage | None:
        """Let another process open published data, until it is given back; None if it cannot.

        The caller closes the descriptor.
        """
        with self._gate:
            found = self._published.find(handle)
            if found is None or found.parked or found.model is not self:
                return None
            if found.loan is None:
                loan = self._device.lend(found.storage)
                if loan is None:
                    return None
                found.lend(loan)
            return self._published.use(handle, found)

    def given_back(self, handle: str) -> None:
        """Lent data is used once less."""
        self._published.given_back(handle)

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
            if not found.parked and not found.uses:
                found.end_loan()
                found.storage, found.parked = self._device.park(found.storage), True

    def clear(self) -> None:
        """Publish nothing of this model any more."""
        for handle in self._published.of_model(self):
            self.withdraw(handle)
        self._published.forget(self, _GIVEN_BACK_S if self._device.borrowers_copy else 0.0)


@contextmanager
def _room_told() -> Iterator[None]:
    """Refuse what the device has no room for: calls send the bytes, and make room."""
    try:
        yield
    except OutOfMemory as short:
        raise CallRefused(FailureKind.NO_ROOM, str(short)[:500]) from short


def _check_room(kept: KeptStorages, size_bytes: int) -> None:
    """Refuse what a session would not keep: its calls send the bytes."""
    if size_bytes > kept.budget_bytes:
        raise CallRefused(FailureKind.NO_ROOM, "a session keeps no storage of this size")
