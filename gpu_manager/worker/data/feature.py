"""The data of one model's sessions, and what orders and channels do with it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from gpu_manager.call_errors import CallRefused, CannotBorrow, OutOfMemory
from gpu_manager.devices.lent_memory import LentStorage, map_room, read_file
from gpu_manager.worker.channel_server import one_descriptor
from gpu_manager.worker.data.passing import BorrowedData, Borrowing, GrantedPuts
from gpu_manager.worker.data.published import (
    MOST_PUBLISHED_BYTES,
    PublishedData,
    PublishedTensor,
)
from gpu_manager.worker.features import (
    ModelFeature,
    ModelSpace,
    WorkerFeature,
    WorkerSpace,
)
from gpu_manager.worker.orders import (
    DataBorrowed,
    DataGivenBack,
    DataLent,
    GrantData,
    HandedOver,
    HandOver,
    LendData,
    RecallGrant,
    WithdrawData,
    WorkerOrder,
)
from gpu_manager.worker.program.channel_state import InputStorage, KeptStorages
from gpu_manager.worker.program.tensor_specs import bytes_of
from torch_shim.errors import BadFrame
from torch_shim.wire.frame_socket import Frame
from torch_shim.wire.messages import MOST_ABOUT_BYTES, Done, Publish, Take
from torch_shim.wire.protocol import FailureKind, FrameKind

MOST_HANDLE_CHARACTERS = 300
# A model that leaves waits for those who copy what it has lent, for so long at most.
_GIVEN_BACK_S = 2.0
_MOST_TEXT = 500  # characters of a note


class PassedData(WorkerFeature):
    """Functions' data is published with the process: all of its models may use it."""

    def __init__(self, worker: WorkerSpace) -> None:
        super().__init__(worker)
        self.published = PublishedData()

    def begin(self, model: ModelSpace) -> "DataInWorker":
        return DataInWorker(model, self.published, self.worker)

    def answer_for_left(self, order: WorkerOrder) -> None:
        match order:
            case HandOver():
                self.worker.tell(HandedOver(order.model, order.handle, False))
            case LendData():
                self.worker.tell(DataLent(order.model, order.handle, False, 0, 0, b""))
            case DataGivenBack():  # a model that is leaving waits for it
                self.published.given_back(order.handle)
            case _:
                pass  # the manager knows that the model has left


