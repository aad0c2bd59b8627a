"""Data that functions pass to each other, as a worker has it: put, taken, lent and borrowed."""

import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import torch
from msgspec import structs

from gpu_manager.call_errors import CallRefused, CannotBorrow, OutOfMemory
from gpu_manager.devices.lent_memory import LentStorage, Loan, map_room, read_file
from gpu_manager.worker.channel_server import one_descriptor
from gpu_manager.worker.features import ModelFeature, ModelSpace, WorkerFeature, WorkerSpace
from gpu_manager.worker.orders import (
    BorrowData,
    DataBorrowed,
    DataGivenBack,
    DataLent,
    DataOrder,
    DataPut,
    GrantData,
    GrantLeft,
    HandedOver,
    HandOver,
    LendData,
    RecallGrant,
    WithdrawData,
    WorkerOrder,
)
from gpu_manager.worker.program.inputs import InputStorage, KeptStorages
from gpu_manager.worker.program.tensor_specs import bytes_of
from torch_shim.errors import BadFrame
from torch_shim.wire.messages import MOST_ABOUT_BYTES, Done, Publish, Take
from torch_shim.wire.protocol import FailureKind, Frame, FrameKind

MOST_HANDLE_CHARACTERS = 300
# A model that leaves waits for those who copy what it has lent, for so long at most.
_GIVEN_BACK_S = 2.0


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


# Tensors that functions put for others, by handle: all models of the process may use them.
#
# Nothing is copied: a call of another function, or of another model, reads the same memory. A
# handle cannot be guessed, and the process belongs to one tenant. Other processes may borrow a
# tensor: it stays until they have given it back.

MOST_PUBLISHED = 1024
MOST_PUBLISHED_BYTES = 4 << 30


class PublishedTensor:
    """One storage that was put; `parked` if it lies in host memory for now.

    `uses` is how often other processes have borrowed it.
    """

    def __init__(self, held: InputStorage, about: bytes, model: object) -> None:
        """`about` is for its readers; `model` is whose memory it takes."""
        self.storage: torch.UntypedStorage = held.storage
        self.about = about
        self.size_bytes = held.storage.nbytes()
        self.model = model
        self.parked = held.parked
        self.loan: Loan | None = None
        self.uses = 0
        self._held = held

    def lend(self, loan: Loan) -> None:
        """It is lent from now on, and may lie elsewhere: for who put it, too."""
        if self._held.storage is self.storage:
            self._held.storage = loan.storage
        self.storage, self.loan = loan.storage, loan

    def end_loan(self) -> None:
        """No other process may open it from now on."""
        if self.loan is not None:
            self.loan.close(self.uses)
            self.loan = None


class PublishedData:
    """What was put with one process. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tensors: dict[str, PublishedTensor] = {}
        self._lent: dict[str, PublishedTensor] = {}  # withdrawn, and not given back yet
        self.size_bytes = 0

    def add(self, handle: str, tensor: PublishedTensor) -> bool:
        """Publish a tensor; False if there are too many, or the handle has another one."""
        with self._changed:
            size_bytes = self.size_bytes + tensor.size_bytes
            is_known = handle in self._tensors or handle in self._lent
            if is_known or len(self._tensors) + len(self._lent) >= MOST_PUBLISHED:
                return False
            if size_bytes > MOST_PUBLISHED_BYTES:
                return False
            self._tensors[handle] = tensor
            self.size_bytes = size_bytes
            return True

    def find(self, handle: str) -> PublishedTensor | None:
        with self._changed:
            return self._tensors.get(handle)

    def use(self, handle: str, tensor: PublishedTensor) -> LentStorage | None:
        """Count a use of a lent tensor by another process, and return how that one opens it.

        The caller closes the descriptor. None, and no loan any more, if it was withdrawn.
        """
        with self._changed:
            if self._tensors.get(handle) is not tensor or tensor.loan is None:
                if not tensor.uses:
                    tensor.end_loan()
                return None
            lent = tensor.loan.lent
            if lent.descriptor >= 0:
                lent = lent._replace(descriptor=os.dup(lent.descriptor))
            tensor.uses += 1
            return lent

    def given_back(self, handle: str) -> None:
        with self._changed:
            tensor = self._tensors.get(handle) or self._lent.get(handle)
            if tensor is not None and tensor.uses:
                tensor.uses -= 1
                if handle in self._lent and not tensor.uses:
                    self._forget(self._lent.pop(handle))
                self._changed.notify_all()

    def withdraw(self, handle: str) -> None:
        """Forget the tensor of this handle, when it is given back; who has taken it keeps it."""
        with self._changed:
            tensor = self._tensors.pop(handle, None)
            if tensor is None:
                return
            if tensor.uses:
                self._lent[handle] = tensor
            else:
                self._forget(tensor)

    def forget(self, model: object, within_s: float) -> None:
        """Forget what was withdrawn of a model, when it is given back, or this time has passed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lent_by(model), within_s)
            for handle in self._lent_by(model):
                self._forget(self._lent.pop(handle))

    def of_model(self, model: object) -> dict[str, PublishedTensor]:
        with self._changed:
            return {key: tensor for key, tensor in self._tensors.items() if tensor.model is model}

    def _lent_by(self, model: object) -> list[str]:
        return [handle for handle, tensor in self._lent.items() if tensor.model is model]

    def _forget(self, tensor: PublishedTensor) -> None:
        self.size_bytes -= tensor.size_bytes
        tensor.end_loan()


# What one model's functions borrow from other workers, and put without asking the manager.

_PATIENCE_S = 15.0  # the manager's own patience is shorter

TellOfData = Callable[[DataOrder], None]


