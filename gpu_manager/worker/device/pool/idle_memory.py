"""What calls of several models leave free on a real GPU is given back while they go on."""

import threading
from collections.abc import Callable

# Free memory stays with its models for so long: each counts with the largest call of this time.
_KEPT_FREE_S = 1.0


class IdleMemory:
    """Gives back what calls have left free, once a second while there are calls. Thread-safe."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._lock = threading.Lock()
        self._is_due = False

    def note_call(self) -> None:
        """Give what is free by then back in a second, in a thread of its own."""
        with self._lock:
            if self._is_due:
                return
            self._is_due = True
        timer = threading.Timer(_KEPT_FREE_S, self._give_back)
        timer.daemon = True
        timer.start()

    def _give_back(self) -> None:
        with self._lock:
            self._is_due = False
        self._release()
