"""The gateway's metrics page."""

from gateway_ext.metrics import FunctionLoad, GatewayMeters

F = "f.openfaas-fn"


def test_meters_have_the_names_that_dashboards_for_openfaas_read() -> None:
    meters = GatewayMeters(lambda: [FunctionLoad(F, 2, 3, 4)])
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
    meters = GatewayMeters()
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


def test_function_that_is_gone_vanishes_even_if_a_call_outlived_it() -> None:
    loads = [FunctionLoad(F, 1, 0, 0), FunctionLoad("g.openfaas-fn", 1, 0, 0)]
    meters = GatewayMeters(lambda: loads)
    for function in (F, "g.openfaas-fn"):
        meters.started(function)
        meters.serves(function, ["one"])
    del loads[0]
    meters.gone(F)
    meters.ended(F, 200, 0.1)
    text = meters.text().decode()
    assert F not in text
    assert "g.openfaas-fn" in text
    assert meters.invocations_of(F) == 0


def test_calls_that_outlive_their_functions_leave_nothing_when_nobody_reads_the_metrics() -> None:
    loads = [FunctionLoad("stays.openfaas-fn", 1, 0, 0)]
    meters = GatewayMeters(lambda: loads, most_names=2)
    for number in range(100):
        function = f"f{number}.openfaas-fn"
        meters.started(function)
        meters.gone(function)
        meters.ended(function, 200, 0.1)

    left = [each for each in range(100) if meters.invocations_of(f"f{each}.openfaas-fn")]
    assert left == [99], "all but the last one, whose call ended after its removal"


def test_functions_beyond_the_bound_are_counted_together_and_still_each_for_itself() -> None:
    meters = GatewayMeters(most_names=1)
    for function in (F, "g.openfaas-fn", "h.openfaas-fn"):
        meters.started(function)
        meters.ended(function, 200, 0.1)
    text = meters.text().decode()
    assert 'gateway_function_invocation_started{function_name="other"} 2.0' in text
    assert 'gateway_function_invocation_total{code="200",function_name="other"} 2.0' in text
    assert meters.invocations_of("h.openfaas-fn") == 1


def test_codes_that_have_no_name_are_one_of_ten() -> None:
    meters = GatewayMeters()
    for code in (200, 499, 742, 743):
        meters.ended(F, code, 0.1)
    codes = {
        line.split('"')[1] for line in meters.text().decode().splitlines() if "_total{" in line
    }
    assert codes == {"200", "499", "7xx"}


def test_instances_that_are_new_are_counted() -> None:
    meters = GatewayMeters()
    for instances in (["a", "b"], ["a", "b"], ["b", "c"], [], ["a"]):
        meters.serves(F, instances)
    text = meters.text().decode()
    assert f'gpufaas_gateway_instances_started_total{{function_name="{F}"}} 4.0' in text
