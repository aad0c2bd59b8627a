"""Functions and their instances: which takes a call, which calls wait, and draining."""

import asyncio
import itertools

import pytest

from common.time_limits import time_limit
from gateway_ext.calls.function_table import Function, Functions
from gateway_ext.errors import BadDeployment, Busy, UnknownFunction
from gateway_ext.model import Deployment, Endpoint
from tests.kit.fakes.fake_function import Got, a_function, says
from tests.kit.waiting import eventually
from tests.kit.worlds.calling import a_deployment, a_gateway

pytestmark = pytest.mark.timeout(180, func_only=True)

A, B, C = (Endpoint(name, f"unix:/{name}") for name in "abc")


def deployed(functions: Functions, *endpoints: Endpoint, **options: str) -> Function:
    functions.function_is(a_deployment("", **options), endpoints, wanted=len(endpoints))
    function = functions.by_path(b"echo")
    assert function is not None
    return function


def took(function: Function) -> str:
    instance = function.take()
    assert instance is not None
    return instance.endpoint.instance


async def test_calls_go_to_the_instance_with_the_fewest_and_round() -> None:
    function = deployed(Functions(), A, B, C)
    first = [took(function) for _ in range(3)]
    assert sorted(first) == ["a", "b", "c"]
    instance = function.take()
    assert instance is not None
    function.give_back(instance)
    assert took(function) != first[0]
    assert sorted(took(function) for _ in range(2)) != [instance.endpoint.instance] * 2
    assert function.inflight == 6


async def test_preferred_instance_comes_before_those_with_as_many_calls() -> None:
    function = deployed(Functions(), A, B, C)
    for _ in range(2):
        instance = function.take(preferred=B.address)
        assert instance is not None
        assert instance.endpoint == B
        function.give_back(instance)
    held = [function.take(preferred=A.address) for _ in range(3)]  # each has one, then
    assert sorted(one.endpoint.instance for one in held if one is not None) == ["a", "b", "c"]
    assert function.inflight == 3


async def test_batch_of_one_instance_is_filled_before_the_next_one() -> None:
    function = deployed(Functions(), A, B, C, **{"batch-handler": "3"})
    taken = [took(function) for _ in range(9)]
    assert [len(set(taken[at : at + 3])) for at in (0, 3, 6)] == [1, 1, 1]
    assert sorted(set(taken)) == ["a", "b", "c"]
    assert len({took(function) for _ in range(3)}) == 1


async def test_call_of_a_function_that_was_removed_waits_for_nothing() -> None:
    functions = Functions()
    function = deployed(functions, A)
    functions.function_gone(function.id)
    with pytest.raises(UnknownFunction):
        await function.turn(10)


async def test_names_of_a_function_come_and_go() -> None:
    changes: list[tuple[str, bool]] = []
    functions = Functions(lambda function: changes.append((function.label, function.gone)))
    function = deployed(functions, A)
    assert functions.by_path(b"echo.openfaas-fn") is functions.by_id(function.id) is function
    functions.function_gone(function.id)
    functions.function_gone(function.id)
    assert functions.by_path(b"echo") is functions.by_path(b"echo.openfaas-fn") is None
    assert changes == [("echo.openfaas-fn", False), ("echo.openfaas-fn", True)]
    assert len(functions) == 0


async def test_bad_options_change_nothing() -> None:
    functions = Functions()
    function = deployed(functions, A)
    with pytest.raises(BadDeployment):
        functions.function_is(a_deployment(timeout="never"), [B], wanted=1)
    assert function.endpoints == (A,)


async def test_call_beyond_the_limit_waits_for_its_turn() -> None:
    function = deployed(Functions(), A, B, concurrency="1", queue="2")
    held = [function.take(), function.take()]
    assert function.take() is None
    turns = [asyncio.create_task(function.turn(9)) for _ in range(2)]
    await eventually(lambda: function.waiting == 2)
    with pytest.raises(Busy):
        await function.turn(9)
    assert held[1] is not None
    function.give_back(held[1])
    assert function.take() is None  # those who wait go first
    assert (await turns[0]).endpoint == B
    turns[1].cancel()
    await asyncio.wait(turns)
    assert (function.waiting, function.inflight) == (0, 2)


async def test_turn_that_came_too_late_goes_to_the_next() -> None:
    function = deployed(Functions(), A, concurrency="1")
    held = function.take()
    assert held is not None
    first, second = (asyncio.create_task(function.turn(9)) for _ in range(2))
    await eventually(lambda: function.waiting == 2)
    function.give_back(held)
    first.cancel()  # its turn has come, and it does not know yet
    assert (await second).endpoint == A
    assert function.inflight == 1


