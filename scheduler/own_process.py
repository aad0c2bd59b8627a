"""What every process tells Prometheus of itself: memory, CPU, open files, garbage, Python.

The names are those that any Python program has, so that everybody's dashboards read them.
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
    """The numbers of now, as Prometheus reads them."""
    return generate_latest(_REGISTRY)
