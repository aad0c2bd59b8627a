"""Data that functions put with this worker alone: within what the manager has granted ahead.

The manager learns of it afterwards. A grant is set aside in the tenant's account, so that nothing
is put beyond a bound; where none is left the function asks the manager, as it does the first time.
"""

import secrets
import threading
from collections.abc import Callable

from gpu_manager.worker.call_errors import CallRefused
from gpu_manager.worker.calls.data_in_worker import DataInWorker
from gpu_manager.worker.data_orders import DataOrder, DataPut, GrantData, GrantLeft
from gpu_manager.worker.program.channel_state import KeptStorages
from torch_shim.wire.protocol import FailureKind

MOST_GRANTED_ABOUT_BYTES = 16 << 10  # a report to the manager is small


class GrantedPuts:
    """What one model's functions may put without asking, and have put. Thread-safe.

    One put at a time, until the manager is told: what is left of a grant is said behind it.
    """

    def __init__(self, model: int, data: DataInWorker, tell: Callable[[DataOrder], None]) -> None:
        self._model = model
        self._data = data
        self._tell = tell
        self._putting = threading.Lock()  # held while a call runs, too
        self._counting = threading.Lock()
        self._left = GrantData(model, "", 0, "", 0, 0)

    def grant(self, order: GrantData) -> None:
        """The manager has set aside more."""
        with self._counting:
            left = self._left
            self._left = order._replace(size_bytes=left.size_bytes, pieces=left.pieces)
        self._count(order.size_bytes, order.pieces)

    def put(
        self,
        session: str,
        kept: KeptStorages,
        key: int,
        epoch: int,
        about: bytes,
        lifetime_s: list[float],
    ) -> str:
        """Publish a storage that a session keeps, under a new handle; CallRefused beyond a grant.

        The manager decides what is wrong with a lifetime.
        """
        with self._putting:
            granted = self._left
            if not granted.pieces or len(about) > MOST_GRANTED_ABOUT_BYTES:
                raise CallRefused(FailureKind.NO_ROOM, "the manager has to be asked")
            secret = secrets.token_urlsafe(granted.secret_bytes)
            handle = f"{granted.before}{secret}{granted.behind}"
            size_bytes = self._data.publish(kept, key, epoch, handle, about, granted.size_bytes)
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
            self._left = left._replace(size_bytes=size_bytes, pieces=pieces)
