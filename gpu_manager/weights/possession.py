"""Records which functions have proved to have which weights."""

import threading


class PossessionRecord:
    """The functions that have proved to have weights, by digest. Thread-safe."""

    def __init__(self) -> None:
        self._functions: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def add(self, function: str, digest: str) -> None:
        """Record that the function has proved to have these weights."""
        with self._lock:
            self._functions.setdefault(digest, set()).add(function)

    def allows(self, function: str, digest: str) -> bool:
        """Whether the function has proved to have these weights."""
        return function in self._functions.get(digest, ())

    def remove(self, function: str, digest: str) -> None:
        """Remove the record, so that the function must prove possession again."""
        with self._lock:
            functions = self._functions.get(digest, set())
            functions.discard(function)
            if not functions:
                self._functions.pop(digest, None)

    def forget(self, digest: str) -> None:
        """Remove all records of weights that the node no longer has."""
        with self._lock:
            self._functions.pop(digest, None)
