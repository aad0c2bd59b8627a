"""What a call holds, and what its caller is told, while the end of its process is waited for."""

import asyncio
from typing import cast

from common.errors import NoResponse
from common.http.client import HttpClient
from gateway_ext.calls.exchange import InvokeSettings
from gateway_ext.calls.function_table import Functions
from gateway_ext.calls.invoke import Invoke
from gateway_ext.calls.lease_pool import LeasePool
from gateway_ext.errors import Unreachable
from gateway_ext.metrics import GatewayMeters
from gateway_ext.model import Endpoint
from tests.kit.virtual_time import outcome, until, virtually
from tests.kit.worlds.calling import FakeLeases, a_deployment

BERT = 64 * b"b"


class BreakingClient:
    """Its connections answer health requests, and break off at calls, which it counts."""

    complete = False
    trailers = ()

    def __init__(self) -> None:
        self.calls = 0
        self.health_requests = 0

    def idle(self, address: str) -> "BreakingClient":
        del address
        return self

    async def ask(self, data: bytes, *, head_only: bool = False) -> None:
        del head_only
        await asyncio.sleep(0.001)
        if data.startswith(b"GET /_/health"):
            return
        self.calls += 1
        raise NoResponse("it closed the connection", sent=True)

    def let_go(self) -> None:
        pass


class World:
    """A GPU function of one instance, whose process lives, that takes one call at a time."""

    def __init__(self) -> None:
        self.client, self.leases = BreakingClient(), FakeLeases()
        self.lives: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        functions = Functions()
        meters = GatewayMeters(functions.loads)
        pool, client = LeasePool(self.leases, meters), cast(HttpClient, self.client)
        self._invoke = Invoke(functions, client, pool, InvokeSettings(), meters)
        deployment = a_deployment(concurrency="1", enabled="true")
        endpoint = Endpoint("i0", "unix:/i0", exited=self.lives)
        functions.function_is(deployment, [endpoint], wanted=1)
        function = functions.by_id(deployment.id)
        assert function is not None
        self.function, self.instance = function, function.instances[0]
        function.learned.saw(BERT)

    def call(self) -> asyncio.Task[object]:
        called = self._invoke.direct("POST", b"/function/echo", b"", [], b"")
        return asyncio.create_task(outcome(called))


@virtually
async def test_call_that_broke_off_holds_nothing_while_the_end_of_its_process_is_waited_for() -> (
    None
):
    world = World()
    calls = [world.call() for _ in range(8)]
    await until(0.1)
    assert (world.client.calls, world.function.inflight, world.instance.inflight) == (8, 0, 0)
    assert len(world.leases.asked) == len(world.leases.released) == 8
    assert not any(call.done() for call in calls)
    world.lives.set_result("was killed")
    for call in calls:
        error = await call
        assert isinstance(error, Unreachable)
        assert "was killed while it answered" in str(error)


@virtually
async def test_health_answer_counts_that_came_while_the_end_of_its_process_was_waited_for() -> None:
    world = World()
    call = world.call()
    await until(0.1)
    assert world.instance.doubted_since_s
    world.instance.doubted_since_s = 0.0  # as by a call that found it well
    assert isinstance(await call, Unreachable)
    assert not world.instance.doubted_since_s
