"""What one look of the page costs, part by part: the least of many, as a busy machine allows."""

import asyncio
import itertools
import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from pydantic_core import to_json

from bench.page_processes import SECRET, Size, deployment, make_node, model_of
from cache_manager.model import ModelId
from gateway_ext.jobs.model import DeadLetter, JobNumber
from gateway_ext.jobs.tally import QueueLimits, Tally
from gateway_ext.meters import Meters
from gateway_ext.model import DEFAULT_NAMESPACE, Endpoint
from gateway_ext.table import Functions
from gateway_ext.ui.changes import changes
from gateway_ext.ui.cluster import ASKING_S, Cluster
from gateway_ext.ui.letters import Letters
from gateway_ext.ui.model import Look
from scheduler.events import ModelRegistered
from scheduler.model import ModelSpec, Request, RequestId
from scheduler.service.feed import Feed
from scheduler.service.office import Office
from scheduler.service.service import Service
from scheduler.service.settings import Settings

_WARM_S, _BETWEEN_S, _RUN_S = 10.0, 1.0, 0.3
_INSTANCE = [Endpoint("one", "tcp:127.0.0.1:1")]


def measure(size: Size, looks: int) -> dict[str, list[float]]:
    """Milliseconds of processor time of each part, for so many looks about a second apart."""
    logging.disable(logging.CRITICAL)
    try:
        return asyncio.run(_measure(size, looks))
    finally:
        logging.disable(logging.NOTSET)


def shown(parts: Mapping[str, Sequence[float]]) -> list[str]:
    """Lines of a table."""
    lines = ["| part of a look | least ms | median ms |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {min(ms):.2f} | {median(ms):.2f} |" for name, ms in parts.items()]
    least = sum(min(ms) for ms in parts.values())
    usual = sum(median(ms) for ms in parts.values())
    return [*lines, f"| all of it | {least:.2f} | {usual:.2f} |"]


class _Console:
    """Asks without a network: what HTTP costs is left out."""

    url = "http://127.0.0.1"

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.body = b"{}"
        self.asked_ms = self.read_ms = 0.0

    async def look(self, mark: str) -> Mapping[str, Any]:
        """What is new."""
        began_s = time.thread_time()
        self.body = self._feed.look(mark, {"name": "s0", "store": "ok"})
        asked_s = time.thread_time()
        found: Mapping[str, Any] = json.loads(self.body)
        self.asked_ms = (asked_s - began_s) * 1e3
        self.read_ms = (time.thread_time() - asked_s) * 1e3
        return found

    async def point(self) -> Mapping[str, Any]:
        """Of the last seconds."""
        found: Mapping[str, Any] = json.loads(self._feed.point())
        return found

    async def policies(self) -> Sequence[Mapping[str, Any]]:
        """None are shown."""
        return []

    async def explain(self, request: str) -> Mapping[str, Any]:
        """Nobody asks."""
        raise NotImplementedError(request)

    async def set_policy(self, name: str, parameters: Mapping[str, float]) -> None:
        """Nobody asks."""
        raise NotImplementedError(name)

    async def order(self, model: str, verb: str, gpu: str | None) -> None:
        """Nobody asks."""
        raise NotImplementedError(model)


class _NoJobs:
    """No async calls."""

    def __init__(self) -> None:
        self.tally = Tally(QueueLimits())

    async def dead(self, after: int, limit: int) -> Sequence[DeadLetter]:
        """None."""
        raise NotImplementedError(after + limit)

    async def replay(self, number: JobNumber, now_s: float) -> None:
        """None."""
        raise NotImplementedError(number)

    async def discard(self, number: JobNumber) -> None:
        """None."""
        raise NotImplementedError(number)


async def _measure(size: Size, looks: int) -> dict[str, list[float]]:
    service = Service(Settings(), SECRET, "s0", "http://127.0.0.1")
    async with service.lead(1) as office:
        _attach(office, size)
        functions, meters = _functions(size), Meters()
        console = _Console(Feed(office, service.meters))
        cluster = Cluster(console, functions, meters, Letters(_NoJobs()))
        calling = asyncio.create_task(_call(office, functions, meters, size))
        await asyncio.sleep(_WARM_S)
        before = await cluster.look()
        parts: dict[str, list[float]] = {}
        for _ in range(looks):
            await asyncio.sleep(_BETWEEN_S)
            before = await _one(console, cluster, before, parts)
        calling.cancel()
        await asyncio.wait({calling})
    return parts


async def _one(
    console: _Console, cluster: Cluster, before: Look, parts: dict[str, list[float]]
) -> Look:
    look = await cluster.look()
    joined_ms = (look.spent_s - float(json.loads(console.body)["took_s"]) - ASKING_S) * 1e3
    began_s = time.thread_time()
    found = changes(before, look)
    text = to_json({**found.whole, **found.replaced})
    told_ms = (time.thread_time() - began_s) * 1e3
    for name, value in (
        ("scheduler: look", console.asked_ms),
        ("gateway: read", console.read_ms),
        ("gateway: join", joined_ms),
        (f"gateway: compare, write ({len(text) // 10_000}0 kB)", told_ms),
    ):
        parts.setdefault(name.partition(" (")[0], []).append(value)
    return look


def _attach(office: Office, size: Size) -> None:
    for number in range(size.functions):
        spec = ModelSpec(ModelId(model_of(number)), memory_bytes=9 << 30)
        office.driver.report(ModelRegistered(spec))
    for number in range(size.nodes):
        node = make_node(number)
        node.reports = office.driver
        office.driver.attach(node.name, node)
        office.driver.report(node.snapshot())


def _functions(size: Size) -> Functions:
    functions = Functions()
    for number in range(size.functions):
        functions.function_is(deployment(number), _INSTANCE, wanted=1)
    return functions


async def _call(office: Office, functions: Functions, meters: Meters, size: Size) -> None:
    """Requests at a rate, for functions that are popular as Zipf has it."""
    chance, known = random.Random(7), list(functions)
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(size.functions)))
    async with asyncio.TaskGroup() as tasks:
        for number in itertools.count():
            (which,) = chance.choices(range(size.functions), cum_weights=weights)
            known[which].called()
            meters.ended(known[which].label, 200, _RUN_S)
            tasks.create_task(_request(office, number, which))
            await asyncio.sleep(1 / size.rate)


async def _request(office: Office, number: int, which: int) -> None:
    function = f"{DEFAULT_NAMESPACE}/function-{which}"
    model = ModelId(model_of(which))
    request = Request(RequestId(f"r{number}"), function, (model,))
    placement = await office.driver.acquire(request)
    await asyncio.sleep(_RUN_S)
    office.driver.release(placement.lease)