async def test_new_instance_serves_those_who_wait() -> None:
    functions = Functions()
    function = deployed(functions)
    turn = asyncio.create_task(function.turn(9))
    ready = asyncio.create_task(function.ready(5))
    await eventually(lambda: function.waiting == 1)
    deployed(functions, A)
    assert (await turn).endpoint == A
    assert await ready
    deployed(functions)
    assert not await function.ready(0.01)


async def test_waiting_calls_fail_when_the_function_is_removed() -> None:
    functions = Functions()
    function = deployed(functions)
    turn = asyncio.create_task(function.turn(9))
    await eventually(lambda: function.waiting == 1)
    functions.function_gone(function.id)
    with pytest.raises(UnknownFunction):
        await turn
    assert not await function.ready(5)


async def test_instance_is_drained_once_its_calls_are_over() -> None:
    functions = Functions()
    function = deployed(functions, A, B)
    held = [function.take(), function.take()]
    deployed(functions, C)
    assert {took(function) for _ in range(4)} == {"c"}
    assert not await functions.drained(["a", "b"], 0.01)
    drained = asyncio.create_task(functions.drained(["a", "b"], 60))
    for instance in held:
        await asyncio.sleep(0)
        assert not drained.done()
        assert instance is not None
        function.give_back(instance)
    assert await drained
    assert await functions.drained(["a", "nobody"], 0)


async def test_calls_are_limited_and_refused_over_http() -> None:
    go = asyncio.Event()

    async def behave(got: Got, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await says()(got, writer)

    async with a_gateway() as gateway, a_function(behave) as fake:
        function = gateway.deploy(a_deployment(concurrency="2", queue="1"), fake)
        calls = [asyncio.create_task(gateway.call()) for _ in range(3)]
        await eventually(lambda: function.waiting == 1 and fake.connections == 2)
        refused = await gateway.call()
        assert (refused.status, refused.header("retry-after")) == (429, "1")
        go.set()
        assert [(await call).status for call in calls] == [200, 200, 200]
        assert fake.connections == 2


async def test_call_wakes_a_function_without_instances() -> None:
    async with a_gateway(wake_s=60) as gateway, a_function(says()) as fake:
        function = gateway.deploy(a_deployment(timeout="100ms"))
        call = asyncio.create_task(gateway.call())
        await eventually(lambda: gateway.woken == [function])
        await asyncio.sleep(0.2)  # longer than the call itself may take
        gateway.deploy(a_deployment(timeout="20s"), fake)
        assert (await call).status == 200
    async with a_gateway(wake_s=0.05) as gateway:
        gateway.deploy(a_deployment())
        assert (await gateway.call()).status == 503


async def test_waking_function_still_keeps_its_time_limit() -> None:
    async with a_gateway(wake_s=60) as gateway, a_function(says(delay_s=60)) as fake:
        gateway.deploy(a_deployment(timeout="50ms"))
        call = asyncio.create_task(gateway.call())
        await eventually(lambda: len(gateway.woken) == 1)
        gateway.deploy(a_deployment(timeout="50ms"), fake)
        async with time_limit(20):
            assert (await call).status == 504


async def test_caller_that_leaves_while_it_waits_is_not_waited_for() -> None:
    async with a_gateway() as gateway:
        function = gateway.deploy(a_deployment())
        _, writer = await gateway.connect()
        writer.write(b"GET /function/echo HTTP/1.1\r\nhost: x\r\n\r\n")
        await eventually(lambda: function.waiting == 1)
        writer.close()
        await eventually(lambda: function.waiting == 0)


async def test_no_call_fails_when_instances_are_replaced_under_load() -> None:
    async with a_gateway() as gateway:
        names = (f"i{number}" for number in itertools.count())
        statuses: list[int] = []
        over = False

        async def behave(got: Got, writer: asyncio.StreamWriter) -> None:
            await says(delay_s=0.005)(got, writer)

        async def callers() -> None:
            while not over:
                statuses.append((await gateway.call(body=b"x")).status)

        async def generation(deployment: Deployment, number: int) -> None:
            nonlocal over
            async with a_function(behave, next(names)) as fake:
                gateway.deploy(deployment, fake)
                await eventually(lambda: len(statuses) > 20 * (number + 1))
                if number < 5:
                    await generation(deployment, number + 1)
                else:
                    over = True
                    await asyncio.gather(*load)
                assert await gateway.functions.drained([fake.endpoint.instance], 20)

        load = [asyncio.create_task(callers()) for _ in range(8)]
        await generation(a_deployment(), 0)
        assert set(statuses) == {200}
