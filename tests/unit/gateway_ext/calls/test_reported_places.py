"""Calls beyond what an instance says to serve at a time wait in the gateway, in their order."""

import asyncio

import pytest

from gateway_ext.calls.function_table import Function, Functions
from gateway_ext.model import Endpoint
from tests.kit.fakes.fake_function import Got, a_function, says
from tests.kit.waiting import eventually
from tests.kit.worlds.calling import Gateway, a_deployment, a_gateway

pytestmark = pytest.mark.timeout(180, func_only=True)

A, B = (Endpoint(name, f"unix:/{name}") for name in "ab")
ONE_THREAD = b"1 h;1;5;q=0;t=1"
PLACES = 4  # of an instance with one thread


def deployed(*endpoints: Endpoint, report: bytes = ONE_THREAD, **options: str) -> Function:
    functions = Functions()
    functions.function_is(a_deployment("", **options), endpoints, wanted=len(endpoints))
    function = functions.by_path(b"echo")
    assert function is not None
    function.waits.saw_report(0, report)
    return function


def taken(function: Function) -> int:
    """How many further calls get an instance now."""
    count = 0
    while function.take() is not None:
        count += 1
        assert count < 100
    return count


def test_each_instance_takes_so_many_calls_a_thread() -> None:
    assert taken(deployed(A)) == PLACES
    assert taken(deployed(A, B)) == 2 * PLACES
    assert taken(deployed(A, report=b"1 h;1;5;q=0;t=3")) == 3 * PLACES
    assert taken(deployed(A, report=b"1 h;1;5;q=0;t=3", concurrency="2")) == 2


@pytest.mark.parametrize("report", [b"", b"1 h;1;5", b"1 h;1;5;q=0;t=0"])
def test_instance_that_reports_no_threads_takes_any_number(report: bytes) -> None:
    function = deployed(A, report=report)
    assert [function.take() is not None for _ in range(50)] == [True] * 50


def test_calls_for_a_gpu_all_go_on_to_where_the_scheduler_sees_them() -> None:
    function = deployed(A, enabled="true")
    assert [function.take() is not None for _ in range(50)] == [True] * 50


async def test_more_calls_wait_than_fit_into_the_queue_of_a_limit() -> None:
    function = deployed(A, queue="2")
    taken(function)
    turns = [asyncio.create_task(function.turn(9)) for _ in range(20)]
    await eventually(lambda: function.waiting == 20)
    for turn in turns:
        turn.cancel()
    await asyncio.wait(turns)


async def test_place_is_free_once_the_answer_has_begun() -> None:
    function = deployed(A)
    held = [function.take() for _ in range(PLACES)]
    turn = asyncio.create_task(function.turn(9))
    await eventually(lambda: function.waiting == 1)
    assert held[0] is not None
    function.answered(held[0])
    await turn
    assert (function.inflight, function.unanswered) == (PLACES + 1, PLACES)
    function.give_back(held[0], answered=True)
    assert (function.inflight, function.unanswered) == (PLACES, PLACES)
    assert taken(function) == 0
    assert held[1] is not None
    function.give_back(held[1])
    assert taken(function) == 1


async def test_instance_with_a_free_place_is_found() -> None:
    function = deployed(A, B)
    held = [one for one in (function.take() for _ in range(2 * PLACES)) if one is not None]
    # The calls of one have begun to be answered: it has as many in flight as the other.
    for instance in held:
        if instance.endpoint == B:
            function.answered(instance)
    found = [one.endpoint for one in (function.take() for _ in range(PLACES)) if one is not None]
    assert found == [B] * PLACES


# -- over HTTP -------------------------------------------------------------------------------------


async def learned(gateway: Gateway, function: Function) -> None:
    """One call, whose answer says how many threads there are."""
    assert (await gateway.call()).status == 200
    assert function.waits.at_a_time == 1


REPORT = f"x-gpu-trace: {ONE_THREAD.decode()}\r\n"
# A machine that stands still for seconds is taken for a slow function: nothing is refused for that.
PATIENT = a_deployment("10m", **{"max-wait": "0"})


async def test_calls_are_served_in_their_order_over_few_connections() -> None:
    async with (
        a_gateway() as gateway,
        a_function(says(headers=REPORT, delay_s=0.005)) as fake,
    ):
        function = gateway.deploy(PATIENT, fake)
        await learned(gateway, function)
        tasks = []
        for number in range(40):
            tasks.append(asyncio.create_task(gateway.call(f"/function/echo/{number}")))
            await eventually(lambda: function.calls == len(tasks) + 1)
        assert [(await task).status for task in tasks] == [200] * 40
        served = [int(got.target.removeprefix("/")) for got in fake.got[1:]]
        assert sorted(served) == list(range(40))
        for place, number in enumerate(served):  # the instance reads those that it has in any order
            assert sum(later < number for later in served[place:]) < PLACES
        assert fake.connections <= PLACES
        assert (function.inflight, function.unanswered, function.waiting) == (0, 0, 0)


async def test_caller_that_reads_slowly_holds_no_place() -> None:
    async def answer(got: Got, writer: asyncio.StreamWriter) -> None:
        size = 16 << 20 if got.target == "/large" else 2
        await says(b"x" * size, headers=REPORT)(got, writer)

    async with a_gateway() as gateway, a_function(answer) as fake:
        function = gateway.deploy(PATIENT, fake)
        await learned(gateway, function)
        for _ in range(PLACES + 1):
            _, writer = await gateway.connect()
            writer.write(b"GET /function/echo/large HTTP/1.1\r\nhost: gw\r\n\r\n")
        await eventually(lambda: function.inflight == PLACES + 1)
        assert (await gateway.call()).status == 200
        assert function.inflight == PLACES + 1


@pytest.mark.parametrize("sent_bytes", [100, 2 << 20], ids=["small", "beyond the buffer"])
async def test_caller_that_sends_slowly_holds_no_place(sent_bytes: int) -> None:
    async with a_gateway() as gateway, a_function(says(headers=REPORT)) as fake:
        function = gateway.deploy(PATIENT, fake)
        await learned(gateway, function)
        for _ in range(PLACES + 1):
            _, writer = await gateway.connect()
            writer.write(
                b"POST /function/echo HTTP/1.1\r\nhost: gw\r\ncontent-length: 3000000\r\n\r\n"
            )
            writer.write(b"x" * sent_bytes)
        await eventually(lambda: function.calls == PLACES + 2)
        assert (await gateway.call()).status == 200
        assert function.unanswered == 0
