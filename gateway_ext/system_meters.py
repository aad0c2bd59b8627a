"""What a provider's dashboards read: its answers by method, path and code, and their times."""

from collections.abc import Iterable

from gateway_ext import declared
from scheduler.exposition import Family, Histogram, Values, page

_KNOWN = frozenset(
    "/system/" + name
    for name in (
        *("functions", "function", "scale-function", "alert", "info", "namespaces", "namespace"),
        *("secrets", "logs", "jobs"),
    )
)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})


class SystemMeters:
    """Counts answers below /system."""

    def __init__(self) -> None:
        self._requests = Values(declared.SYSTEM_REQUESTS)
        self._times = Histogram(declared.SYSTEM_SECONDS)

    def answered(self, method: str, path: str, status: int, took_s: float) -> None:
        """One request was; names in its path are left out, since there may be any number."""
        shown = "/".join(path.split("/")[:3])
        labels = (
            str(status),
            method if method in _METHODS else "other",
            shown if shown in _KNOWN else "other",
        )
        self._requests.add(labels)
        self._times.add(labels, took_s)

    def families(self) -> Iterable[Family]:
        """What was counted."""
        return (self._requests, self._times)

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return page(self.families())
