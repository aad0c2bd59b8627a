"""The processes of the page's bench: a scheduler with fake nodes, a gateway, and the callers."""

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from bench.measure.child_process import ParentPipe
from cache_manager.model.ids import GpuId, ModelId, NodeId
from common.http.server import serving as serving_calls
from gateway_ext.gateway import Gateway
from gateway_ext.model import DEFAULT_NAMESPACE, Deployment, Endpoint, FunctionId
from gateway_ext.settings import GatewaySettings
from scheduler.client.operator_client import OperatorClient
from scheduler.model.events import ModelRegistered
from scheduler.model.values import GpuSpec, ModelSpec
from scheduler.service.access import ApiRole, token
from scheduler.service.driver import Driver
from scheduler.service.http.app import listen, make_app, serving
from scheduler.service.scheduler_service import SchedulerService
from scheduler.settings import Serving, Settings
from tests.kit.fakes.memory_provider import MemoryProvider
from tests.kit.nodes.attaching import attach_in_process
from tests.kit.nodes.fake_node import FakeNode
from tests.kit.worlds.waiting_caller import WaitingCaller

SECRET = b"the secret of the bench of the page"
RUN_S = 0.3
_GPUS_A_NODE = 4
_GPU_BYTES, _MODEL_BYTES = 80 << 30, 9 << 30
_LOAD_S = 0.4
_TICK_S = 0.02


@dataclass(frozen=True, slots=True)
class PageCluster:
    """The GPUs and functions that the page shows, and how many calls come a second."""

    gpus: int = 200
    functions: int = 1_000
    rate: float = 100.0

    @property
    def nodes(self) -> int:
        """The number of nodes, of four GPUs each."""
        return self.gpus // _GPUS_A_NODE

    def popularity(self) -> list[float]:
        """Cumulative weights of the functions: Zipf with exponent 1."""
        return list(itertools.accumulate(1 / (rank + 1) for rank in range(self.functions)))


# -- a scheduler with fake nodes ------------------------------------------------------------------


async def serve_scheduler(parent: ParentPipe, cluster: PageCluster) -> None:
    """A scheduler that leads the nodes of the cluster."""
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    service = SchedulerService(Settings(scheduler=Serving()), SECRET, "s0", url)
    async with serving(make_app(service), listener), service.lead(1) as office:
        populate(office.driver, cluster)
        parent.ready(url)
        await parent.order()


def populate(driver: Driver, cluster: PageCluster) -> None:
    """Register the models of the functions, and attach the nodes."""
    for number in range(cluster.functions):
        spec = ModelSpec(ModelId(model_of(number)), memory_bytes=_MODEL_BYTES)
        driver.report(ModelRegistered(spec))
    for number in range(cluster.nodes):
        attach_in_process(driver, _make_node(number))


def _make_node(number: int) -> FakeNode:
    """A node whose loads take a while, and which keeps no list of its orders."""
    name = NodeId(f"node-{number}")
    specs = tuple(
        GpuSpec(GpuId(f"{name}/cuda:{gpu}"), name, _GPU_BYTES) for gpu in range(_GPUS_A_NODE)
    )
    return FakeNode(name, specs, load_s=_LOAD_S, orders=_Forgetting())


class _Forgetting(list[Any]):
    """A list that stays empty."""

    def append(self, order: object) -> None:
        del order


def model_of(number: int) -> str:
    """The model of a function."""
    return f"{DEFAULT_NAMESPACE}/{number:020x}"


# -- a gateway ------------------------------------------------------------------------------------


class _Elsewhere:
    """An instance that another process serves."""

    def __init__(self, name: str, address: str) -> None:
        self.endpoint = Endpoint(name, address)

    async def close(self) -> None:
        """Do nothing: the other process ends the instance."""


