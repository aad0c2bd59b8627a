"""GPUs and the models on them: memory, time, hits, loads, evictions."""

from gpufaas.dashboards.grafana_json import Dashboard, Panel, PanelRow, PromQuery, Shape, Variable
from gpufaas.dashboards.queries import rate, share

_S = "gpufaas_scheduler_"
_N = "gpufaas_node_"
_GPU = 'gpu=~"$gpu"'
_MODEL = 'model=~"$model"'


def _each(
    title: str, metric: str, unit: str, description: str = "", most: float | None = None
) -> Panel:
    """A gauge of each GPU."""
    return Panel(
        title, (PromQuery(f"{metric}{{{_GPU}}}", "{{gpu}}"),), unit, description, most=most
    )


_TIME = PanelRow(
    "Time",
    (
        Panel(
            "Leased",
            (
                PromQuery(
                    f"{rate(f'{_S}gpu_lease_seconds_total', 'gpu', where=_GPU)}"
                    f" / sum by (gpu) ({_S}gpu_slots)",
                    "{{gpu}}",
                ),
            ),
            "percentunit",
            "Share of the time in which leases were in force; long ones count when they end.",
        ),
        Panel(
            "Computing",
            (PromQuery(rate(f"{_N}gpu_run_seconds_total", "gpu", where=_GPU), "{{gpu}}"),),
            "percentunit",
            "Share of the time in which calls ran.",
        ),
        _each(
            "Utilisation",
            f"{_N}gpu_utilisation_ratio",
            "percentunit",
            "By NVML: share of the last moments with a kernel. Emulated GPUs have none.",
            most=1,
        ),
        _each("Leases in force", f"{_S}gpu_leases", "none"),
        _each("Waiting for this GPU", f"{_S}gpu_waiting_requests", "none", "Its local queues."),
        Panel(
            "Calls",
            (PromQuery(rate(f"{_N}gpu_runs_total", "gpu", where=_GPU), "{{gpu}}"),),
            "ops",
            "Calls of models that ran.",
        ),
    ),
)
_MEMORY = PanelRow(
    "Memory",
    (
        Panel(
            "In the scheduler's books",
            (PromQuery(f"sum by (kind) ({_S}gpu_memory_bytes{{{_GPU}}})", "{{kind}}"),),
            "bytes",
        ),
        Panel(
            "In the ledger",
            (
                PromQuery(
                    f'sum by (kind) ({_N}gpu_memory_bytes{{{_GPU},kind!="capacity"}})', "{{kind}}"
                ),
            ),
            "bytes",
            "Memory granted to models, used by other programs, and free.",
            stacked=True,
        ),
        Panel(
            "Ledger against NVML",
            (PromQuery(f"{_N}ledger_drift_bytes{{{_GPU}}}", "{{gpu}}"),),
            "bytes",
            "NVML's use less the granted memory: far above 0, other programs use the GPU.",
            least=None,
        ),
        Panel(
            "Workers beyond their grants",
            (PromQuery(f'{_N}worker_memory_bytes{{{_GPU},kind="over"}}', "{{gpu}}"),),
            "bytes",
            "Memory that worker processes take beyond their grants, on emulated GPUs too.",
        ),
        _each(
            "Used, by NVML",
            f"{_N}device_used_bytes",
            "bytes",
            "Use of the GPU by all programs. Emulated GPUs have none.",
        ),
        _each("Models", f"{_S}gpu_models", "none"),
        _each(
            "Age of the least recently used model",
            f"{_S}gpu_lru_age_seconds",
            "s",
            "Low and falling: the models in use do not fit.",
        ),
    ),
)
_MOVING = PanelRow(
    "Hits, loads, evictions",
    (
        Panel(
            "Hits",
            (
                PromQuery(
                    share(f"{_S}gpu_placements_total", 'result="hit"', "gpu", where=_GPU),
                    "{{gpu}}",
                ),
            ),
            "percentunit",
            most=1,
        ),
        Panel(
            "Loads",
            (PromQuery(rate(f"{_S}gpu_loads_total", "gpu", where=_GPU), "{{gpu}}"),),
            "ops",
        ),
        Panel(
            "Evictions",
            (
                PromQuery(
                    rate(f"{_S}gpu_evictions_total", "gpu", "reason", where=_GPU),
                    "{{gpu}} {{reason}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Time spent loading",
            (PromQuery(rate(f"{_S}gpu_load_seconds_total", "gpu", where=_GPU), "{{gpu}}"),),
            "percentunit",
        ),
        Panel(
            "Parts of loads",
            (PromQuery(rate(f"{_N}load_phase_seconds_total", "phase"), "{{phase}}"),),
            "percentunit",
            "Seconds a second: waiting for room, for weights, reading, a worker, the transfer.",
            stacked=True,
        ),
        Panel(
            "Weights on the nodes",
            (PromQuery(f"sum by (kind) ({_N}weights_bytes)", "{{kind}}"),),
            "bytes",
        ),
    ),
)
_TROUBLE = PanelRow(
    "Trouble",
    (
        Panel(
            "State",
            (
                PromQuery(f"{_S}gpu_silent{{{_GPU}}}", "{{gpu}} silent"),
                PromQuery(f"{_S}gpu_draining{{{_GPU}}}", "{{gpu}} draining"),
                PromQuery(f"{_N}gpu_lost{{{_GPU}}}", "{{gpu}} lost"),
            ),
            "none",
            most=1,
        ),
        Panel(
            "Failures",
            (
                PromQuery(rate(f"{_S}load_failures_total", "gpu", where=_GPU), "{{gpu}} loads"),
                PromQuery(rate(f"{_N}worker_deaths_total", "gpu", where=_GPU), "{{gpu}} workers"),
                PromQuery(
                    rate(f"{_N}memory_pressure_total", "gpu", where=_GPU), "{{gpu}} pressure"
                ),
                PromQuery(
                    rate(f"{_N}gpu_health_events_total", "gpu", where=_GPU), "{{gpu}} health"
                ),
            ),
            "ops",
        ),
        Panel(
            "Leases by why they ended",
            (PromQuery(rate(f"{_N}leases_ended_total", "reason"), "{{reason}}"),),
            "ops",
            stacked=True,
        ),
    ),
)
_MODELS = PanelRow(
    "Models",
    (
        Panel(
            "Requests",
            (
                PromQuery(
                    f"topk(10, {rate(f'{_S}model_placements_total', 'model', where=_MODEL)})",
                    "{{model}}",
                ),
            ),
            "reqps",
            "The ten most requested models.",
        ),
        Panel(
            "Hits",
            (
                PromQuery(
                    share(f"{_S}model_placements_total", 'result="hit"', "model", where=_MODEL),
                    "{{model}}",
                ),
            ),
            "percentunit",
            most=1,
        ),
        Panel(
            "Compute time",
            (
                PromQuery(
                    f"topk(10, {rate(f'{_N}model_run_seconds_total', 'model', where=_MODEL)})",
                    "{{model}}",
                ),
            ),
            "percentunit",
            "GPUs that calls of the model keep busy.",
        ),
        Panel(
            "On so many GPUs",
            (PromQuery(f"topk(20, {_S}model_copies{{{_MODEL}}})", "{{model}}"),),
            "none",
            shape=Shape.BARS,
        ),
        Panel(
            "Mean load",
            (
                PromQuery(
                    f"topk(20, sum by (model) ({_S}model_load_seconds_total{{{_MODEL}}})"
                    f" / sum by (model) ({_S}model_loads_total{{{_MODEL}}}))",
                    "{{model}}",
                ),
            ),
            "s",
            shape=Shape.BARS,
        ),
        Panel(
            "Estimated over measured",
            (PromQuery(f"gpufaas:model_estimate:ratio1h{{{_MODEL}}}"),),
            "none",
            "Of the last hour; 1 is right.",
            shape=Shape.TABLE,
        ),
    ),
)

GPUS = Dashboard(
    "gpufaas-gpus",
    "gpufaas: GPUs and models",
    "Use of GPUs, their models, loads and evictions",
    (_TIME, _MEMORY, _MOVING, _TROUBLE, _MODELS),
    (
        Variable("gpu", "GPU", f"{_S}gpu_models", "gpu"),
        Variable("model", "Model", f"{_S}model_placements_total", "model"),
    ),
)
