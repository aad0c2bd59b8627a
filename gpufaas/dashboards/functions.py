"""Functions: their calls, their replicas, what they cost in GPU time, and how long they wait."""

from gpufaas.dashboards.panels import Dashboard, Panel, Query, Row, Shape, Variable
from gpufaas.dashboards.queries import quantiles, rate

_S = "gpufaas_scheduler_"
_W = "gpufaas_gateway_"
_NAME = "function_name"
_CHOSEN = 'function_name=~"$function"'
_LEGEND = "{{function_name}}"


def _of_scheduler(expr: str) -> str:
    """The scheduler calls a function NAMESPACE/NAME, the gateway NAME.NAMESPACE."""
    renamed = f'label_replace({expr}, "{_NAME}", "$2.$1", "function", "(.*)/(.*)")'
    return f"{renamed} and on ({_NAME}) gateway_service_count{{{_CHOSEN}}}"


def _rate(metric: str, *more: str) -> str:
    return rate(metric, _NAME, *more, where=_CHOSEN)


def _gauge(metric: str) -> str:
    return f"sum by ({_NAME}) ({metric}{{{_CHOSEN}}})"


_CALLS = Row(
    "Calls",
    (
        Panel("Calls", (Query(_rate("gateway_function_invocation_total"), _LEGEND),), "reqps"),
        Panel(
            "Answers by code",
            (Query(rate("gateway_function_invocation_total", "code", where=_CHOSEN), "{{code}}"),),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Errors",
            (Query(f"gpufaas:function_errors:ratio5m{{{_CHOSEN}}}", _LEGEND),),
            "percentunit",
            "Share of the answers that are errors of the server.",
        ),
        Panel("Time of a call", quantiles("gateway_functions_seconds", where=_CHOSEN), "s"),
        Panel(
            "The slowest hundredth",
            (Query(f"gpufaas:function_seconds:p99_5m{{{_CHOSEN}}}", _LEGEND),),
            "s",
        ),
        Panel(
            "Broken off and tried again",
            (
                Query(
                    f"{_rate(f'{_W}retries_total')} or 0 * {_gauge('gateway_service_count')}",
                    f"{_LEGEND} retries",
                ),
                Query(
                    f"{_rate(f'{_W}cut_answers_total')} or 0 * {_gauge('gateway_service_count')}",
                    f"{_LEGEND} broken off",
                ),
            ),
            "reqps",
        ),
    ),
)
_REPLICAS = Row(
    "Replicas",
    (
        Panel(
            "Replicas",
            (
                Query(_gauge("gateway_service_count"), f"{_LEGEND} ready"),
                Query(_gauge(f"{_W}replicas_wanted"), f"{_LEGEND} wanted"),
            ),
            "none",
        ),
        Panel(
            "Calls in flight",
            (
                Query(_gauge(f"{_W}calls_in_flight"), f"{_LEGEND} in flight"),
                Query(_gauge(f"{_W}calls_waiting"), f"{_LEGEND} waiting"),
            ),
            "none",
        ),
        Panel(
            "Instances that began",
            (
                Query(
                    f"sum by ({_NAME}) (increase({_W}instances_started_total{{{_CHOSEN}}}"
                    "[$__rate_interval]))",
                    _LEGEND,
                ),
            ),
            "none",
            "Many, and no more replicas: they crash.",
        ),
        Panel(
            "From nothing to ready",
            (Query(f"sum(increase({_W}wake_seconds_count[$__rate_interval]))", "wakes"),),
            "none",
            "Functions that a call found without a replica.",
        ),
        Panel(
            "Async calls that wait",
            (
                Query(
                    f"{_gauge(f'{_W}jobs_queued')} or 0 * {_gauge('gateway_service_count')}",
                    _LEGEND,
                ),
            ),
            "none",
        ),
        Panel(
            "Deployed",
            (Query(_gauge("gateway_service_count"), _LEGEND),),
            "none",
            "Functions with their ready replicas.",
            Shape.TABLE,
        ),
    ),
)
_GPUS = Row(
    "GPU",
    (
        Panel(
            "GPU time",
            (Query(_of_scheduler(rate(f"{_S}function_gpu_seconds_total", "function")), _LEGEND),),
            "percentunit",
            "GPUs that its leases keep from others: 1 is one GPU all the time.",
            stacked=True,
        ),
        Panel(
            "GPU seconds in this time",
            (
                Query(
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
                Query(
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
                Query(
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
