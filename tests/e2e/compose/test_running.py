"""The whole stack in containers: deployed to, called, measured, killed part by part, taken down.

Tests of one story: they run in this order, and the last one takes the stack down.
"""

import json
import re
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import pytest

from tests.e2e.compose.stack import PATIENCE_S, SERVICES, ComposeStack
from tests.kit.engines.docker_base_image import BASE
from tests.kit.page.grey_picture import right_classes, seen_classes
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.timeout(900)  # the first one builds images and starts everything

_STOP_S = 10.0
_JOBS = 24  # seconds of work, of which eight are done at a time
_FUNCTIONS = ("greets", "classify")
_CONNECT = """
import socket, sys
for target in sys.argv[1:]:
    host, port = target.split(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
        print("open", target)
    except OSError:
        print("shut", target)
"""


@pytest.fixture(scope="session")
def functions(stack: ComposeStack, cli: Path) -> ComposeStack:
    """The stack with a plain function and one on a GPU."""
    stack.faas(cli, "deploy", "-f", "stack.yml", "--gateway", stack.url)
    for name in _FUNCTIONS:
        ready(stack, name, 1)
    return stack


def ready(stack: ComposeStack, name: str, count: int) -> None:
    wait_until(
        lambda: stack.replicas(name) == count,
        f"{count} of {name}",
        instead=lambda: stack.said("gateway"),
    )


def test_plain_function_answers_when_deployed_with_faas_cli(
    functions: ComposeStack, cli: Path
) -> None:
    said = functions.faas(cli, "invoke", "greets", "--gateway", functions.url, stdin="you")
    assert said == "good day you"


def test_function_on_a_gpu_answers_what_its_model_says(functions: ComposeStack) -> None:
    expected = right_classes()

    def placed() -> bool:
        """The first calls may be computed in the function itself; then a GPU answers."""
        assert seen_classes(functions.call) == expected
        return bool(json.loads(functions.command("models", "--json")))

    wait_until(placed, "a GPU holds its model", instead=lambda: functions.said("cpu-manager"))
    assert seen_classes(functions.call) == expected


def test_function_scales_to_two_to_none_and_wakes_when_called(functions: ComposeStack) -> None:
    for count in (2, 0):
        said = {"serviceName": "greets", "replicas": count}
        assert functions.ask("POST", "/system/scale-function/greets", said).status_code == 202
        ready(functions, "greets", count)
        wait_until(lambda count=count: len(_running(functions, "greets")) == count, "as many run")  # type: ignore[misc]
    assert functions.call("greets", "again").text == "good day again"


def test_logs_have_what_the_function_printed(functions: ComposeStack, cli: Path) -> None:
    asked = ("logs", "greets", "--tail=false", "--lines=1", "--gateway", functions.url)
    functions.call("greets", "one")
    functions.call("greets", "two")
    wait_until(lambda: "called with two" in functions.faas(cli, *asked), "the last line is logged")


def test_policy_is_replaced_while_calls_go_on(functions: ComposeStack) -> None:
    functions.command("policy", "set", "netgain", "patience=20")
    assert "policy netgain" in functions.command("status", "--once")
    assert seen_classes(functions.call) == right_classes()


def test_prometheus_sees_every_part(functions: ComposeStack) -> None:
    functions.compose("--profile", "watch", "up", "--detach", "--no-build", "prometheus")
    where = f"http://{functions.engine.address}:9090/api/v1/targets"
    wanted = {"scheduler": 2, "gateway": 1, "gpu-manager": 1}

    def up() -> dict[str, int]:
        try:
            found = httpx.get(where).json()["data"]["activeTargets"]
        except httpx.TransportError:
            return {}
        jobs = [each["labels"]["job"] for each in found if each["health"] == "up"]
        return {job: jobs.count(job) for job in wanted}

    wait_until(
        lambda: up() == wanted, "all are scraped", instead=lambda: functions.said("prometheus")
    )


