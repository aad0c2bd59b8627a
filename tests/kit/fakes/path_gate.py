"""A path on which pieces pass when a test says so."""

import threading
from collections.abc import Callable

from gpu_manager.devices.paths import DiskPath, Transfer, TransferAbandoned

PIECE_BYTES = 64 << 10


class PathGate:
    """Lets pieces pass one by one, or all of them from some moment on."""

    def __init__(self) -> None:
        self._asked = threading.Semaphore(0)
        self._pass = threading.Semaphore(0)
        self._is_open = False

    def path(self) -> DiskPath:
        """A path of pieces of `PIECE_BYTES`."""
        return _GatedPath(self)

    def transfer(self) -> Transfer:
        return _GatedTransfer(self)

    def let(self, pieces: int) -> None:
        """Let so many pieces pass."""
        for _ in range(pieces):
            assert self._asked.acquire(timeout=60)
            self._pass.release()

    def until_asked(self) -> None:
        """Wait until a piece is about to pass."""
        assert self._asked.acquire(timeout=60)
        self._asked.release()

    def open(self) -> None:
        """Let everything pass."""
        self._is_open = True
        self._pass.release(1000)

    def wait(self) -> None:
        """Wait until one more piece may pass."""
        if not self._is_open:
            self._asked.release()
            assert self._pass.acquire(timeout=60)


class _GatedPath(DiskPath):
    block_bytes = PIECE_BYTES

    def __init__(self, gate: PathGate) -> None:
        self._gate = gate

    def transfer(self, owner: str) -> Transfer:
        del owner
        return self._gate.transfer()


class _GatedTransfer(Transfer):
    def __init__(self, gate: PathGate) -> None:
        self._gate = gate

    def move(
        self,
        size_bytes: int,
        moved: Callable[[int], object] = lambda _: None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        while size_bytes:
            self._gate.wait()
            if not is_wanted():
                raise TransferAbandoned
            count = min(size_bytes, PIECE_BYTES)
            moved(count)
            size_bytes -= count
