"""The gateway's leases over a stream to a real scheduler."""

import asyncio
from dataclasses import replace

import pytest

from cache_manager.model.ids import ModelId
from gateway_ext.calls import lease_pool
from gateway_ext.calls.function_table import Function
from gateway_ext.calls.lease_pool import CallLease, LeasePool
from gateway_ext.metrics import GatewayMeters
from gateway_ext.model import FunctionId
from gateway_ext.openfaas.function_options import FunctionOptions
from scheduler import settings
from scheduler.model.events import ModelRegistered, RequestArrived
from scheduler.model.values import LeaseId, ModelSpec, RequestId, RequestOutcome
from scheduler.service.history.history import RequestRecord
from scheduler.service.leadership.election import LeaderInfo
from tests.kit.cores.builders import request
from tests.kit.waiting import eventually
from tests.kit.worlds.calling import a_deployment
from tests.kit.worlds.leasing_calls import gpu_call
from tests.kit.worlds.service_world import World, a_world, leading

pytestmark = pytest.mark.timeout(180, func_only=True)

BERT = 64 * "b"


async def a_lease(leasing: LeasePool, function: Function, call_id: str) -> CallLease | None:
    lease = CallLease(leasing, gpu_call(function, call_id))
    await lease.take("http://echo")
    return lease if lease.has_lease else None


async def test_request_is_cancelled_when_its_task_is() -> None:
    async with leading() as world, world.leases() as client:
        assert world.office is not None
        cluster = world.office.core.cluster
        registered = ModelSpec(ModelId(f"openfaas-fn/{BERT[:20]}"))
        world.office.driver.report(ModelRegistered(registered))
        leasing = LeasePool(client, GatewayMeters())
        function = Function(a_deployment(), FunctionOptions(gpu=True))
        function.learned.saw(BERT.encode())
        first = await a_lease(leasing, function, "c0")
        assert first is not None
        waiting = asyncio.create_task(a_lease(leasing, function, "c1"))
        await eventually(lambda: cluster.waiting.count == 1)
        waiting.cancel()
        await eventually(lambda: cluster.waiting.count == 0)
        leasing.release(first, clean=False)
        again = await a_lease(leasing, function, "c2")
        assert again is not None
        leasing.release(again, clean=False)


async def test_nothing_is_reserved_when_a_function_reports_models_that_it_invented() -> None:
    async with leading() as world, world.leases() as client:
        assert world.office is not None
        cluster = world.office.core.cluster
        leasing = LeasePool(client, GatewayMeters())
        function = Function(a_deployment(), FunctionOptions(gpu=True))
        function.learned.saw(b",".join(b"%064x" % number for number in range(16)))

        assert await a_lease(leasing, function, "c0") is None

        assert not cluster.profiles.known
        assert all(not gpu.cache.residents for gpu in cluster.gpus.values())
        assert not function.learned.known


# -- leases that stand ------------------------------------------------------------------------


def a_function(world: World, name: str = "echo") -> Function:
    """A function whose model the scheduler knows."""
    assert world.office is not None
    model = ModelId(f"openfaas-fn/{name}")
    world.office.driver.report(ModelRegistered(ModelSpec(model)))
    deployment = replace(a_deployment(), id=FunctionId("openfaas-fn", name))
    function = Function(deployment, FunctionOptions(gpu=True))
    function.learned.models = (model,)
    return function


async def taken(leasing: LeasePool, function: Function, call_id: str) -> CallLease:
    lease = await a_lease(leasing, function, call_id)
    assert lease is not None
    return lease


def leases_of(world: World) -> list[LeaseId]:
    assert world.office is not None
    return list(world.office.core.leases)


def record_of(world: World, request: str) -> RequestRecord | None:
    assert world.office is not None
    return world.office.history.get(RequestId(request))


async def test_calls_under_one_lease_are_all_known_to_the_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_pool, "IDLE_S", 60.0)  # it is not given back before we look
    async with leading(standing_s=60.0) as world, world.leases() as client:
        leasing, function = LeasePool(client, GatewayMeters()), a_function(world)
        for number in range(5):
            leasing.release(await taken(leasing, function, f"c{number}"), clean=True)
        await eventually(lambda: record_of(world, "c4") is not None)
        assert len(leases_of(world)) == 1
        for number in range(5):
            record = record_of(world, f"c{number}")
            assert record is not None
            assert record.outcome is RequestOutcome.COMPLETED
            assert record.ended_s is not None
            assert record.granted_s is not None
            assert record.arrived_s <= record.granted_s <= record.ended_s
        assert world.office is not None
        assert world.office.driver.counts().hits == 4
        shown = await world.get("/explain/c3")
        assert shown.body["decisions"][0]["rule"] == "its caller kept this lease"
        assert (await world.get("/metrics")).body.count('result="hit"')


