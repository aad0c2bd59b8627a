"""The gateway's own way to the scheduler, with the client library and real schedulers."""

import asyncio
import socket

import pytest

from cache_manager.model.ids import ModelId
from gateway_ext.calls.function_table import Function
from gateway_ext.calls.gpu_leasing import GpuLeasing
from gateway_ext.calls.scheduler_posting import Posting
from gateway_ext.metrics.call_counts import GatewayMeters
from gateway_ext.openfaas.function_options import FunctionOptions
from gateway_ext.tracing.call_journey import Journey
from scheduler.client.scheduler_client import SchedulerClient
from scheduler.model.errors import NoGpus, SchedulerUnreachable
from scheduler.model.events import ModelRegistered
from scheduler.model.values import ModelSpec, RequestId
from scheduler.service.http.access import ApiRole, token
from testbed.nodes.fake_node import fake_node
from tests.kit.cores.builders import gpu, request
from tests.kit.fakes.fake_function import a_function, says, writes
from tests.kit.waiting import eventually
from tests.kit.worlds.calling import a_deployment
from tests.kit.worlds.service_world import SECRET, World, a_world, leading

pytestmark = pytest.mark.timeout(30, func_only=True)

BERT = 64 * "b"


def a_journey(call_id: str) -> Journey:
    journey = Journey(call_id, "echo", "POST", 32 * "a", 1, gpu=True, sampled=False)
    journey.attempt()
    return journey


def a_client(*worlds: World, posting: Posting, patience_s: float = 5.0) -> SchedulerClient:
    urls = [world.url for world in worlds]
    return SchedulerClient(urls, token(SECRET, ApiRole.CALLER), post=posting, patience_s=patience_s)


async def test_posting_acquires_releases_and_raises_what_the_scheduler_raised() -> None:
    posting = Posting()
    async with leading() as world, a_client(world, posting=posting) as client:
        granted = await client.acquire(request("r0"))
        assert (granted.placement.gpu, granted.term) == ("g0", 1)
        await client.release(granted.placement.lease)
    async with (
        a_world(attach_grace_s=0.0) as world,
        world.service.lead(1),
        a_client(world, posting=posting) as client,
    ):
        with pytest.raises(NoGpus):
            await client.acquire(request("r0"))
    posting.close()


async def test_posting_moves_to_the_scheduler_that_leads() -> None:
    posting = Posting()
    async with a_world() as first, a_world() as second, second.service.lead(2) as second.office:
        second.attach(fake_node("n0", gpu("g0", node="n0"), load_s=0.0))
        async with a_client(first, second, posting=posting) as client:
            assert (await client.acquire(request("r0"))).term == 2
    async with a_client(second, posting=posting, patience_s=0.1) as client:
        with pytest.raises(SchedulerUnreachable):
            await client.acquire(request("r1"))
    posting.close()


async def test_posting_leaves_a_scheduler_that_does_not_answer_when_another_one_leads() -> None:
    """Connections to it are taken, as by the kernel for a process that is frozen."""
    posting = Posting()
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        url = f"http://127.0.0.1:{frozen.getsockname()[1]}"
        bearer = token(SECRET, ApiRole.CALLER)
        async with (
            leading(term=2) as world,
            SchedulerClient([url, world.url], bearer, post=posting) as client,
        ):
            granted = await client.acquire(request("r0"))
            assert granted.term == 2
            async with asyncio.timeout(1):
                await client.release(granted.placement.lease)
    posting.close()


async def test_request_is_cancelled_when_its_task_is() -> None:
    posting = Posting()
    async with leading() as world, a_client(world, posting=posting) as client:
        assert world.office is not None
        cluster = world.office.core.cluster
        registered = ModelSpec(ModelId(f"openfaas-fn/{BERT[:20]}"))
        world.office.driver.report(ModelRegistered(registered))
        leasing = GpuLeasing(client, GatewayMeters())
        function = Function(a_deployment(), FunctionOptions(gpu=True))
        function.learned.saw(BERT.encode())
        now_s = asyncio.get_running_loop().time()
        first = await leasing.acquire(function, a_journey("c0"), now_s + 9, own_id=True)
        assert first is not None
        waiting = asyncio.create_task(
            leasing.acquire(function, a_journey("c1"), now_s + 9, own_id=True)
        )
        await eventually(lambda: cluster.waiting.count == 1)
        waiting.cancel()
        await eventually(lambda: cluster.waiting.count == 0)
        leasing.release(first)
        await leasing.close()
        again = await leasing.acquire(function, a_journey("c2"), now_s + 9, own_id=True)
        assert again is not None
        leasing.release(again)
        await leasing.close()
    posting.close()


async def test_cancelling_ends_a_lease_whose_answer_no_caller_took() -> None:
    posting = Posting()
    async with leading() as world, a_client(world, posting=posting) as client:
        await client.acquire(request("r0"))
        await client.cancel(RequestId("r0"))
        async with asyncio.timeout(5):
            assert (await client.acquire(request("r1"))).placement.gpu == "g0"
    posting.close()


async def test_posting_raises_connection_error_when_the_answer_breaks_off() -> None:
    posting = Posting()
    begun = b"HTTP/1.1 200 X\r\ncontent-length: 9\r\n\r\nab"
    async with a_function(writes(begun, close=True), tcp=True) as fake:
        url = "http://" + fake.endpoint.address.removeprefix("tcp:") + "/acquire"
        with pytest.raises(ConnectionError):
            await posting(url, {}, {})
    with pytest.raises(ConnectionError):
        await posting(url, {}, {})
    async with a_function(says(b'{"a":1}'), tcp=True) as fake:
        url = "http://" + fake.endpoint.address.removeprefix("tcp:") + "/release"
        assert await posting(url, {"X-Own": "1"}, {"lease": 7}) == (200, b'{"a":1}')
        assert (fake.got[0].target, fake.got[0].body) == ("/release", b'{"lease":7}')
        assert fake.got[0].header("x-own") == "1"
    with pytest.raises(ValueError, match="plain HTTP"):
        await posting("https://elsewhere/acquire", {}, {})
    posting.close()


async def test_nothing_is_reserved_when_a_function_reports_models_that_it_invented() -> None:
    posting = Posting()
    async with leading() as world, a_client(world, posting=posting) as client:
        assert world.office is not None
        cluster = world.office.core.cluster
        leasing = GpuLeasing(client, GatewayMeters())
        function = Function(a_deployment(), FunctionOptions(gpu=True))
        function.learned.saw(b",".join(b"%064x" % number for number in range(16)))
        now_s = asyncio.get_running_loop().time()

        assert await leasing.acquire(function, a_journey("c0"), now_s + 9, own_id=True) is None

        assert not cluster.profiles.known()
        assert all(not gpu.cache.residents for gpu in cluster.gpus.values())
        assert not function.learned.known
    posting.close()
