"""What one model's functions borrow from other workers, and put without asking the manager."""

import os
import secrets
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import NamedTuple

from msgspec import structs

from gpu_manager.call_errors import CallRefused
from gpu_manager.devices.lent_memory import LentStorage
from gpu_manager.worker.orders import (
    BorrowData,
    DataBorrowed,
    DataGivenBack,
    DataOrder,
    DataPut,
    GrantData,
    GrantLeft,
)
from torch_shim.wire.protocol import FailureKind

# Asks the manager for data that another worker has, and says when it is used no more.

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


# Data that functions put with this worker alone: within what the manager has granted ahead.
#
# The manager learns of it afterwards. A grant is set aside in the tenant's account, so that
# nothing is put beyond a bound; where none is left the function asks the manager, as it does the
# first time.

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
