"""Every metric of a gateway, as docs/metrics.md shows it; the names without ours are OpenFaaS's."""

from common.telemetry.metrics import Metric, MetricKind

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


# -- as OpenFaaS has them ------------------------------------------------------------------------

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

# -- ours ----------------------------------------------------------------------------------------

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