class DataInWorker(ModelFeature):
    """The data of one model's sessions. The gate is held while no call of the model runs."""

    def __init__(self, model: ModelSpace, published: PublishedData, worker: WorkerSpace) -> None:
        """`published` is what was put with any model of the process."""
        tell, background = worker
        self._model = model.number
        self._device = model.executor.device
        self._gate = model.executor.gate
        self._note = model.note
        self._tell = tell
        self.published = published
        self.borrowing = Borrowing(model.number, tell)
        self.puts = GrantedPuts(model.number, tell)
        self.orders = {
            HandOver: lambda order, frame: background(partial(self._hand_over, order, frame)),
            LendData: lambda order, _: background(partial(self._lend, order)),
            DataBorrowed: lambda order, frame: self.borrowing.answer(order, frame.descriptors),
            DataGivenBack: lambda order, _: published.given_back(order.handle),
            WithdrawData: lambda order, _: published.withdraw(order.handle),
            GrantData: lambda order, _: self.puts.grant(order),
            RecallGrant: lambda *_: background(self.puts.recall),
        }
        self.frames = {FrameKind.PUBLISH: self._publish, FrameKind.TAKE: self._take}

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
            held = kept.held(key, epoch)
            tensor = PublishedTensor(held, about, self)
            if tensor.size_bytes > most_bytes or not self.published.add(handle, tensor):
                raise CallRefused(FailureKind.NO_ROOM, "the worker has enough data of functions")
            held.shared = True
            return tensor.size_bytes

    def take(self, kept: KeptStorages, handle: str, key: int) -> tuple[int, bytes]:
        """Keep, for this session and under this key, a storage that was published here.

        Return its size and its description.
        """
        with self._gate:
            tensor = self.published.find(handle)
            if tensor is None or key <= 0:
                raise CallRefused(FailureKind.NO_DATA, "no such data in this worker")
            _check_room(kept, tensor.size_bytes)
            storage, shared = tensor.storage, not tensor.parked
            if tensor.parked:
                with _room_told():
                    storage = self._device.unpark(storage)
            kept.keep(InputStorage(storage, key, shared=shared))
            return tensor.size_bytes, tensor.about

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
                opened = self._device.open_lent(lent, same_gpu=borrowed.same_gpu)
                use = borrowed.use if opened.in_place else None
                kept.keep(InputStorage(opened.storage, key, shared=opened.in_place, use=use))
        except CannotBorrow as error:
            raise CallRefused(FailureKind.NO_DATA, str(error)) from error
        return lent.size_bytes, borrowed.about

    def lend(self, handle: str) -> LentStorage | None:
        """Let another process open published data, until it is given back; None if it cannot.

        The caller closes the descriptor.
        """
        with self._gate:
            tensor = self.published.find(handle)
            if tensor is None or tensor.parked or tensor.model is not self:
                return None
            if tensor.loan is None:
                loan = self._device.lend(tensor.storage)
                if loan is None:
                    return None
                tensor.lend(loan)
            return self.published.use(handle, tensor)

    def hand_over(self, handle: str, room: memoryview) -> bool:
        """Copy published data to this memory; return whether it is here."""
        with self._gate:
            tensor = self.published.find(handle)
            if tensor is None or tensor.storage.nbytes() != len(room):
                return False
            self._device.send([bytes_of(tensor.storage, 0, len(room))], [room])
            return True

    def park(self) -> None:
        """Move what this model's memory holds to the host; the gate is held."""
        for tensor in self.published.of_model(self).values():
            if not tensor.parked and not tensor.uses:
                tensor.end_loan()
                tensor.storage, tensor.parked = self._device.park(tensor.storage), True

    def let_go(self) -> None:
        for handle in self.published.of_model(self):
            self.published.withdraw(handle)
        self.published.forget(self, _GIVEN_BACK_S if self._device.borrowers_copy else 0.0)
        self.borrowing.close()

    # -- orders, on threads of their own --------------------------------------------------------

    def _hand_over(self, order: HandOver, frame: Frame) -> None:
        """Copy data to memory of the manager's, and say whether it is there."""
        done = False
        try:
            descriptor = one_descriptor(frame)
            self._device.adopt_thread()
            # The memory is mapped no more when this is over: the manager may seal it.
            done = self.hand_over(order.handle, map_room(descriptor, order.size_bytes))
        except (BadFrame, OSError, ValueError, MemoryError, RuntimeError) as error:
            self._note(f"data cannot be handed over: {type(error).__name__}: {error}"[:_MOST_TEXT])
        finally:
            frame.close_descriptors()
        self._tell(HandedOver(self._model, order.handle, done))

    def _lend(self, order: LendData) -> None:
        """Let another process open data, and say how, or that it cannot."""
        lent: LentStorage | None = None
        try:
            self._device.adopt_thread()
            lent = self.lend(order.handle)
        except (OSError, ValueError, MemoryError, RuntimeError) as error:
            self._note(f"data cannot be lent: {type(error).__name__}: {error}"[:_MOST_TEXT])
        if lent is None:
            self._tell(DataLent(self._model, order.handle, False, 0, 0, b""))
            return
        answer = DataLent(self._model, order.handle, True, *lent[:3])
        if lent.descriptor < 0:
            self._tell(answer)
            return
        self._tell(answer, [lent.descriptor])
        os.close(lent.descriptor)

    # -- frames of channels ---------------------------------------------------------------------

    def _publish(self, session: str, kept: KeptStorages, frame: Frame) -> Done:
        asked: Publish = frame.meta
        if asked.handle:
            self.publish(kept, asked.key, asked.epoch, asked.handle, asked.about)
            return Done()

        def publish(handle: str, most_bytes: int) -> int:
            return self.publish(kept, asked.key, asked.epoch, handle, asked.about, most_bytes)

        return Done(handle=self.puts.put(session, asked.about, asked.lifetime_s, publish))

    def _take(self, _: str, kept: KeptStorages, frame: Frame) -> Done:
        asked: Take = frame.meta
        if not asked.handle:
            descriptor = one_descriptor(frame)
            self.take_file(kept, descriptor, asked.key, asked.start, asked.size_bytes)
            return Done()
        size_bytes, about = self._take_by_handle(kept, asked.handle, asked.key)
        return Done(size_bytes, about=about)

    def _take_by_handle(self, kept: KeptStorages, handle: str, key: int) -> tuple[int, bytes]:
        borrowed: BorrowedData | None = None
        try:
            return self.take(kept, handle, key)
        except CallRefused as refused:
            is_absent = refused.failure is FailureKind.NO_DATA
            if is_absent and len(handle) <= MOST_HANDLE_CHARACTERS:
                borrowed = self.borrowing.borrow(handle)
            if borrowed is None:
                raise
        try:
            return self.take_borrowed(kept, borrowed, key)
        finally:
            if borrowed.lent.descriptor >= 0:
                os.close(borrowed.lent.descriptor)


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
