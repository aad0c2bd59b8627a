"""What a provider's dashboards read: its answers by method, path and code, and their times."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

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
        self._registry = CollectorRegistry()
        labels = ("code", "method", "path")
        self._requests = Counter(
            "provider_http_requests", "Answers below /system", labels, registry=self._registry
        )
        self._times = Histogram(
            "provider_http_request_duration_seconds",
            "From the request's head to the answer's end",
            labels,
            registry=self._registry,
        )

    def answered(self, method: str, path: str, status: int, took_s: float) -> None:
        """One request was; names in its path are left out, since there may be any number."""
        shown = "/".join(path.split("/")[:3])
        labels = (
            str(status),
            method if method in _METHODS else "other",
            shown if shown in _KNOWN else "other",
        )
        self._requests.labels(*labels).inc()
        self._times.labels(*labels).observe(took_s)

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self._registry)
