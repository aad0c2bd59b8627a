"""Metrics of the process itself: memory, CPU, open files, garbage collection, Python version.

The names are those that any Python program has, so that common dashboards can read them.
"""

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

_REGISTRY = CollectorRegistry()
ProcessCollector(registry=_REGISTRY)
PlatformCollector(registry=_REGISTRY)
GCCollector(registry=_REGISTRY)


def page() -> bytes:
    return generate_latest(_REGISTRY)