async def test_no_lease_stands_where_the_settings_say_so() -> None:
    async with leading(standing_s=0.0) as world, world.leases() as client:
        leasing, function = LeasePool(client, GatewayMeters()), a_function(world)
        leasing.release(await taken(leasing, function, "c0"), clean=True)
        await eventually(lambda: leases_of(world) == [])


async def test_lease_is_given_up_when_another_caller_waits() -> None:
    async with leading() as world, world.leases() as client, world.leases() as other:
        leasing, function = LeasePool(client, GatewayMeters()), a_function(world)
        leasing.release(await taken(leasing, function, "c0"), clean=True)
        granted = await other.acquire(request("r0"))
        assert leases_of(world) == [granted.placement.lease]
        waiting = asyncio.create_task(taken(leasing, function, "c1"))
        other.release(granted.placement.lease)
        leasing.release(await waiting, clean=True)


async def test_calls_of_functions_that_compete_all_get_their_turn() -> None:
    async with leading() as world, world.leases() as client:
        leasing = LeasePool(client, GatewayMeters())
        functions = [a_function(world, f"f{number}") for number in range(3)]

        async def call(number: int) -> None:
            lease = await taken(leasing, functions[number % 3], f"c{number}")
            await asyncio.sleep(0.001)
            leasing.release(lease, clean=True)

        await asyncio.gather(*(call(number) for number in range(60)))
        await eventually(lambda: all(record_of(world, f"c{n}") is not None for n in range(60)))


async def test_call_whose_question_waits_is_known_by_another_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The lease still serves the call that waits, however slowly all this goes.
    monkeypatch.setattr(settings, "_STANDING_SLICE_S", 60.0)
    async with leading() as world, world.leases() as client:
        leasing, function = LeasePool(client, GatewayMeters()), a_function(world)
        first, second = (
            asyncio.create_task(taken(leasing, function, call)) for call in ("c0", "c1")
        )
        held = await first
        await eventually(lambda: record_of(world, "c1") is not None)
        leasing.release(held, clean=True)
        lease = await second
        assert lease.request == "c1~kept"
        leasing.release(lease, clean=True)
        await eventually(lambda: record_of(world, "c1~kept") is not None)
        await eventually(
            lambda: getattr(record_of(world, "c1"), "outcome", "") is RequestOutcome.CANCELLED
        )


async def test_standing_leases_are_given_back_when_the_leader_changes() -> None:
    async with leading() as world, a_world() as second, world.leases(second.url) as client:
        leasing, function = LeasePool(client, GatewayMeters()), a_function(world)
        held = await taken(leasing, function, "c0")
        world.service.leader = LeaderInfo("s1", second.url, 2, "x")
        assert world.service.reign is not None
        await world.service.reign.callers.close()
        await eventually(lambda: held.lease.recalled)
        leasing.release(held, clean=True)


async def test_node_ends_a_lease_whose_caller_is_silent() -> None:
    async with leading() as world, world.leases() as client, world.leases() as other:
        leasing, function = LeasePool(client, GatewayMeters()), a_function(world)
        leasing.release(await taken(leasing, function, "c0"), clean=True)
        client.let_stand(lambda _: None)
        granted = await other.acquire(request("r0"))
        assert leases_of(world) == [granted.placement.lease]


async def test_recall_of_a_standing_lease_is_told_though_its_grant_was_not_taken_up_yet() -> None:
    async with leading() as world, world.leases() as client:
        leasing, function = LeasePool(client, GatewayMeters()), a_function(world)
        assert world.office is not None
        driver, requests = world.office.driver, world.office.core.requests

        def somebody_else_waits() -> None:
            """As soon as the lease is granted."""
            if list(requests) == ["c0"]:
                driver.report(RequestArrived(request("other")))

        world.office.observers.append(somebody_else_waits)
        asking = asyncio.create_task(taken(leasing, function, "c0"))
        lease = await asking
        await eventually(lambda: lease.lease.recalled)
        leasing.release(lease, clean=True)
