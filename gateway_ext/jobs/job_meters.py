"""What Prometheus is told of jobs."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway_ext.jobs.model import Kind
from gateway_ext.jobs.queue import JobQueue

_OURS = "gpufaas_gateway"


class JobMeters(Collector):
    """How many calls are queued for each function, and how jobs ended."""

    def __init__(
        self, queue: JobQueue, endings: Callable[[], Mapping[tuple[Kind, str], int]]
    ) -> None:
        self._queue = queue
        self._endings = endings

    def collect(self) -> Iterator[Metric]:
        """The families of now."""
        queued = GaugeMetricFamily(
            f"{_OURS}_jobs_queued", "Async calls not yet made", labels=["function_name"]
        )
        for function, count in sorted(self._queue.waiting().items()):
            queued.add_metric([str(function)], count)
        yield queued
        ended = CounterMetricFamily(
            f"{_OURS}_job_attempts", "Attempts by what came of them", labels=["kind", "outcome"]
        )
        for (kind, outcome), count in sorted(self._endings().items()):
            ended.add_metric([kind.name.lower(), outcome], count)
        yield ended
