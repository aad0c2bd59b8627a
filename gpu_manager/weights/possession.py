"""Which functions have shown that they have which weights."""

import threading


class PossessionRecord:
    """Functions by the digest of weights that they have shown; usable from any thread."""

    def __init__(self) -> None:
        self._functions: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def add(self, function: str, digest: str) -> None:
        """The function has shown these weights."""
        with self._lock:
            self._functions.setdefault(digest, set()).add(function)

    def allows(self, function: str, digest: str) -> bool:
        """Whether the function has shown these weights."""
        return function in self._functions.get(digest, ())

    def remove(self, function: str, digest: str) -> None:
        """The function must show them anew."""
        with self._lock:
            functions = self._functions.get(digest, set())
            functions.discard(function)
            if not functions:
                self._functions.pop(digest, None)

    def forget(self, digest: str) -> None:
        """The weights are gone: every function must show them anew."""
        with self._lock:
            self._functions.pop(digest, None)
