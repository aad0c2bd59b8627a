"""The metrics that a provider's dashboards read: answers by method, path and code, and times."""

from collections.abc import Iterable

from common.telemetry.metrics import Histogram, MetricFamily, Values, page
from gateway_ext.metrics import gateway_metrics

_KNOWN = frozenset(
    "/system/" + name
    for name in (
        *("functions", "function", "scale-function", "alert", "info", "namespaces", "namespace"),
        *("secrets", "logs", "jobs", "workflows", "workflow"),
    )
)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})


class ApiMeters:
    """Counts answers below /system."""

    def __init__(self) -> None:
        self._requests = Values(gateway_metrics.SYSTEM_REQUESTS)
        self._times = Histogram(gateway_metrics.SYSTEM_SECONDS)

    def answered(self, method: str, path: str, status: int, took_s: float) -> None:
        """Count one answer; names in its path are left out, as their number has no bound."""
        shown = "/".join(path.split("/")[:3])
        labels = (
            str(status),
            method if method in _METHODS else "other",
            shown if shown in _KNOWN else "other",
        )
        self._requests.add(labels)
        self._times.add(labels, took_s)

    def families(self) -> Iterable[MetricFamily]:
        """All metrics counted here."""
        return (self._requests, self._times)

    def text(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return page(self.families())
