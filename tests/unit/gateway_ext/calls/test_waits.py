"""Calls that would wait too long are refused at once; bursts that fit, and cold starts, are not."""

import asyncio
import math
import time

import pytest

from gateway_ext.calls.function_table import Function, Functions
from gateway_ext.calls.learned import CallWaits
from gateway_ext.errors import BadDeployment, Busy
from gateway_ext.model import DEFAULT_NAMESPACE, Deployment, Endpoint, FunctionId
from gateway_ext.openfaas import function_options
from tests.kit.fakes.fake_function import Behaviour, Got, a_function, says
from tests.kit.waiting import eventually
from tests.kit.worlds.calling import Gateway, a_deployment, a_gateway

pytestmark = pytest.mark.timeout(180, func_only=True)

A, B = (Endpoint(name, f"unix:/{name}") for name in "ab")
NAMED = 'function_name="echo.openfaas-fn"'
# Eight calls at a time, of which this one has waited 2 s for its thread.
WAITED = b"1 h;1;5;q=2000000;t=8"


def deployed(functions: Functions, *endpoints: Endpoint, **options: str) -> Function:
    functions.function_is(a_deployment("", **options), endpoints, wanted=len(endpoints))
    function = functions.by_path(b"echo")
    assert function is not None
    return function


async def waiting(function: Function, count: int) -> list[asyncio.Task[object]]:
    found: list[asyncio.Task[object]] = [
        asyncio.ensure_future(function.turn(9)) for _ in range(count)
    ]
    before = function.waiting
    await eventually(lambda: function.waiting == before + count)
    return found


