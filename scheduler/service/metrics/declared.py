"""Every metric of a scheduler, as docs/metrics.md shows it."""

from common.telemetry.metrics import Metric, MetricKind

_OURS = "gpufaas_scheduler_"
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ERRORS_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_DECISIONS_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.01, 0.1)
_RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2, 4, 10)


def _counter(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(f"{_OURS}{name}_total", MetricKind.COUNTER, help_text, labels)


def _gauge(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(f"{_OURS}{name}", MetricKind.GAUGE, help_text, labels)


def _times(name: str, help_text: str, bounds: tuple[float, ...], *labels: str) -> Metric:
    return Metric(f"{_OURS}{name}", MetricKind.HISTOGRAM, help_text, labels, bounds)


# -- of this process, also on a standby ------------------------------------------------------------

LEADING = _gauge("leading", "Whether this scheduler leads")
TERM = _gauge("term", "The leader's term, 0 on a standby")
TERMS = _counter("terms", "Terms that this process has led")
CONFIRMED = _gauge("leadership_confirmed", "Whether the datastore says that this scheduler leads")
STORE_BEHIND = _gauge(
    "store_behind_seconds", "How long something has waited to be written to the datastore"
)
STORE_HEALTHY = _gauge("store_healthy", "Whether the datastore answers")
STORE_UNWRITTEN = _gauge(
    "store_unwritten_records", "Records that the datastore refuses, or that are too large for it"
)
STARTED = _gauge("start_time_seconds", "When this process began to serve, in Unix time")
HTTP_REQUESTS = _counter(
    "http_requests", "Answers of the four routes that requests take", "route", "status"
)
TRACE_SPANS = _counter(
    "trace_spans",
    "Spans for a collector: sent, failed, or dropped (requests with all their spans)",
    "result",
)

# -- requests ------------------------------------------------------------------------------------

PLACEMENTS = _counter(
    "placements", "Requests that were given a lease in this term: hit or miss", "result"
)
ENDED = _counter("requests_ended", "Requests of this term by how they ended", "outcome")
WAITED = _times("wait_seconds", "From a request's arrival to its first lease", _SHORT_S)
HELD = _times("lease_seconds", "From dispatch to the slot's end", _SHORT_S)
LEASES = _counter("leases", "Leases that were given; several requests may share one")
WAITING = _gauge(
    "waiting_requests", "Requests that wait, in the global queue or local ones", "queue"
)
REFUSALS = _counter("refusals", "Events of this term that were not obeyed")
POLICY = _gauge("policy_info", "1 for the policy in force", "policy")

_RESULTS = "; result: hit, false_miss (another GPU held the models), miss (none did)"
POLICY_PLACEMENTS = _counter(
    "policy_placements", f"Requests that were given a lease{_RESULTS}", "policy", "result"
)
GPU_PLACEMENTS = _counter(
    "gpu_placements", "Requests that were given a lease there, by result", "gpu", "result"
)
MODEL_PLACEMENTS = _counter(
    "model_placements", "Requests with this model that were given a lease", "model", "result"
)
FUNCTION_PLACEMENTS = _counter(
    "function_placements", "Requests of this function that were given a lease", "function", "result"
)
POLICY_WAITED = _times(
    "policy_wait_seconds", "From a request's arrival to its first lease", _SHORT_S, "policy"
)
GPU_WAITED = _counter(
    "gpu_wait_seconds", "Seconds that requests placed there had waited for their first lease", "gpu"
)
MODEL_WAITED = _counter(
    "model_wait_seconds", "Seconds that requests with this model waited", "model"
)
FUNCTION_WAITED = _counter(
    "function_wait_seconds", "Seconds that this function's requests waited", "function"
)
DECIDED = _times(
    "decision_seconds", "Placement time: from an event to the core's answer", _DECISIONS_S, "policy"
)

# -- GPU time ------------------------------------------------------------------------------------

GPU_HELD = _counter("gpu_lease_seconds", "Seconds of leases that have ended, by GPU", "gpu")
MODEL_HELD = _counter("model_gpu_seconds", "Seconds of leases that have ended, by model", "model")
LOAD = _times("load_seconds", "One model's measured load", _SHORT_S)
LOADS = _counter("loads", "Loads by where the weights were: host, disk, absent", "source")
GPU_LOADS = _counter("gpu_loads", "Models loaded, by GPU", "gpu")
GPU_LOAD = _counter("gpu_load_seconds", "Seconds of loads, by GPU", "gpu")
MODEL_LOADS = _counter("model_loads", "Loads of this model", "model")
MODEL_LOAD = _counter("model_load_seconds", "Seconds of loads of this model", "model")
LOAD_FAILURES = _counter("load_failures", "Loads that failed", "gpu")
RUN_FAILURES = _counter("run_failures", "Leases whose GPU work failed")

ESTIMATE_ERROR = _times(
    "estimate_error_seconds",
    "Between the estimated and the measured load and run of a lease",
    _ERRORS_S,
)
ESTIMATE_RATIO = _times(
    "estimate_ratio", "Estimated over measured seconds: of a load, or of a run", _RATIOS, "what"
)
MODEL_ESTIMATED = _counter(
    "model_estimated_seconds", "Seconds that were expected of a model's loads and runs", "model"
)
MODEL_MEASURED = _counter(
    "model_measured_seconds", "Seconds that the same loads and runs took", "model"
)

# -- the cache -----------------------------------------------------------------------------------

EVICTIONS = _counter("evictions", "Models that had to leave a GPU in this term")
PREFETCHES = _counter("prefetches", "Models that were loaded ahead in this term")
GPU_EVICTIONS = _counter(
    "gpu_evictions",
    "Models that had to leave, by reason: room, prefetch, asked, pressure, measured, idle, other",
    "gpu",
    "reason",
)
MODEL_EVICTIONS = _counter("model_evictions", "How often this model had to leave a GPU", "model")
COPIES = _gauge("model_copies", "On how many GPUs a model is", "model")
DUPLICATES = _gauge("duplicate_models", "Copies of models beyond the first of each")
DUPLICATE_BYTES = _gauge("duplicate_bytes", "GPU memory that such copies take")
MEMORY = _gauge(
    "gpu_memory_bytes",
    "A GPU's memory in the scheduler's books: total, used, withheld",
    "gpu",
    "kind",
)
RESIDENTS = _gauge("gpu_models", "Models that a GPU holds", "gpu")
LRU_AGE = _gauge("gpu_lru_age_seconds", "Since the least recently used model was used", "gpu")

# -- the fleet -----------------------------------------------------------------------------------

GPUS = _gauge("gpus", "GPUs that are attached")
NODES = _gauge("nodes", "Nodes that are attached")
GPU_SLOTS = _gauge("gpu_slots", "How many leases a GPU can have at a time", "gpu")
GPU_LEASES = _gauge("gpu_leases", "Leases in force on a GPU", "gpu")
GPU_WAITING = _gauge("gpu_waiting_requests", "Requests in a GPU's local queues", "gpu")
SILENT = _gauge("gpu_silent", "1 while the way to a GPU's node is broken", "gpu")
DRAINING = _gauge("gpu_draining", "1 while a GPU takes nothing new", "gpu")
FLEET_EVENTS = _counter(
    "fleet_events", "joined and lost GPUs, draining ones; silent and heard nodes", "event"
)
PRESSURE = _counter("memory_pressure", "How often a GPU lacked memory that was counted on", "gpu")

METRICS: tuple[Metric, ...] = tuple(
    found for found in list(globals().values()) if isinstance(found, Metric)
)
# What a scrape finds: in the core of this term, in the exporter of spans, or by other metrics.
_AT_SCRAPE = frozenset({
    *(TRACE_SPANS, HTTP_REQUESTS, PLACEMENTS, ENDED, WAITED, REFUSALS),
    *(EVICTIONS, PREFETCHES),
})  # fmt: skip
# What is counted from the start of the process on.
COUNTERS, HISTOGRAMS = (
    tuple(metric for metric in METRICS if metric.kind is kind and metric not in _AT_SCRAPE)
    for kind in (MetricKind.COUNTER, MetricKind.HISTOGRAM)
)
# What is 0 of every GPU as soon as it has joined.
FROM_THE_START = (LOAD_FAILURES, PRESSURE, GPU_LOADS, GPU_LOAD, GPU_HELD)
