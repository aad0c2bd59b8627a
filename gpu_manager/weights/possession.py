"""Records which functions have proved to have which weights."""

import threading

# Functions that are remembered of one tenant and image: nobody says that one is gone. Those that
# proved it the longest ago have to prove it again.
MOST_FUNCTIONS = 1_000


class PossessionRecord:
    """The functions that have proved to have weights, by digest and tenant. Thread-safe."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[str, dict[str, None]]] = {}  # functions, the latest last
        self._lock = threading.Lock()

    def add(self, function: str, digest: str) -> None:
        """Record that the function has proved to have these weights."""
        with self._lock:
            tenants = self._tenants.setdefault(digest, {})
            functions = tenants.setdefault(tenant_of(function), {})
            functions.pop(function, None)
            functions[function] = None
            if len(functions) > MOST_FUNCTIONS:
                del functions[next(iter(functions))]

    def tenants(self, digest: str) -> frozenset[str]:
        """The tenants of the functions that have proved to have these weights."""
        with self._lock:
            return frozenset(self._tenants.get(digest, ()))

    def allows(self, function: str, digest: str) -> bool:
        """Whether the function has proved to have these weights."""
        with self._lock:
            return function in self._tenants.get(digest, {}).get(tenant_of(function), {})

    def remove(self, function: str, digest: str) -> bool:
        """Remove the record, so that the function must prove possession again.

        Return whether it was the last one of these weights.
        """
        with self._lock:
            tenants, tenant = self._tenants.get(digest, {}), tenant_of(function)
            functions = tenants.get(tenant, {})
            if function not in functions:
                return False
            del functions[function]
            if not functions:
                del tenants[tenant]
            if not tenants:
                del self._tenants[digest]
            return not tenants

    def forget(self, digest: str) -> bool:
        """Remove all records of weights that the node no longer has; return whether any existed."""
        with self._lock:
            return self._tenants.pop(digest, None) is not None


def tenant_of(function: str) -> str:
    """Return the tenant of a function, `tenant/function`."""
    return function.partition("/")[0]