async def ended(tasks: list[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


# -- waiting for an instance -----------------------------------------------------------------------


async def test_call_is_refused_when_those_that_wait_for_a_turn_need_too_long() -> None:
    function = deployed(Functions(), A, **{"concurrency": "1", "max-wait": "5"})
    function.take()
    function.waits.saw_turn(0, 2.0, 1)
    calls = await waiting(function, 2)
    function.check_wait()  # 4 s
    calls += await waiting(function, 1)
    with pytest.raises(Busy) as refusal:
        function.check_wait()
    assert refusal.value.retry_after_s == pytest.approx(6.0)
    await ended(calls[:1])  # its caller has left
    function.check_wait()
    await ended(calls[1:])


async def test_call_waits_for_half_of_its_time_limit_at_most() -> None:
    function = deployed(Functions(), A, **{"concurrency": "1", "max-wait": "0", "timeout": "6s"})
    function.take()
    function.waits.saw_turn(0, 2.0, 1)
    calls = await waiting(function, 1)
    function.check_wait()
    calls += await waiting(function, 1)
    with pytest.raises(Busy):
        function.check_wait()
    await ended(calls)


async def test_wait_for_a_turn_halves_with_twice_the_instances() -> None:
    functions = Functions()
    function = deployed(functions, A, **{"concurrency": "1", "max-wait": "5"})
    function.take()
    function.waits.saw_turn(0, 2.0, 1)
    function.inflight = 2
    assert function.waits.expected_s(4, 1, 1, 0.0) == pytest.approx(8.0)
    assert function.waits.expected_s(4, 2, 2, 0.0) == pytest.approx(4.0)


async def test_waits_for_turns_are_measured() -> None:
    function = deployed(Functions(), A, concurrency="1")
    held = function.take()
    assert held is not None
    began_s = time.monotonic()
    calls = await waiting(function, 3)
    for call in calls:
        await asyncio.sleep(0.1)
        function.give_back(held)
        assert await call is held
    took_s = time.monotonic() - began_s
    assert 0.1 <= function.waits.expected_s(1, 1, 1, time.monotonic()) < took_s


async def test_wait_for_a_start_is_no_wait_for_a_turn() -> None:
    functions = Functions()
    function = deployed(functions, concurrency="1")
    calls = await waiting(function, 2)
    await asyncio.sleep(0.05)
    held = function.take()
    assert held is None
    deployed(functions, A, B, concurrency="1")
    await asyncio.wait(calls)
    assert not function.waits.known
    function.waits.saw_turn(0, 100.0, 1)
    functions.function_is(a_deployment("", concurrency="1"), [], wanted=0)
    function.check_wait()  # whoever wakes a function waits for its start


async def test_what_was_measured_is_forgotten_with_the_deployment() -> None:
    functions = Functions()
    function = deployed(functions, A, concurrency="1")
    function.waits.saw_turn(0, 100.0, 1)
    deployed(functions, A, concurrency="2")
    assert not function.waits.known


async def test_full_queue_names_the_expected_wait() -> None:
    function = deployed(Functions(), A, **{"concurrency": "1", "queue": "2", "max-wait": "0"})
    function.take()
    function.waits.saw_turn(0, 7.0, 1)
    calls = await waiting(function, 2)
    with pytest.raises(Busy) as refused:
        await function.turn(9)
    assert refused.value.retry_after_s == pytest.approx(14.0)
    await ended(calls)


# -- waiting for a thread in the instance ----------------------------------------------------------


def test_reports_of_waits_for_a_thread_are_taken_in() -> None:
    waits = CallWaits()
    waits.saw_report(8 + 19, WAITED)  # nineteen waited before it: 0.1 s for each of twenty
    assert waits.expected_s(0, 8 + 30, 1, 0.0) == pytest.approx(3.0)
    assert waits.expected_s(0, 2 * (8 + 30), 2, 0.0) == pytest.approx(3.0)
    assert waits.expected_s(0, 8, 1, 0.0) == 0.0


def test_calls_that_waited_for_a_slow_start_may_have_begun_together() -> None:
    waits = CallWaits()
    for ahead in range(8, 16):
        waits.saw_report(ahead, WAITED)
    assert waits.expected_s(0, 8 + 8, 1, 0.0) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "report",
    [
        b"1 h;1;5;q=2000000",
        b"1 h;1;5;q=2000000;t=0",
        b"1 h;1;5;q=2000000;t=20",
        b"1 h;1;5;q=-1;t=8",
        b"1 h;1;5;q=" + 13 * b"9" + b";t=8",
        b"2 h;1;5;q=2000000;t=8",
        b"",
        b"x" * 9000,
    ],
)
def test_reports_without_a_wait_change_nothing(report: bytes) -> None:
    waits = CallWaits()
    waits.saw_report(11, report)
    assert not waits.known


def test_wait_before_the_instance_reads_the_request_counts_too() -> None:
    waits = CallWaits()
    waits.saw_report(11, b"1 h;1;1000000;q=500000;t=8", answered_in_s=9.0)
    assert waits.expected_s(0, 8 + 4, 1, 0.0) == pytest.approx(4.0)


def test_pace_follows_the_function() -> None:
    waits = CallWaits()
    waits.saw_report(11, WAITED)
    for _ in range(40):
        waits.saw_report(11, b"1 h;1;5;q=4;t=8 c;x")
    assert waits.expected_s(0, 1000, 1, 0.0) < 0.1


# -- waiting for a GPU -----------------------------------------------------------------------------


def test_refusal_by_the_scheduler_holds_until_its_queue_is_short_enough() -> None:
    waits = CallWaits()
    waits.saw_full_gpus(4.0, 5.0, 100.0)  # its deadline was the reason
    assert not waits.known
    waits.saw_full_gpus(5.5, 5.0, 100.0)
    assert waits.expected_s(0, 0, 1, 100.4) == 5.5
    assert waits.expected_s(0, 0, 1, 100.6) == 0.0
    waits.saw_full_gpus(500.0, 5.0, 200.0)
    assert waits.expected_s(0, 0, 1, 201.1) == 0.0


# -- over HTTP -------------------------------------------------------------------------------------


async def overloaded(
    gateway: Gateway, function: Function, calls: int, go: asyncio.Event
) -> list[int]:
    """Send calls at once, and return their statuses in the order of their arrival.

    The function answers none before `go`, which is once all of them have come.
    """
    go.clear()
    before = function.calls
    tasks = [asyncio.create_task(gateway.call()) for _ in range(calls)]
    await eventually(lambda: function.calls == before + calls)
    go.set()
    return [(await task).status for task in tasks]


def held(go: asyncio.Event, behave: Behaviour) -> Behaviour:
    """Behaves so once it may."""

    async def holds(got: Got, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await behave(got, writer)

    return holds


async def test_burst_that_nothing_is_known_of_is_served() -> None:
    go = asyncio.Event()
    async with a_gateway() as gateway, a_function(held(go, says(delay_s=0.02))) as fake:
        function = gateway.deploy(a_deployment(**{"concurrency": "1", "max-wait": "10ms"}), fake)
        assert await overloaded(gateway, function, 20, go) == [200] * 20


async def test_calls_beyond_the_wait_are_refused_without_a_connection_and_the_rest_served() -> None:
    go = asyncio.Event()
    async with a_gateway() as gateway, a_function(held(go, says(delay_s=0.1))) as fake:
        options = {"concurrency": "1", "max-wait": "1s"}
        function = gateway.deploy(a_deployment(**options), fake)
        assert await overloaded(gateway, function, 4, go) == [200] * 4
        statuses = await overloaded(gateway, function, 60, go)
        assert set(statuses) == {200, 429}
        assert 2 <= statuses.count(200) <= 20  # about ten calls of 0.1 s fit into a second
        assert fake.connections == 1
        assert len(fake.got) == 4 + statuses.count(200)
        assert await overloaded(gateway, function, 1, go) == [200]
        assert gateway.meters.invocations_of(function.label) == 65


async def test_refusal_says_when_to_come_again() -> None:
    async with a_gateway() as gateway, a_function(says()) as fake:
        function = gateway.deploy(a_deployment(), fake)
        function.waits.saw_report(11, WAITED)
        function.unanswered += 8 + 40
        refused = await gateway.call(body=b"x" * 100_000)
        assert (refused.status, refused.header("retry-after")) == (429, "10")
        assert b"busy" in refused.body
        page = gateway.meters.text().decode()
        assert f'gateway_function_invocation_total{{code="429",{NAMED}}} 1.0' in page
        assert f"gpufaas_gateway_expected_wait_seconds{{{NAMED}}} 10.0" in page
        assert "gateway_functions_seconds_count" not in page
        function.unanswered -= 8 + 40
        assert (await gateway.call()).status == 200


@pytest.mark.parametrize("body", [b"y" * 1000, b""], ids=["body", "no body yet"])
async def test_connection_lasts_beyond_a_refusal_if_the_body_is_there(body: bytes) -> None:
    async with a_gateway() as gateway, a_function(says()) as fake:
        function = gateway.deploy(a_deployment(), fake)
        function.waits.saw_report(11, WAITED)
        function.unanswered += 100
        reader, writer = await gateway.connect()
        head = b"POST /function/echo HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
        writer.write(head + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 429")
        await reader.readuntil(b"need 23.0 s")
        function.unanswered -= 100
        if not body:  # nobody reads a body that comes after its answer
            assert b"connection: close" in answer
            assert (await reader.read()).strip() == b""
            return
        writer.write(head + body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert fake.got[0].body == body


async def test_calls_in_an_instance_are_refused_by_its_own_report() -> None:
    at_once = asyncio.Semaphore(1)

    async def serve(got: Got, writer: asyncio.StreamWriter) -> None:
        """One call at a time, 50 ms each, as a runtime with one thread."""
        await got.whole()
        came_s = time.monotonic()
        async with at_once:
            waited_us = round(1e6 * (time.monotonic() - came_s))
            await asyncio.sleep(0.05)
        head = f"x-gpu-trace: 1 h;1;5;q={waited_us};t=1\r\ncontent-length: 0\r\n\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + head.encode())

    go = asyncio.Event()
    async with a_gateway() as gateway, a_function(held(go, serve)) as fake:
        function = gateway.deploy(a_deployment(**{"max-wait": "500ms"}), fake)
        assert await overloaded(gateway, function, 4, go) == [200] * 4
        statuses = await overloaded(gateway, function, 60, go)
        assert set(statuses) == {200, 429}
        assert 2 <= statuses.count(200) <= 20


# -- options ---------------------------------------------------------------------------------------


def options(environment: dict[str, str], **annotations: str) -> function_options.FunctionOptions:
    deployment = Deployment(
        FunctionId(DEFAULT_NAMESPACE, "f"),
        "i",
        environment=environment,
        annotations={f"com.gpufaas.{key}": value for key, value in annotations.items()},
    )
    return function_options.of(deployment, default_max_wait_s=7.0)


def test_longest_wait_comes_from_annotation_variable_or_setting() -> None:
    assert options({}).max_wait_s == 7.0
    assert options({"max_wait": "1m"}).max_wait_s == 60.0
    assert options({"max_wait": "1m"}, **{"max-wait": "250ms"}).max_wait_s == 0.25
    assert math.isinf(options({"max_wait": "0"}).max_wait_s)
    assert math.isinf(options({}, **{"max-wait": "0"}).max_wait_s)
    with pytest.raises(BadDeployment, match="max-wait"):
        options({}, **{"max-wait": "soon"})
    with pytest.raises(BadDeployment, match="max_wait"):
        options({"max_wait": "-1"})