class Use:
    """The use of borrowed data, which ends with this object."""

    def __init__(self, handle: str, give_back: Callable[[str], None]) -> None:
        """`give_back` is called wherever the last reference goes, and takes no lock."""
        self._handle = handle
        self._give_back = give_back

    def __del__(self) -> None:
        self._give_back(self._handle)


class BorrowedData(NamedTuple):
    """Data as its lender describes it to the manager; its receiver closes the descriptor."""

    lent: LentStorage
    about: bytes
    same_gpu: bool
    use: Use


class Borrowing:
    """What one model's functions borrow. Thread-safe."""

    def __init__(self, model: int, tell: TellOfData) -> None:
        self._model = model
        self._tell = tell
        self._lock = threading.Lock()
        self._wanted: dict[str, deque[Future[BorrowedData | None]]] = {}
        self._ended: SimpleQueue[str] = SimpleQueue()  # uses; a finalizer may put to it
        self._telling: threading.Thread | None = None

    def borrow(self, handle: str) -> BorrowedData | None:
        """Return data of another worker of the tenant; None if it is not to be had."""
        wanted: Future[BorrowedData | None] = Future()
        with self._lock:
            self._wanted.setdefault(handle, deque()).append(wanted)
        self._tell(BorrowData(self._model, handle))
        wait((wanted,), _PATIENCE_S)
        with self._lock:
            waiting = self._wanted.get(handle)
            if waiting is not None and wanted in waiting:
                waiting.remove(wanted)  # what comes for it later is given back
                if not waiting:
                    del self._wanted[handle]
            return wanted.result() if wanted.done() else None

    def answer(self, order: DataBorrowed, descriptors: tuple[int, ...]) -> None:
        """The manager has answered; every question has one answer."""
        is_sound = order.done and bool(descriptors) != bool(order.token)
        with self._lock:
            waiting = self._wanted.get(order.handle)
            wanted = waiting.popleft() if waiting else None
            if waiting is not None and not waiting:
                del self._wanted[order.handle]
            if wanted is not None and is_sound:
                descriptor = descriptors[0] if descriptors else -1
                lent = LentStorage(order.size_bytes, order.offset, order.token, descriptor)
                use = Use(order.handle, self._ended.put)
                self._tell_of_ends()
                wanted.set_result(BorrowedData(lent, order.about, order.same_gpu, use))
                return
        for descriptor in descriptors:
            os.close(descriptor)
        if order.done:
            self._tell(DataGivenBack(self._model, order.handle))
        if wanted is not None:
            wanted.set_result(None)

    def close(self) -> None:
        self._ended.put("")

    def _tell_of_ends(self) -> None:
        if self._telling is None:
            self._telling = threading.Thread(target=self._tell_ends, name="borrowed", daemon=True)
            self._telling.start()

    def _tell_ends(self) -> None:
        while handle := self._ended.get():
            self._tell(DataGivenBack(self._model, handle))


MOST_GRANTED_ABOUT_BYTES = 16 << 10  # a report to the manager is small


class GrantedPuts:
    """What one model's functions may put without asking, and have put. Thread-safe.

    One put at a time, until the manager is told: what is left of a grant is said behind it.
    """

    def __init__(self, model: int, tell: TellOfData) -> None:
        self._model = model
        self._tell = tell
        self._putting = threading.Lock()  # held while a call runs, too
        self._counting = threading.Lock()
        self._left = GrantData(model, "", 0, "", 0, 0)

    def grant(self, order: GrantData) -> None:
        with self._counting:
            left = self._left
            self._left = structs.replace(order, size_bytes=left.size_bytes, pieces=left.pieces)
        self._count(order.size_bytes, order.pieces)

    def put(
        self,
        session: str,
        about: bytes,
        lifetime_s: float | None,
        publish: Callable[[str, int], int],
    ) -> str:
        """Have a storage published under a new handle; CallRefused beyond a grant.

        `publish` gets the handle and the most bytes, and returns those that it has published. The
        manager decides what is wrong with a lifetime.
        """
        with self._putting:
            granted = self._left
            if not granted.pieces or len(about) > MOST_GRANTED_ABOUT_BYTES:
                raise CallRefused(FailureKind.NO_ROOM, "the manager has to be asked")
            secret = secrets.token_urlsafe(granted.secret_bytes)
            handle = f"{granted.before}{secret}{granted.behind}"
            size_bytes = publish(handle, granted.size_bytes)
            self._count(-size_bytes, -1)
            put = DataPut(self._model, session, handle, size_bytes, about, lifetime_s)
            self._tell(put)
            return handle

    def recall(self) -> None:
        """Put nothing more without asking, and say what is left; it may wait for a call."""
        with self._putting:
            left = self._left
            self._count(-left.size_bytes, -left.pieces)
            self._tell(GrantLeft(self._model, left.size_bytes, left.pieces))

    def _count(self, more_bytes: int, more_pieces: int) -> None:
        with self._counting:
            left = self._left
            size_bytes, pieces = left.size_bytes + more_bytes, left.pieces + more_pieces
            self._left = structs.replace(left, size_bytes=size_bytes, pieces=pieces)


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
        with self._gate, _room_told():
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
            self._note(f"data cannot be handed over: {type(error).__name__}: {error}")
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
            self._note(f"data cannot be lent: {type(error).__name__}: {error}")
        if lent is None:
            self._tell(DataLent(self._model, order.handle, False, 0, 0, b""))
            return
        descriptors = [] if lent.descriptor < 0 else [lent.descriptor]
        self._tell(DataLent(self._model, order.handle, True, *lent[:3]), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

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
