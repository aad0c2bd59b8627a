"""Metrics of the job queue."""

from collections.abc import Callable, Iterator, Mapping

from common.telemetry.metrics import BoundedNames, Labels, MetricFamily, gauge
from gateway_ext.jobs.queue.job_queue import JobQueue
from gateway_ext.jobs.queue.job_values import JobKind
from gateway_ext.metrics import gateway_metrics


class JobMeters:
    """Reports queued calls by function, and how attempts ended."""

    def __init__(
        self, queue: JobQueue, endings: Callable[[], Mapping[tuple[JobKind, str], int]]
    ) -> None:
        self._queue = queue
        self._endings = endings

    def families(self, functions: BoundedNames) -> Iterator[MetricFamily]:
        """The current values; `functions` bounds the number of label values."""
        tally = self._queue.tally
        queued: list[tuple[Labels, float]] = [((function,), 0.0) for function in functions]
        for function, count in tally.calls.items():
            queued.append(((functions.of(str(function)),), count))
        yield gauge(gateway_metrics.JOBS_QUEUED, queued)
        since_s = tally.oldest_queued_at_s
        oldest_s = 0.0 if since_s is None else max(0.0, self._queue.now_s() - since_s)
        yield gauge(gateway_metrics.JOBS_OLDEST, [((), oldest_s)])
        yield gauge(gateway_metrics.JOB_CALLBACKS, [((), tally.callbacks)])
        yield gauge(gateway_metrics.JOBS_DEAD, [((), tally.dead)])
        yield gauge(gateway_metrics.JOBS_AWAY, [((), float(self._queue.away))])
        endings: list[tuple[Labels, float]] = [
            ((kind.name.lower(), outcome), count)
            for (kind, outcome), count in self._endings().items()
        ]
        yield gauge(gateway_metrics.JOB_ATTEMPTS, endings)
