"""The gateway's leases over a stream to a real scheduler."""

import asyncio

import pytest

from cache_manager.model.ids import ModelId
from gateway_ext.calls.function_table import Function
from gateway_ext.calls.gpu_leasing import CallLease, GpuLeasing
from gateway_ext.metrics.call_counts import GatewayMeters
from gateway_ext.openfaas.function_options import FunctionOptions
from gateway_ext.tracing.call_journey import Journey
from scheduler.model.events import ModelRegistered
from scheduler.model.values import ModelSpec
from tests.kit.waiting import eventually
from tests.kit.worlds.calling import a_deployment
from tests.kit.worlds.service_world import leading

pytestmark = pytest.mark.timeout(30, func_only=True)

BERT = 64 * "b"


async def a_lease(leasing: GpuLeasing, function: Function, call_id: str) -> CallLease | None:
    journey = Journey(call_id, "echo", "POST", 32 * "a", 1, gpu=True, sampled=False)
    journey.attempt()
    deadline_s = asyncio.get_running_loop().time() + 9
    return await leasing.acquire(function, "http://echo", journey, deadline_s, own_id=True)


async def test_request_is_cancelled_when_its_task_is() -> None:
    async with leading() as world, world.leases() as client:
        assert world.office is not None
        cluster = world.office.core.cluster
        registered = ModelSpec(ModelId(f"openfaas-fn/{BERT[:20]}"))
        world.office.driver.report(ModelRegistered(registered))
        leasing = GpuLeasing(client, GatewayMeters())
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
        leasing = GpuLeasing(client, GatewayMeters())
        function = Function(a_deployment(), FunctionOptions(gpu=True))
        function.learned.saw(b",".join(b"%064x" % number for number in range(16)))

        assert await a_lease(leasing, function, "c0") is None

        assert not cluster.profiles.known()
        assert all(not gpu.cache.residents for gpu in cluster.gpus.values())
        assert not function.learned.known
