"""The processes of the page's bench: a scheduler with fake nodes, a gateway, and who calls."""

import asyncio
import itertools
import logging
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import aiohttp
import uvloop

from cache_manager.model import GpuId, ModelId, NodeId
from gateway_ext.gateway import Gateway
from gateway_ext.model import DEFAULT_NAMESPACE, Deployment, Endpoint, FunctionId
from gateway_ext.posting import Posting
from gateway_ext.serving import serving as serving_calls
from gateway_ext.settings import GatewaySettings
from scheduler.client import SchedulerClient
from scheduler.console import Console
from scheduler.events import ModelRegistered
from scheduler.model import GpuSpec, ModelSpec
from scheduler.service.access import Role, token
from scheduler.service.service import Service
from scheduler.service.serving import listen, serving
from scheduler.service.settings import Serving, Settings
from tests.fake_node import FakeNode
from tests.memory_provider import MemoryProvider

SECRET = b"the secret of the bench of the page"
_GPUS_A_NODE = 4
_GPU_BYTES, _MODEL_BYTES = 80 << 30, 9 << 30
_LOAD_S, _RUN_S = 0.4, 0.3
_TICK_S = 0.02
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Size:
    """What there is, and how many calls come a second."""

    gpus: int = 200
    functions: int = 1_000
    rate: float = 100.0

    @property
    def nodes(self) -> int:
        """Of four GPUs each."""
        return self.gpus // _GPUS_A_NODE


class Child:
    """A process that does what it is told through a pipe; its first word is where it answers."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid = pid
        self.url = str(pipe.recv())
        self._pipe = pipe

    def ask(self, order: object) -> Any:
        """One order and its answer."""
        self._pipe.send(order)
        return self._pipe.recv()

    def cpu_s(self) -> float:
        """Processor time that it has taken."""
        stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8")
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS


@contextmanager
def child(serve: Any, *arguments: object) -> Iterator[Child]:
    """A process for as long as the context lasts."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(serve, theirs, *arguments))
    process.start()
    assert process.pid is not None
    try:
        yield Child(process.pid, ours)
    finally:
        ours.close()
        process.join()


def _run(serve: Any, pipe: Connection, *arguments: object) -> None:
    logging.disable(logging.CRITICAL)  # calls that fail are counted
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(pipe, *arguments))


async def _until_closed(pipe: Connection) -> None:
    """Whoever started us goes away."""
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe.fileno(), closed.set)
    await closed.wait()
    loop.remove_reader(pipe.fileno())


# -- a scheduler with fake nodes ------------------------------------------------------------------


async def scheduler(pipe: Connection, size: Size) -> None:
    """Leads nodes of four GPUs each."""
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    service = Service(Settings(scheduler=Serving()), SECRET, "s0", url)
    async with serving(service.app, listener), service.lead(1) as office:
        for number in range(size.functions):
            spec = ModelSpec(ModelId(model_of(number)), memory_bytes=_MODEL_BYTES)
            office.driver.report(ModelRegistered(spec))
        for number in range(size.nodes):
            node = make_node(number)
            node.reports = office.driver
            office.driver.attach(node.name, node)
            office.driver.report(node.snapshot())
        pipe.send(url)
        await _until_closed(pipe)


def make_node(number: int) -> FakeNode:
    """A node that takes its time, and remembers no order."""
    name = NodeId(f"node-{number}")
    specs = tuple(
        GpuSpec(GpuId(f"{name}/cuda:{gpu}"), name, _GPU_BYTES) for gpu in range(_GPUS_A_NODE)
    )
    return FakeNode(name, specs, load_s=_LOAD_S, orders=_Forgetting())


class _Forgetting(list[Any]):
    """Orders that nobody will look at."""

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
        """It is not ours."""


