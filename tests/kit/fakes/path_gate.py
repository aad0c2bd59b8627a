"""An emulated path on which pieces pass when a test says so."""

import threading

from gpu_manager.transfers.path import PathSpeed, TransferPath

PIECE_BYTES = 64 << 10


class PathGate:
    """Lets pieces pass one by one, or all of them from some moment on."""

    def __init__(self) -> None:
        self._asked = threading.Semaphore(0)
        self._pass = threading.Semaphore(0)
        self._is_open = False

    def path(self) -> TransferPath:
        """A path of pieces of `PIECE_BYTES`."""
        return TransferPath(PathSpeed(1.0), None, lambda: 0.0, self._wait)

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

    def _wait(self, _: float) -> None:
        if not self._is_open:
            self._asked.release()
            assert self._pass.acquire(timeout=60)
