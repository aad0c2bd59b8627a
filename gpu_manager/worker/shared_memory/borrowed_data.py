"""Asks the manager for data that another worker has, and says when it is used no more."""

import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

from gpu_manager.worker.data_orders import BorrowData, DataBorrowed, DataGivenBack, DataOrder
from gpu_manager.worker.lending.lent_storage import LentStorage

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


class _Wanted:
    """One question, and its answer."""

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.answer: BorrowedData | None = None


class Borrowing:
    """What one model's functions borrow. Thread-safe."""

    def __init__(self, model: int, tell: TellOfData) -> None:
        self._model = model
        self._tell = tell
        self._lock = threading.Lock()
        self._wanted: dict[str, deque[_Wanted]] = {}
        self._ended: SimpleQueue[str] = SimpleQueue()  # uses; a finalizer may put to it
        self._telling: threading.Thread | None = None

    def borrow(self, handle: str) -> BorrowedData | None:
        """Return data of another worker of the tenant; None if it is not to be had."""
        wanted = _Wanted()
        with self._lock:
            self._wanted.setdefault(handle, deque()).append(wanted)
        self._tell(BorrowData(self._model, handle))
        wanted.answered.wait(_PATIENCE_S)
        with self._lock:
            waiting = self._wanted.get(handle)
            if waiting is not None and wanted in waiting:
                waiting.remove(wanted)  # what comes for it later is given back
                if not waiting:
                    del self._wanted[handle]
        return wanted.answer

    def answer(self, order: DataBorrowed, descriptors: tuple[int, ...]) -> None:
        """The manager has answered; every question has one answer."""
        with self._lock:
            waiting = self._wanted.get(order.handle)
            wanted = waiting.popleft() if waiting else None
            if waiting is not None and not waiting:
                del self._wanted[order.handle]
            if wanted is not None and order.done and bool(descriptors) != bool(order.token):
                descriptor = descriptors[0] if descriptors else -1
                lent = LentStorage(order.size_bytes, order.offset, order.token, descriptor)
                use = Use(order.handle, self._ended.put)
                wanted.answer = BorrowedData(lent, order.about, order.same_gpu, use)
                self._tell_of_ends()
        if wanted is None or wanted.answer is None:
            for descriptor in descriptors:
                os.close(descriptor)
            if order.done:
                self._tell(DataGivenBack(self._model, order.handle))
        if wanted is not None:
            wanted.answered.set()

    def close(self) -> None:
        """Nothing is borrowed any more, or used."""
        self._ended.put("")

    def _tell_of_ends(self) -> None:
        if self._telling is None:
            self._telling = threading.Thread(target=self._tell_ends, name="borrowed", daemon=True)
            self._telling.start()

    def _tell_ends(self) -> None:
        while handle := self._ended.get():
            self._tell(DataGivenBack(self._model, handle))
