"""Every metric of a gateway (names without ours are OpenFaaS's), and the counts of its calls."""

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from http import HTTPStatus
from operator import add
from typing import NamedTuple

from common.telemetry.metrics import (
    BoundedNames,
    Histogram,
    Metric,
    MetricFamily,
    MetricKind,
    Values,
    counted_in,
    gauge,
    page,
)

MOST_NAMES = 1_000
_CODES = {status.value: str(status.value) for status in HTTPStatus} | {499: "499"}
_HUNDRED = 100
_FAILED = "5"


_OURS = "gpufaas_gateway_"
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_WAKE_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120)
_SYSTEM_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
FUNCTION = "function_name"
WORKFLOW = "workflow"


def _counter(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(f"{_OURS}{name}_total", MetricKind.COUNTER, help_text, labels)


def _gauge(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(f"{_OURS}{name}", MetricKind.GAUGE, help_text, labels)


INVOCATIONS = Metric(
    "gateway_function_invocation_total",
    MetricKind.COUNTER,
    "Function invocations; code 499: the caller went away",
    ("code", FUNCTION),
)
SECONDS = Metric(
    "gateway_functions_seconds",
    MetricKind.HISTOGRAM,
    "Seconds that functions took",
    ("code", FUNCTION),
    _SHORT_S,
)
STARTED_CALLS = Metric(
    "gateway_function_invocation_started",
    MetricKind.UNTYPED,  # a counter, but OpenFaaS's name for it has no `_total`
    "Invocations begun",
    (FUNCTION,),
)
REPLICAS = Metric("gateway_service_count", MetricKind.GAUGE, "Ready replicas", (FUNCTION,))
SYSTEM_REQUESTS = Metric(
    "provider_http_requests_total",
    MetricKind.COUNTER,
    "Answers below /system",
    ("code", "method", "path"),
)
SYSTEM_SECONDS = Metric(
    "provider_http_request_duration_seconds",
    MetricKind.HISTOGRAM,
    "From the request's head to the answer's end",
    ("code", "method", "path"),
    _SYSTEM_S,
)

LEASES = Metric(
    f"{_OURS}lease_seconds",
    MetricKind.HISTOGRAM,
    "Waiting for a lease, by result: hit, miss, or what went wrong",
    ("result",),
    _SHORT_S,
)
REFUSED = _counter("refused_calls", "Calls that name no function", "code")
RETRIES = _counter("retries", "Calls tried once more", FUNCTION)
BATCHED = _counter("batched_calls", "Calls that a handle_batch was given, and answered", FUNCTION)
BATCHES = _counter(
    "batches", "Lists of calls that a handle_batch was given: each call counts its part", FUNCTION
)
CUT = _counter("cut_answers", "Answers broken off after their status", FUNCTION, "why")
IN_FLIGHT = _gauge("calls_in_flight", "Calls that instances have", FUNCTION)
WAITING = _gauge("calls_waiting", "Calls that wait for an instance", FUNCTION)
EXPECTED_WAIT = _gauge(
    "expected_wait_seconds",
    "How long a call that arrives now should wait for its turn; calls beyond max_wait_s get 429",
    FUNCTION,
)
WANTED = _gauge("replicas_wanted", "Replicas that were asked for", FUNCTION)
TEMPLATES = _gauge(
    "template_bytes",
    "Private memory of the processes that instances are forked from; forks share much of it",
    FUNCTION,
)
WAKES = Metric(
    f"{_OURS}wake_seconds",
    MetricKind.HISTOGRAM,
    "From the first call of a function without replicas to one that is ready",
    (),
    _WAKE_S,
)
INSTANCES_STARTED = _counter(
    "instances_started", "Instances that began to take calls; many may mean crashes", FUNCTION
)
FUNCTIONS = _gauge("functions", "Functions that are deployed")
STARTED = _gauge("start_time_seconds", "When this process began to serve, in Unix time")
JOBS_QUEUED = _gauge("jobs_queued", "Async calls not yet made", FUNCTION)
JOBS_DEAD = _gauge("jobs_dead", "Dead letters, until somebody sees to them")
JOB_CALLBACKS = _gauge("job_callbacks_queued", "Results that are still to be posted to somebody")
JOBS_OLDEST = _gauge(
    "jobs_oldest_seconds", "How long the job that waits longest has been here, 0 if none waits"
)
JOBS_AWAY = _gauge("jobs_queue_away", "1 while the queue cannot be reached")
JOB_ATTEMPTS = _counter(
    "job_attempts",
    "Attempts of calls and callbacks; outcome: done, answered (a callback follows), again, dead",
    "kind",
    "outcome",
)
WORKFLOW_RUNS = _counter(
    "workflow_runs",
    "Workflows that ended, by the status of the answer (499: broken off); slo: met, missed, none",
    "code",
    "slo",
    WORKFLOW,
)
WORKFLOW_SECONDS = Metric(
    f"{_OURS}workflow_seconds",
    MetricKind.HISTOGRAM,
    "Seconds that workflows took",
    (WORKFLOW,),
    _SHORT_S,
)
WORKFLOWS_RUNNING = _gauge("workflows_running", "Workflows under way")
WORKFLOW_BYTES = _gauge("workflow_bytes", "What the workflows under way hold of their stages")
TRACE_SPANS = _counter(
    "trace_spans",
    "Spans for a collector: sent, failed, or dropped (calls with all their spans)",
    "result",
)

METRICS: tuple[Metric, ...] = tuple(
    found for found in list(globals().values()) if isinstance(found, Metric)
)


BOUNDS_S = SECONDS.bounds

Source = Callable[[], Iterable[MetricFamily]]


class FunctionLoad(NamedTuple):
    """How busy a function is at the moment."""

    function: str
    replicas: int
    inflight: int
    waiting: int
    expected_wait_s: float = 0.0


class GatewayMeters:
    """Counts of the gateway; `loads` is called at every scrape for the present functions.

    At most `most_names` functions have numbers of their own, the rest are `other`; the numbers of a
    removed function vanish.
    """

    def __init__(
        self,
        loads: Callable[[], Iterable[FunctionLoad]] | None = None,
        most_names: int = MOST_NAMES,
    ) -> None:
        self._loads = loads
        self.functions = BoundedNames(most_names)
        self._sources: list[Source] = []
        self._answered: Counter[str] = Counter()
        self._instances: dict[str, frozenset[str]] = {}
        self._invocations = Values(INVOCATIONS)
        self._seconds = Histogram(SECONDS)
        self._begun = Values(STARTED_CALLS)
        self._leases = Histogram(LEASES)
        self._refused = Values(REFUSED)
        self._retries = Values(RETRIES)
        self._batched = Values(BATCHED)
        self._batches = Values(BATCHES)
        self._cut = Values(CUT)
        self._instances_started = Values(INSTANCES_STARTED)
        self._started = gauge(STARTED, [((), time.time())])

    def add(self, source: Source) -> None:
        """The source is called at every scrape."""
        self._sources.append(source)

    def started(self, function: str) -> None:
        self._begun.add((self.functions.of(function),))

    def ended(self, function: str, code: int, seconds: float) -> None:
        """Count an answered call, or one that its caller left (499)."""
        labels = (_CODES.get(code) or _class(code), self.functions.of(function))
        self._answered[function] += 1
        self._invocations.add(labels)
        self._seconds.add(labels, seconds)

    def busy(self, function: str) -> None:
        """Count a call that was refused at once; its time would make the function look fast."""
        label = self.functions.of(function)
        self._answered[function] += 1
        self._begun.add((label,))
        self._invocations.add((_CODES[HTTPStatus.TOO_MANY_REQUESTS], label))

    def refused(self, code: int) -> None:
        """Count a call that names no known function."""
        self._refused.add((str(code),))

    def lease(self, result: str, seconds: float) -> None:
        """Count an answer of the scheduler, and the wait for it."""
        self._leases.add((result,), seconds)

    def retried(self, function: str) -> None:
        self._retries.add((self.functions.of(function),))

    def batched(self, function: str, together: int) -> None:
        """Count a call that its handler was given in a list of so many."""
        labels = (self.functions.of(function),)
        self._batched.add(labels)
        self._batches.add(labels, 1 / together)

    def cut(self, function: str, why: str) -> None:
        """Count an answer that broke off after its status had been sent."""
        self._cut.add((self.functions.of(function), why))

    def serves(self, function: str, instances: Sequence[str]) -> None:
        """Note the instances that take a function's calls from now on."""
        now = frozenset(instances)
        new = now - self._instances.get(function, frozenset())
        self._instances[function] = now
        if new:
            self._instances_started.add((self.functions.of(function),), len(new))

    def gone(self, function: str) -> None:
        self._forget(function)
        if self._loads is not None:
            self._forget_all_but({load.function for load in self._loads()})

    def invocations_of(self, function: str) -> int:
        return self._answered[function]

    def failures(self) -> Counter[str]:
        """How many calls of each function were answered with a 5xx."""
        counts: Counter[str] = Counter()
        for (code, function), count in self._invocations.values.items():
            if code.startswith(_FAILED):
                counts[function] += int(count)
        return counts

    def seconds(self, functions: Container[str]) -> dict[str, list[int]]:
        """For each function, how many answers took up to each bound of `BOUNDS_S`, or longer."""
        sums: dict[str, list[int]] = {}
        for (_, function), counts in self._seconds.counts():
            if function not in functions:
                continue
            before = sums.get(function)
            sums[function] = list(counts) if before is None else list(map(add, before, counts))
        return sums

    def text(self) -> bytes:
        return page(self._families())

    def _families(self) -> Iterator[MetricFamily]:
        """The gauges first: they determine which functions are gone."""
        yield from self._of_the_moment()
        yield from counted_in(self)
        for source in self._sources:
            yield from source()

    def _of_the_moment(self) -> Iterator[MetricFamily]:
        if self._loads is None:
            return
        loads = [(load, (self.functions.of(load.function),)) for load in self._loads()]
        self._forget_all_but({load.function for load, _ in loads})
        yield gauge(FUNCTIONS, [((), len(loads))])
        yield gauge(REPLICAS, [(labels, load.replicas) for load, labels in loads])
        yield gauge(IN_FLIGHT, [(labels, load.inflight) for load, labels in loads])
        yield gauge(WAITING, [(labels, load.waiting) for load, labels in loads])
        waits = [(labels, load.expected_wait_s) for load, labels in loads]
        yield gauge(EXPECTED_WAIT, waits)

    def _forget_all_but(self, known: Container[str]) -> None:
        """Calls that outlive their function are counted after it was removed."""
        for function in {*self.functions, *self._answered}:
            if function not in known:
                self._forget(function)

    def _forget(self, function: str) -> None:
        self.functions.forget(function)
        self._answered.pop(function, None)
        self._instances.pop(function, None)
        for family in counted_in(self):
            if FUNCTION in family.metric.labels:
                family.forget(FUNCTION, function)


def _class(code: int) -> str:
    """The label of a status: functions may return any, so unknown ones count by first digit."""
    return f"{code // _HUNDRED}xx"


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
        self._requests = Values(SYSTEM_REQUESTS)
        self._times = Histogram(SYSTEM_SECONDS)

    def answered(self, method: str, path: str, status: int, took_s: float) -> None:
        """Names in the path are left out, as their number has no bound."""
        shown = "/".join(path.split("/")[:3])
        labels = (
            str(status),
            method if method in _METHODS else "other",
            shown if shown in _KNOWN else "other",
        )
        self._requests.add(labels)
        self._times.add(labels, took_s)

    def families(self) -> Iterable[MetricFamily]:
        return (self._requests, self._times)

    def text(self) -> bytes:
        return page(self.families())
