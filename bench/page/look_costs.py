"""The processor time of one look at the cluster, part by part, as the page's feed takes it."""

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

from bench.page.page_processes import (
    RUN_S,
    SECRET,
    PageCluster,
    deployment,
    model_of,
    populate,
)
from cache_manager.model.ids import ModelId
from gateway_ext.calls.function_table import Functions
from gateway_ext.metrics import GatewayMeters
from gateway_ext.model import DEFAULT_NAMESPACE, Endpoint
from gateway_ext.ui.cluster_source import ASKING_S, PageSource
from gateway_ext.ui.rows import DeadLetterRows
from gateway_ext.ui.state import Json, PageState, changes
from scheduler.client.operator_client import OperatorClient
from scheduler.model.values import Request, RequestId
from scheduler.service.leadership.term import Office
from scheduler.service.page_feed import PageFeed
from scheduler.service.scheduler_service import SchedulerService
from scheduler.settings import Settings

_WARM_S, _BETWEEN_S = 10.0, 1.0
_INSTANCE = [Endpoint("one", "tcp:127.0.0.1:1")]


def measure(cluster: PageCluster, looks: int) -> dict[str, list[float]]:
    """Milliseconds of processor time of each part, for looks about a second apart."""
    logging.disable(logging.CRITICAL)
    try:
        return asyncio.run(_measure(cluster, looks))
    finally:
        logging.disable(logging.NOTSET)


def shown(parts: Mapping[str, Sequence[float]]) -> list[str]:
    """Lines of a table."""
    lines = ["| part of a look | least ms | median ms |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {min(ms):.2f} | {median(ms):.2f} |" for name, ms in parts.items()]
    least = sum(min(ms) for ms in parts.values())
    usual = sum(median(ms) for ms in parts.values())
    return [*lines, f"| all of it | {least:.2f} | {usual:.2f} |"]


class _Console(OperatorClient):
    """Asks the scheduler in this process, so that HTTP costs nothing."""

    def __init__(self, feed: PageFeed) -> None:
        super().__init__(["http://127.0.0.1"], "")
        self._feed = feed
        self.body = b"{}"
        self.asked_ms = self.read_ms = 0.0

    async def look(self, mark: str) -> Mapping[str, Any]:
        """The changes since the last look."""
        began_s = time.thread_time()
        self.body = self._feed.look(mark, {"name": "s0", "store": "ok"})
        asked_s = time.thread_time()
        found: Mapping[str, Any] = json.loads(self.body)
        self.asked_ms = (asked_s - began_s) * 1e3
        self.read_ms = (time.thread_time() - asked_s) * 1e3
        return found

    async def point(self) -> Mapping[str, Any]:
        """The figures of the last seconds."""
        found: Mapping[str, Any] = json.loads(self._feed.point())
        return found

    async def policies(self) -> Sequence[Mapping[str, Any]]:
        """No policies."""
        return []


class _NoLetters(DeadLetterRows):
    """Of no queue."""

    def __init__(self) -> None:
        """There is none to read."""

    async def look(self) -> Json:
        """None are there."""
        return {"count": 0, "items": [], "why": ""}


async def _measure(cluster: PageCluster, looks: int) -> dict[str, list[float]]:
    service = SchedulerService(Settings(), SECRET, "s0", "http://127.0.0.1")
    async with service.lead(1) as office:
        populate(office.driver, cluster)
        functions, meters = _functions(cluster), GatewayMeters()
        console = _Console(PageFeed(office))
        shown_cluster = PageSource(console, functions, meters, _NoLetters())
        calling = asyncio.create_task(_call(office, functions, meters, cluster))
        await asyncio.sleep(_WARM_S)
        before = await shown_cluster.look()
        parts: dict[str, list[float]] = {}
        for _ in range(looks):
            await asyncio.sleep(_BETWEEN_S)
            before = await _one(console, shown_cluster, before, parts)
        calling.cancel()
        await asyncio.wait({calling})
    return parts


async def _one(
    console: _Console, cluster: PageSource, before: PageState, parts: dict[str, list[float]]
) -> PageState:
    look = await cluster.look()
    joined_ms = (look.spent_s - float(json.loads(console.body)["took_s"]) - ASKING_S) * 1e3
    began_s = time.thread_time()
    found = changes(before, look)
    text = to_json(found)
    compared_ms = (time.thread_time() - began_s) * 1e3
    for name, value in (
        ("scheduler: look", console.asked_ms),
        ("gateway: read", console.read_ms),
        ("gateway: join", joined_ms),
        (f"gateway: compare, write ({len(text) // 10_000}0 kB)", compared_ms),
    ):
        parts.setdefault(name.partition(" (")[0], []).append(value)
    return look


def _functions(cluster: PageCluster) -> Functions:
    functions = Functions()
    for number in range(cluster.functions):
        functions.function_is(deployment(number), _INSTANCE, wanted=1)
    return functions


async def _call(
    office: Office, functions: Functions, meters: GatewayMeters, cluster: PageCluster
) -> None:
    """Requests at a rate, for functions that are popular by Zipf's law."""
    chance, known = random.Random(7), list(functions)
    weights = cluster.popularity()
    async with asyncio.TaskGroup() as tasks:
        for number in itertools.count():
            (which,) = chance.choices(range(cluster.functions), cum_weights=weights)
            known[which].called()
            meters.ended(known[which].label, 200, RUN_S)
            tasks.create_task(_request(office, number, which))
            await asyncio.sleep(1 / cluster.rate)


async def _request(office: Office, number: int, which: int) -> None:
    function = f"{DEFAULT_NAMESPACE}/function-{which}"
    model = ModelId(model_of(which))
    request = Request(RequestId(f"r{number}"), function, (model,))
    placement = await office.driver.acquire(request)
    await asyncio.sleep(RUN_S)
    office.driver.release(placement.lease)
