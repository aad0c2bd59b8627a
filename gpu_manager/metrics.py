"""The declarations of all metrics of a GPU manager, from which docs/metrics.md is generated."""

from common.telemetry.metrics import Metric, MetricKind

_OURS = "gpufaas_node_"
_LOADS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


def _counter(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(f"{_OURS}{name}_total", MetricKind.COUNTER, help_text, labels)


def _gauge(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(f"{_OURS}{name}", MetricKind.GAUGE, help_text, labels)


# -- the node ------------------------------------------------------------------------------------

STARTED = _gauge("start_time_seconds", "When this process began to serve, in Unix time")
ATTACHED = _gauge("attached", "Whether a scheduler is reached")
SESSIONS = _gauge("sessions", "Processes of functions that are connected")
LEASES = _gauge("leases", "Leases in force or ending")
LEASES_ENDED = _counter("leases_ended", "Leases that have ended, by why", "reason")
WEIGHTS = _gauge(
    "weights_bytes",
    "Weights on the node: memory, lingering (evicted, still mapped), reserved, disk",
    "kind",
)
WEIGHTS_BUDGET = _gauge("weights_budget_bytes", "What weights may take of the host's memory")
DATA = _gauge(
    "data_bytes",
    "Data that functions put for each other: memory (kept to be used again, too), disk, worker "
    "(whose worker alone has it)",
    "kind",
)
DATA_PIECES = _gauge("data_pieces", "Pieces of such data")
WEIGHTS_EVICTED = _counter("weights_evicted", "Weights that left the host's memory")

# -- GPUs ----------------------------------------------------------------------------------------

MEMORY = _gauge(
    "gpu_memory_bytes",
    "The ledger of a GPU's memory: capacity, granted (to models), withheld (in the hands of "
    "others), free",
    "gpu",
    "kind",
)
DEVICE_MEMORY = _gauge("device_memory_bytes", "What NVML says that a GPU has", "gpu")
DEVICE_USED = _gauge("device_used_bytes", "What NVML says that everybody uses of a GPU", "gpu")
DRIFT = _gauge("ledger_drift_bytes", "NVML's use of a GPU less what the ledger has granted", "gpu")
WORKER_MEMORY = _gauge(
    "worker_memory_bytes",
    "Worker processes of a GPU together, at the last look: measured (by NVML; on an emulated GPU "
    "by their own memory, with their weights), granted (by the ledger), over (what processes take "
    "beyond their own grant)",
    "gpu",
    "kind",
)
UTILISATION = _gauge("gpu_utilisation_ratio", "Share of the last moments with a kernel", "gpu")
MODELS = _gauge("gpu_models", "Models on a GPU, also those that are loading", "gpu")
STUCK_LOADS = _gauge("stuck_loads", "Loads that make no progress, now", "gpu")
LOST = _gauge("gpu_lost", "1 once a GPU is of no use any more", "gpu")
HEALTH = _counter("gpu_health_events", "What a GPU said about its health", "gpu", "fatal")
PRESSURE = _counter("memory_pressure", "Calls that needed more memory than was granted", "gpu")

TRANSFERRED = _counter(
    "transferred_bytes",
    "Bytes between host and GPU, of real GPUs and of those whose PCIe is emulated. Classes: call "
    "(inputs and results), awaited (loads that a request waits for), background (prefetches, and "
    "what leaves a GPU)",
    "gpu",
    "direction",
    "class",
)
TRANSFER_WAIT = _counter(
    "transfer_wait_seconds",
    "Time for which such bytes waited for the turns of others",
    "gpu",
    "direction",
    "class",
)

# -- models --------------------------------------------------------------------------------------

LOAD = Metric(
    f"{_OURS}load_seconds",
    MetricKind.HISTOGRAM,
    "One load, by where the weights were: host, disk, absent",
    ("source",),
    _LOADS_S,
)
LOAD_PHASES = _counter(
    "load_phase_seconds",
    "Parts of loads. In sequence: room (waiting for memory), weights (for a function to send "
    "them). Side by side: read (from disk), verify (what hashing takes beyond reading), worker (a "
    "process for it), context (made for it), transfer (into GPU memory, of weights as they "
    "arrive). Other: what none of these covers",
    "phase",
)
LOAD_HIDDEN = _counter(
    "load_hidden_seconds",
    "By how much loads would have been longer if none of their parts had overlapped another",
)
LOAD_FAILURES = _counter("load_failures", "Loads that failed", "gpu")
RUNS = _counter("gpu_runs", "Calls that ran on a GPU", "gpu")
RUN = _counter("gpu_run_seconds", "Compute time of a GPU: seconds of such calls", "gpu")
MODEL_RUNS = _counter("model_runs", "Calls of this model", "model")
MODEL_RUN = _counter("model_run_seconds", "Seconds of calls of this model", "model")
MERGED_GROUPS = _counter("merged_groups", "Groups of concurrent calls that ran as one", "gpu")
MERGED_CALLS = _counter("merged_calls", "Calls in such groups", "gpu")
COMPARED_CALLS = _counter(
    "compared_calls", "Calls that ran as one and singly, to compare results and times", "gpu"
)
SINGLE_CALLS = _counter(
    "single_calls", "Calls that ran singly although others waited, by why", "gpu", "reason"
)
WORKERS_DIED = _counter("worker_deaths", "Workers that ended unasked", "gpu")

METRICS: tuple[Metric, ...] = tuple(
    found for found in list(globals().values()) if isinstance(found, Metric)
)
_AT_SCRAPE = (WEIGHTS_EVICTED, TRANSFERRED, TRANSFER_WAIT)
# What is counted from the start of the process on.
COUNTERS = tuple(
    metric for metric in METRICS if metric.kind is MetricKind.COUNTER and metric not in _AT_SCRAPE
)
