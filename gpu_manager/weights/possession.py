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

    def tenants(self, digest: str) -> frozenset[str]:
        """The tenants of the functions that have proved to have these weights."""
        with self._lock:
            return frozenset(tenant_of(each) for each in self._functions.get(digest, ()))

    def allows(self, function: str, digest: str) -> bool:
        """Whether the function has proved to have these weights."""
        return function in self._functions.get(digest, ())

    def remove(self, function: str, digest: str) -> bool:
        """Remove the record, so that the function must prove possession again.

        Return whether it was the last one of these weights.
        """
        with self._lock:
            functions = self._functions.get(digest)
            if functions is None or function not in functions:
                return False
            functions.discard(function)
            if not functions:
                del self._functions[digest]
            return not functions

    def forget(self, digest: str) -> bool:
        """Remove all records of weights that the node no longer has; return whether any existed."""
        with self._lock:
            return self._functions.pop(digest, None) is not None


def tenant_of(function: str) -> str:
    """Return the tenant of a function, `tenant/function`."""
    return function.partition("/")[0]