async def serve_gateway(
    parent: ParentPipe, cluster: PageCluster, scheduler_url: str, instances: str
) -> None:
    """A gateway with all functions; one process serves the instances of all of them."""

    async def start(deployment: Deployment, name: str) -> _Elsewhere:
        del deployment
        return _Elsewhere(name, instances)

    _disable_logging()
    async with AsyncExitStack() as stack:
        state_dir = stack.enter_context(TemporaryDirectory(prefix="gpufaas-bench-page-"))
        settings = GatewaySettings(
            listen="127.0.0.1:0", state_dir=state_dir, auth=False, scaling=False, drain_s=1.0
        )
        provider = MemoryProvider(start)
        enter = stack.enter_async_context
        caller, admin = token(SECRET, ApiRole.CALLER), token(SECRET, ApiRole.ADMIN)
        leases = await enter(WaitingCaller([scheduler_url], caller))
        console = await enter(OperatorClient([scheduler_url], admin))
        found = await enter(Gateway(settings, provider, leases, console=console))
        for number in range(cluster.functions):
            await provider.deploy(deployment(number), update=False)
        parent.ready(found.url)
        await parent.order()


def deployment(number: int) -> Deployment:
    """A function whose annotations name the model that its calls use."""
    function = FunctionId(DEFAULT_NAMESPACE, f"function-{number}")
    digest = model_of(number).rpartition("/")[2]
    annotations = {"com.gpufaas.enabled": "true", "com.gpufaas.model": digest}
    return Deployment(function, "bench/function:1", annotations=annotations)


# -- callers and watchers -------------------------------------------------------------------------


async def put_loads(parent: ParentPipe, cluster: PageCluster) -> None:
    """Serve the instances; the first order is the gateway's URL, each further one a phase."""
    _disable_logging()
    listener = listen("127.0.0.1", 0)
    async with serving_calls(_instance, listener, 1.0):
        parent.ready(f"tcp:127.0.0.1:{listener.getsockname()[1]}")
        url = await parent.order()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            parent.answer("ready")
            callers = _Callers(cluster, url, session)
            while (phase := await parent.order()) is not None:
                parent.answer(await callers.phase(*phase))


def _disable_logging() -> None:
    """Log nothing: calls that fail are counted."""
    logging.disable(logging.CRITICAL)


async def _instance(scope: Any, receive: Any, send: Any) -> None:
    del scope, receive
    await asyncio.sleep(RUN_S)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


class _Callers:
    """Calls at a rate, of functions that are popular by Zipf's law."""

    def __init__(self, cluster: PageCluster, url: str, session: aiohttp.ClientSession) -> None:
        self._cluster = cluster
        self._url = url
        self._session = session
        self._chance = random.Random(7)
        self._weights: Sequence[float] = cluster.popularity()
        self._calls: set[asyncio.Task[None]] = set()
        self._failed = 0
        self._done = 0

    async def phase(self, watchers: int, seconds: float) -> dict[str, float]:
        """Call for some seconds while watchers read events; the counts of calls and events."""
        self._failed = self._done = 0
        watching = [_Watcher() for _ in range(watchers)]
        tasks = [asyncio.create_task(each.watch(self._session, self._url)) for each in watching]
        began_s = due_s = time.monotonic()
        while (now_s := time.monotonic()) < began_s + seconds:
            while due_s <= now_s:
                self._call()
                due_s += self._chance.expovariate(self._cluster.rate)
            await asyncio.sleep(_TICK_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        count = max(1, watchers)
        return {
            "calls": self._done,
            "failed": self._failed,
            "events": sum(each.events for each in watching) / count,
            "bytes": sum(each.bytes for each in watching) / count,
        }

    def _call(self) -> None:
        task = asyncio.create_task(self._called())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _called(self) -> None:
        numbers = range(self._cluster.functions)
        (number,) = self._chance.choices(numbers, cum_weights=self._weights)
        async with self._session.post(f"{self._url}/function/function-{number}") as answer:
            await answer.read()
            self._done += 1
            self._failed += not answer.ok


class _Watcher:
    """Reads the page's events and counts them."""

    def __init__(self) -> None:
        self.events = 0
        self.bytes = 0

    async def watch(self, session: aiohttp.ClientSession, url: str) -> None:
        """Read until the task is cancelled."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with session.get(f"{url}/ui/events", timeout=timeout) as answer:
            async for part in answer.content.iter_any():
                self.bytes += len(part)
                self.events += part.count(b"\nevent: ")
