"""Functions: calls, replicas, GPU time and waiting times."""

from gpufaas.dashboards.grafana_json import Dashboard, Panel, PanelRow, PromQuery, Shape, Variable
from gpufaas.dashboards.queries import quantiles, rate

_S = "gpufaas_scheduler_"
_W = "gpufaas_gateway_"
_NAME = "function_name"
_CHOSEN = 'function_name=~"$function"'
_LEGEND = "{{function_name}}"


def _of_scheduler(expr: str) -> str:
    """The scheduler names a function NAMESPACE/NAME, the gateway NAME.NAMESPACE."""
    renamed = f'label_replace({expr}, "{_NAME}", "$2.$1", "function", "(.*)/(.*)")'
    return f"{renamed} and on ({_NAME}) gateway_service_count{{{_CHOSEN}}}"


def _rate(metric: str, *more: str) -> str:
    return rate(metric, _NAME, *more, where=_CHOSEN)


def _gauge(metric: str) -> str:
    return f"sum by ({_NAME}) ({metric}{{{_CHOSEN}}})"


_CALLS = PanelRow(
    "Calls",
    (
        Panel("Calls", (PromQuery(_rate("gateway_function_invocation_total"), _LEGEND),), "reqps"),
        Panel(
            "Answers by code",
            (
                PromQuery(
                    rate("gateway_function_invocation_total", "code", where=_CHOSEN), "{{code}}"
                ),
            ),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Errors",
            (PromQuery(f"gpufaas:function_errors:ratio5m{{{_CHOSEN}}}", _LEGEND),),
            "percentunit",
            "Share of the answers that are errors of the server.",
        ),
        Panel("Time of a call", quantiles("gateway_functions_seconds", where=_CHOSEN), "s"),
        Panel(
            "The slowest hundredth",
            (PromQuery(f"gpufaas:function_seconds:p99_5m{{{_CHOSEN}}}", _LEGEND),),
            "s",
        ),
        Panel(
            "Broken off and tried again",
            (
                PromQuery(
                    f"{_rate(f'{_W}retries_total')} or 0 * {_gauge('gateway_service_count')}",
                    f"{_LEGEND} retries",
                ),
                PromQuery(
                    f"{_rate(f'{_W}cut_answers_total')} or 0 * {_gauge('gateway_service_count')}",
                    f"{_LEGEND} broken off",
                ),
            ),
            "reqps",
        ),
    ),
)
_REPLICAS = PanelRow(
    "Replicas",
    (
        Panel(
            "Replicas",
            (
                PromQuery(_gauge("gateway_service_count"), f"{_LEGEND} ready"),
                PromQuery(_gauge(f"{_W}replicas_wanted"), f"{_LEGEND} wanted"),
            ),
            "none",
        ),
        Panel(
            "Calls in flight",
            (
                PromQuery(_gauge(f"{_W}calls_in_flight"), f"{_LEGEND} in flight"),
                PromQuery(_gauge(f"{_W}calls_waiting"), f"{_LEGEND} waiting"),
            ),
            "none",
        ),
        Panel(
            "Instances that began",
            (
                PromQuery(
                    f"sum by ({_NAME}) (increase({_W}instances_started_total{{{_CHOSEN}}}"
                    "[$__rate_interval]))",
                    _LEGEND,
                ),
            ),
            "none",
            "Many, without more replicas: instances crash.",
        ),
        Panel(
            "From nothing to ready",
            (PromQuery(f"sum(increase({_W}wake_seconds_count[$__rate_interval]))", "wakes"),),
            "none",
            "Functions that a call found without a replica.",
        ),
        Panel(
            "Async calls that wait",
            (
                PromQuery(
                    f"{_gauge(f'{_W}jobs_queued')} or 0 * {_gauge('gateway_service_count')}",
                    _LEGEND,
                ),
            ),
            "none",
        ),
        Panel(
            "Deployed",
            (PromQuery(_gauge("gateway_service_count"), _LEGEND),),
            "none",
            "Functions with their ready replicas.",
            Shape.TABLE,
        ),
    ),
)
_GPUS = PanelRow(
    "GPU",
    (
        Panel(
            "GPU time",
            (
                PromQuery(
                    _of_scheduler(rate(f"{_S}function_gpu_seconds_total", "function")), _LEGEND
                ),
            ),
            "percentunit",
            "GPUs that the function's leases occupy: 1 is one GPU all the time.",
            stacked=True,
        ),
        Panel(
            "GPU seconds in this time",
            (
                PromQuery(
                    _of_scheduler(
                        f"sum by (function) (increase({_S}function_gpu_seconds_total[$__range]))"
                    ),
                    _LEGEND,
                ),
            ),
            "s",
            "What each function costs.",
            Shape.BARS,
        ),
        Panel(
            "Requests by result",
            (
                PromQuery(
                    _of_scheduler(rate(f"{_S}function_placements_total", "function", "result")),
                    f"{_LEGEND} {{{{result}}}}",
                ),
            ),
            "reqps",
            "A false miss had to load although another GPU held its models.",
            stacked=True,
        ),
        Panel(
            "Mean wait for a GPU",
            (
                PromQuery(
                    _of_scheduler(
                        f"({rate(f'{_S}function_wait_seconds_total', 'function')}"
                        f" / {rate(f'{_S}function_placements_total', 'function')})"
                    ),
                    _LEGEND,
                ),
            ),
            "s",
        ),
    ),
)

FUNCTIONS = Dashboard(
    "gpufaas-functions",
    "gpufaas: functions",
    "Calls, replicas, and what functions cost in GPU time",
    (_CALLS, _REPLICAS, _GPUS),
    (Variable("function", "Function", "gateway_service_count", _NAME),),
)