async def gateway(pipe: Connection, size: Size, scheduler_url: str, instances: str) -> None:
    """Has the functions, all of which one process serves."""

    async def start(deployment: Deployment, name: str) -> _Elsewhere:
        del deployment
        return _Elsewhere(name, instances)

    state_dir = mkdtemp(prefix="gpufaas-bench-page-")
    settings = GatewaySettings(
        listen="127.0.0.1:0", state_dir=state_dir, auth=False, scaling=False, drain_s=1.0
    )
    provider = MemoryProvider(start)
    posting = Posting()
    async with AsyncExitStack() as stack:
        stack.callback(posting.close)
        enter = stack.enter_async_context
        caller, admin = token(SECRET, Role.CALLER), token(SECRET, Role.ADMIN)
        leases = await enter(SchedulerClient([scheduler_url], caller, post=posting))
        console = await enter(Console([scheduler_url], admin))
        found = await enter(Gateway(settings, provider, leases, console=console))
        for number in range(size.functions):
            await provider.deploy(deployment(number), update=False)
        pipe.send(found.url)
        await _until_closed(pipe)


def deployment(number: int) -> Deployment:
    """A function that says which model its calls use."""
    function = FunctionId(DEFAULT_NAMESPACE, f"function-{number}")
    digest = model_of(number).rpartition("/")[2]
    annotations = {"com.gpufaas.enabled": "true", "com.gpufaas.model": digest}
    return Deployment(function, "bench/function:1", annotations=annotations)


# -- who calls, and who watches -------------------------------------------------------------------


async def callers(pipe: Connection, size: Size) -> None:
    """Serves the instances; then calls functions of this gateway, while so many watch."""
    listener = listen("127.0.0.1", 0)
    async with serving_calls(_instance, listener, 1.0):
        pipe.send(f"tcp:127.0.0.1:{listener.getsockname()[1]}")
        url = await _order(pipe)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            pipe.send("ready")
            world = _World(size, url, session)
            while (watchers := await _order(pipe)) is not None:
                pipe.send(await world.phase(*watchers))


async def _order(pipe: Connection) -> Any:
    """The next one; None at the end. The loop goes on meanwhile."""
    await _until_closed(pipe)
    try:
        return pipe.recv()
    except EOFError:
        return None


async def _instance(scope: Any, receive: Any, send: Any) -> None:
    del scope, receive
    await asyncio.sleep(_RUN_S)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


class _World:
    """Calls at a rate; functions differ in how popular they are, as Zipf has it."""

    def __init__(self, size: Size, url: str, session: aiohttp.ClientSession) -> None:
        self._size = size
        self._url = url
        self._session = session
        self._chance = random.Random(7)
        weights = itertools.accumulate(1 / (rank + 1) for rank in range(size.functions))
        self._weights: Sequence[float] = list(weights)
        self._calls: set[asyncio.Task[None]] = set()
        self._failed = 0
        self._done = 0

    async def phase(self, watchers: int, seconds: float) -> dict[str, float]:
        """Some seconds of calls with so many watchers; what was seen of it."""
        self._failed = self._done = 0
        seen = [_Watcher() for _ in range(watchers)]
        tasks = [asyncio.create_task(each.watch(self._session, self._url)) for each in seen]
        began_s = due_s = time.monotonic()
        while (now_s := time.monotonic()) < began_s + seconds:
            while due_s <= now_s:
                self._call()
                due_s += self._chance.expovariate(self._size.rate)
            await asyncio.sleep(_TICK_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        count = max(1, watchers)
        return {
            "calls": self._done,
            "failed": self._failed,
            "events": sum(each.events for each in seen) / count,
            "bytes": sum(each.bytes for each in seen) / count,
        }

    def _call(self) -> None:
        task = asyncio.create_task(self._called())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _called(self) -> None:
        (number,) = self._chance.choices(range(self._size.functions), cum_weights=self._weights)
        async with self._session.post(f"{self._url}/function/function-{number}") as answer:
            await answer.read()
            self._done += 1
            self._failed += not answer.ok


class _Watcher:
    """Reads events and counts them."""

    def __init__(self) -> None:
        self.events = 0
        self.bytes = 0

    async def watch(self, session: aiohttp.ClientSession, url: str) -> None:
        """Until it is cancelled."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with session.get(f"{url}/ui/events", timeout=timeout) as answer:
            async for part in answer.content.iter_any():
                self.bytes += len(part)
                self.events += part.count(b"\nevent: ")