def test_functions_reach_the_gateway_alone(functions: ComposeStack) -> None:
    private = {
        "etcd": ("gpufaas_store", 2379),
        "nats": ("gpufaas_queue", 4222),
        "scheduler-1": ("gpufaas_outside", 7700),
        "cpu-manager": ("gpufaas_nodes", 7701),
    }
    targets = {
        name: f"{functions.address(name, network)}:{port}"
        for name, (network, port) in private.items()
    }
    gateway = f"{functions.address('gateway', 'gpufaas-functions')}:8080"

    def tried(network: str, *tried: str) -> list[str]:
        words = ("run", "--rm", "--network", network, BASE, "python3", "-c", _CONNECT)
        return functions.engine.docker(*words, *tried).splitlines()

    shut = [f"shut {target}" for target in targets.values()]
    assert tried("gpufaas-functions", gateway, *targets.values()) == [f"open {gateway}", *shut]
    for name, (network, _) in private.items():  # so there is what could be reached
        assert tried(network, targets[name]) == [f"open {targets[name]}"]


@pytest.mark.parametrize("service", SERVICES)
def test_service_returns_when_a_container_is_killed(functions: ComposeStack, service: str) -> None:
    expected = right_classes()
    before = functions.kill(service)
    wait_until(
        lambda: seen_classes(functions.call) == expected,
        "calls are answered",
        instead=lambda: functions.said(service),
    )
    functions.again(service, before)
    wait_until(
        lambda: seen_classes(functions.call) == expected,
        "calls are answered",
        instead=lambda: functions.said(service),
    )
    assert functions.call("greets", "still").text == "good day still"


def test_functions_live_on_while_the_gateway_is_replaced(functions: ComposeStack) -> None:
    def running() -> dict[str, Any]:
        names = [one for one in functions.engine.containers() if "classify" in one]
        states = {name: functions.engine.inspect(name)["State"] for name in names}
        return {
            name: state["StartedAt"] for name, state in states.items() if isinstance(state, dict)
        }

    before = running()
    assert before
    functions.compose("up", "--detach", "--no-build", "--force-recreate", "--no-deps", "gateway")
    functions.healthy("gateway")
    wait_until(lambda: seen_classes(functions.call) == right_classes(), "it answers again")
    assert running() == before


def test_jobs_outlive_the_queue_and_the_gateway(functions: ComposeStack, cli: Path) -> None:
    mark = token_hex(4)
    jobs = {f"{mark}-{number};" for number in range(_JOBS)}
    with httpx.Client(base_url=functions.url, timeout=PATIENCE_S) as http:
        for job in sorted(jobs):
            answer = http.post("/async-function/greets/slow?s=1", content=job)
            assert answer.status_code == httpx.codes.ACCEPTED, answer.text
    before = {service: functions.kill(service) for service in ("nats", "gateway")}

    def done() -> set[str]:
        """Those that the function has printed; what threads print may stand in one line."""
        asked = ("logs", "greets", "--tail=false", "--lines=500", "--gateway", functions.url)
        return set(re.findall(rf"{mark}-\d+;", functions.faas(cli, *asked)))

    for service, began in before.items():
        functions.again(service, began)
    wait_until(lambda: done() == jobs, "every job is done", instead=lambda: str(jobs - done()))


@pytest.mark.parametrize("service", SERVICES[::-1])
def test_container_ends_in_time_when_it_is_asked(functions: ComposeStack, service: str) -> None:
    name = str(functions.container(service)["Name"]).strip("/")
    functions.engine.docker("stop", "--time", f"{_STOP_S:.0f}", name)
    state: Any = functions.engine.inspect(name)["State"]
    assert state["ExitCode"] in {0, 1, 2}  # 137: it was killed


def test_nothing_is_left_when_all_is_taken_down(functions: ComposeStack, cli: Path) -> None:
    functions.compose("up", "--detach", "--no-build")
    functions.all_healthy()
    for name in _FUNCTIONS:
        functions.faas(cli, "remove", name, "--gateway", functions.url)
    wait_until(
        lambda: not _of_functions(functions),
        "functions are gone",
        instead=lambda: str(_of_functions(functions)),
    )
    functions.compose("--profile", "watch", "down", "--volumes")
    docker = functions.engine.docker
    assert functions.engine.containers() == []
    assert docker("volume", "ls", "--quiet") == ""
    networks = set(docker("network", "ls", "--format", "{{.Name}}").split())
    assert networks == {"bridge", "host", "none"}


def _running(stack: ComposeStack, name: str) -> list[str]:
    return [one for one in stack.engine.containers("status=running") if f"-{name}-" in one]


def _of_functions(stack: ComposeStack) -> list[str]:
    return [one for one in stack.engine.containers() if any(name in one for name in _FUNCTIONS)]
