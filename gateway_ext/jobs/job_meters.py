"""What Prometheus is told of jobs."""

import time
from collections.abc import Callable, Iterator, Mapping

from gateway_ext import declared
from gateway_ext.jobs.model import Kind
from gateway_ext.jobs.queue import JobQueue
from scheduler.exposition import Family, Labels, Names, gauge


class JobMeters:
    """How many calls are queued for each function, and how jobs ended."""

    def __init__(
        self, queue: JobQueue, endings: Callable[[], Mapping[tuple[Kind, str], int]]
    ) -> None:
        self._queue = queue
        self._endings = endings

    def families(self, functions: Names) -> Iterator[Family]:
        """The families of now; `functions` have numbers of their own."""
        tally = self._queue.tally
        queued: list[tuple[Labels, float]] = [((function,), 0.0) for function in functions]
        for function, count in tally.calls.items():
            queued.append(((functions.of(str(function)),), count))
        yield gauge(declared.JOBS_QUEUED, queued)
        since_s = tally.oldest_queued_at_s
        oldest_s = 0.0 if since_s is None else max(0.0, time.time() - since_s)
        yield gauge(declared.JOBS_OLDEST, [((), oldest_s)])
        yield gauge(declared.JOB_CALLBACKS, [((), tally.callbacks)])
        yield gauge(declared.JOBS_DEAD, [((), tally.dead)])
        yield gauge(declared.JOBS_AWAY, [((), float(self._queue.away))])
        endings: list[tuple[Labels, float]] = [
            ((kind.name.lower(), outcome), count)
            for (kind, outcome), count in self._endings().items()
        ]
        yield gauge(declared.JOB_ATTEMPTS, endings)
