"""The overview: health, load, and cache hits."""

from gpufaas.dashboards.grafana_json import Dashboard, Panel, PanelRow, PromQuery, Shape
from gpufaas.dashboards.queries import quantiles, rate, rate_or_none, share

_S = "gpufaas_scheduler_"
_W = "gpufaas_gateway_"


def _number(title: str, expr: str, unit: str, description: str) -> Panel:
    return Panel(title, (PromQuery(expr),), unit, description, Shape.NUMBER, 3)


_NOW = PanelRow(
    "Now",
    (
        _number("Leaders", f"sum({_S}leading)", "none", "One scheduler should lead."),
        _number("GPUs", f"sum({_S}gpus)", "none", "GPUs that are attached to the leader."),
        _number("Functions", f"max({_W}functions)", "none", "Functions that are deployed."),
        _number("Calls", rate("gateway_function_invocation_total"), "reqps", "Answered calls."),
        _number("Waiting", f"sum({_S}waiting_requests)", "none", "Requests that wait for a GPU."),
        _number(
            "Hits",
            share(f"{_S}policy_placements_total", 'result="hit"'),
            "percentunit",
            "Requests that found their models in GPU memory.",
        ),
        _number("Dead letters", f"sum({_W}jobs_dead)", "none", "Async calls that were given up."),
        _number(
            "Alerts",
            'count(ALERTS{alertstate="firing"}) or vector(0)',
            "none",
            "Alerts that fire: docs/metrics.md says what to do.",
        ),
    ),
)
_PLACING = PanelRow(
    "Placement",
    (
        Panel(
            "Placements",
            (PromQuery(rate(f"{_S}policy_placements_total", "result"), "{{result}}"),),
            "reqps",
            "A false miss had to load although another GPU held its models.",
            stacked=True,
        ),
        Panel(
            "Hits by policy",
            (
                PromQuery(
                    share(f"{_S}policy_placements_total", 'result="hit"', "policy"), "{{policy}}"
                ),
            ),
            "percentunit",
            most=1,
        ),
        Panel(
            "Waiting requests",
            (PromQuery(f"sum by (queue) ({_S}waiting_requests)", "{{queue}}"),),
            "none",
            stacked=True,
        ),
        Panel("Wait for a GPU", quantiles(f"{_S}wait_seconds"), "s"),
        Panel(
            "Requests by how they ended",
            (PromQuery(rate(f"{_S}requests_ended_total", "outcome"), "{{outcome}}"),),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Time of one decision",
            quantiles(f"{_S}decision_seconds"),
            "s",
            "From an event to the core's answer.",
        ),
    ),
)
_CALLS = PanelRow(
    "Calls",
    (
        Panel(
            "Calls by code",
            (PromQuery(rate("gateway_function_invocation_total", "code"), "{{code}}"),),
            "reqps",
            "499: the caller went away.",
            stacked=True,
        ),
        Panel("Time of a call", quantiles("gateway_functions_seconds"), "s"),
        Panel(
            "Leases for calls",
            (PromQuery(rate(f"{_W}lease_seconds_count", "result"), "{{result}}"),),
            "reqps",
            "Answers to the gateway's requests for leases.",
            stacked=True,
        ),
        Panel(
            "Trouble",
            (
                PromQuery(rate_or_none(f"{_W}retries_total"), "retries"),
                PromQuery(rate_or_none(f"{_W}cut_answers_total"), "answers broken off"),
                PromQuery(rate_or_none(f"{_W}refused_calls_total"), "calls of no function"),
                PromQuery(rate_or_none(f"{_S}run_failures_total"), "leases cut off"),
                PromQuery(rate_or_none(f"{_S}load_failures_total"), "loads failed"),
            ),
            "reqps",
        ),
        Panel(
            "Async calls",
            (
                PromQuery(f"sum({_W}jobs_queued) or vector(0)", "waiting"),
                PromQuery(f"sum({_W}job_callbacks_queued)", "callbacks waiting"),
                PromQuery(f"sum({_W}jobs_dead)", "dead letters"),
            ),
            "none",
        ),
        Panel(
            "Attempts of async calls",
            (
                PromQuery(
                    rate(f"{_W}job_attempts_total", "kind", "outcome"), "{{kind}} {{outcome}}"
                ),
            ),
            "reqps",
            "`again` are retries.",
            stacked=True,
        ),
    ),
)
_CACHE = PanelRow(
    "Models in GPU memory",
    (
        Panel(
            "Loads by where the weights were",
            (PromQuery(rate(f"{_S}loads_total", "source"), "{{source}}"),),
            "ops",
            stacked=True,
        ),
        Panel("Time of a load", quantiles(f"{_S}load_seconds"), "s"),
        Panel(
            "Evictions",
            (PromQuery(rate(f"{_S}gpu_evictions_total", "reason"), "{{reason}}"),),
            "ops",
            "Why models had to leave.",
            stacked=True,
        ),
        Panel(
            "Duplicates",
            (PromQuery(f"sum({_S}duplicate_models)", "copies beyond the first"),),
            "none",
            "Copies of a model beyond the first: more callers at once, less room for others.",
        ),
        Panel("Memory of duplicates", (PromQuery(f"sum({_S}duplicate_bytes)", "memory"),), "bytes"),
        Panel(
            "Estimates",
            quantiles(f"{_S}estimate_ratio", "what", legend="{{what}}"),
            "none",
            "Estimated over measured seconds: 1 is right.",
        ),
    ),
)
_CONTROL = PanelRow(
    "Control plane",
    (
        Panel(
            "Leadership",
            (PromQuery(f"{_S}leading", "{{instance}}"),),
            "none",
            most=1,
        ),
        Panel(
            "Behind etcd",
            (PromQuery(f"max by (instance) ({_S}store_behind_seconds)", "{{instance}}"),),
            "s",
            "How long something has waited to be written.",
        ),
        Panel(
            "Answers of the scheduler",
            (
                PromQuery(
                    rate(f"{_S}http_requests_total", "route", "status"), "{{route}} {{status}}"
                ),
            ),
            "reqps",
        ),
        Panel(
            "Fleet",
            (
                PromQuery(
                    f"sum by (event) (increase({_S}fleet_events_total[$__rate_interval]))",
                    "{{event}}",
                ),
            ),
            "none",
            "GPUs that joined, left or drain; nodes that fell silent or returned.",
        ),
        Panel(
            "Answers below /system",
            (PromQuery(rate("provider_http_requests_total", "path", "code"), "{{path}} {{code}}"),),
            "reqps",
        ),
        Panel(
            "Since their start",
            (
                PromQuery(f"time() - {_S}start_time_seconds", "scheduler {{instance}}"),
                PromQuery(f"time() - {_W}start_time_seconds", "gateway {{instance}}"),
                PromQuery("time() - gpufaas_node_start_time_seconds", "GPU manager {{instance}}"),
            ),
            "s",
        ),
    ),
)

OVERVIEW = Dashboard(
    "gpufaas-overview",
    "gpufaas: overview",
    "Health, and how often requests find their models in GPU memory",
    (_NOW, _PLACING, _CALLS, _CACHE, _CONTROL),
)
