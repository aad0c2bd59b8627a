"""What Prometheus reads."""

from gateway_ext.meters import Load, Meters

F = "f.openfaas-fn"


def test_meters_have_the_names_that_dashboards_for_openfaas_read() -> None:
    meters = Meters(lambda: [Load(F, 2, 3, 4)])
    for _ in range(3):
        meters.started(F)
    meters.ended(F, 200, 0.02)
    meters.ended(F, 200, 100.0)
    meters.ended(F, 502, 0.0001)
    lines = set(meters.text().decode().splitlines())
    one = f'code="200",function_name="{F}"'
    assert {
        f'gateway_function_invocation_total{{code="200",function_name="{F}"}} 2.0',
        f'gateway_function_invocation_total{{code="502",function_name="{F}"}} 1.0',
        f'gateway_function_invocation_started{{function_name="{F}"}} 3.0',
        f'gateway_functions_seconds_bucket{{{one},le="0.01"}} 0.0',
        f'gateway_functions_seconds_bucket{{{one},le="0.025"}} 1.0',
        f'gateway_functions_seconds_bucket{{{one},le="+Inf"}} 2.0',
        f"gateway_functions_seconds_count{{{one}}} 2.0",
        f"gateway_functions_seconds_sum{{{one}}} 100.02",
        f'gateway_service_count{{function_name="{F}"}} 2.0',
        f'gpufaas_gateway_calls_in_flight{{function_name="{F}"}} 3.0',
        f'gpufaas_gateway_calls_waiting{{function_name="{F}"}} 4.0',
    } <= {_sorted(line) for line in lines}
    assert meters.invocations_of(F) == 3
    assert meters.invocations_of("g.openfaas-fn") == 0


def _sorted(line: str) -> str:
    """The line with its labels by name, but the bound of a bucket last."""
    name, brace, rest = line.partition("{")
    if not brace:
        return line
    labels, _, value = rest.partition("}")
    ordered = sorted(labels.split(","), key=lambda label: (label.startswith("le="), label))
    return f"{name}{{{','.join(ordered)}}}{value}"


def test_meters_count_what_is_ours() -> None:
    meters = Meters()
    meters.lease("hit", 0.5)
    meters.refused(404)
    meters.retried(F)
    meters.cut(F, "TimedOut")
    text = meters.text().decode()
    for line in (
        'gpufaas_gateway_lease_seconds_count{result="hit"} 1.0',
        'gpufaas_gateway_refused_calls_total{code="404"} 1.0',
        f'gpufaas_gateway_retries_total{{function_name="{F}"}} 1.0',
        f'gpufaas_gateway_cut_answers_total{{function_name="{F}",why="TimedOut"}} 1.0',
    ):
        assert line in text
