"""Strangers who open more connections than the scheduler has: managers and callers get through."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from common.http.asgi import App, Receive, Scope, Send
from common.http.server_protocol import Limits
from common.time_limits import time_limit
from gpu_manager.attachment.attachment import Attachment
from scheduler.service.access import ApiRole, token
from scheduler.service.http.app import listen, make_app, serving
from scheduler.service.scheduler_service import SchedulerService
from scheduler.settings import Serving, Settings
from tests.kit.cores.builders import request
from tests.kit.network.raw_line import UPGRADE
from tests.kit.waiting import eventually
from tests.kit.worlds.cluster_in_process import a_node
from tests.kit.worlds.service_world import SECRET

pytestmark = pytest.mark.timeout(180, func_only=True)

MOST, STRANGERS = 16, 100
Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Asked:
    """Notes the paths of the requests that a service has begun to serve."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.paths: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        await self.app(scope, receive, send)


@asynccontextmanager
async def small_scheduler() -> AsyncIterator[tuple[str, Asked]]:
    """The URL of a leader that takes few connections, and what it was asked."""
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    settings = Settings(scheduler=Serving(attach_grace_s=1.0))
    service = SchedulerService(settings, SECRET, "s0", url)
    limits = Limits(connections=MOST)
    asked = Asked(make_app(service))
    async with serving(asked, listener, limits, service.serve_stream), service.lead(1):
        yield url, asked


@asynccontextmanager
async def strangers(url: str, count: int, *sent: bytes) -> AsyncIterator[list[Peer]]:
    """Connections that send each of these in turn, and then nothing."""
    host, _, port = url.removeprefix("http://").partition(":")
    async with AsyncExitStack() as exits:
        found = []
        for number in range(count):
            peer = await asyncio.open_connection(host, int(port))
            exits.callback(peer[1].close)
            peer[1].write(sent[number % len(sent)])
            found.append(peer)
        yield found


async def open_count(peers: list[Peer]) -> int:
    """How many of these connections the server has not closed."""

    async def is_open(reader: asyncio.StreamReader) -> bool:
        try:
            async with time_limit(0.1):
                while await reader.read(65536):
                    pass
        except TimeoutError:
            return True
        except OSError:
            pass
        return False

    return sum(await asyncio.gather(*(is_open(reader) for reader, _ in peers)))


async def test_manager_attaches_and_stays_while_strangers_take_every_connection() -> None:
    slow = (b"", b"GET /readyz HT", b"GET /nodes/n9/stream HTTP/1.1\r\n" + UPGRADE)
    async with small_scheduler() as (url, _), strangers(url, STRANGERS, *slow) as crowd:

        async def most_are_gone() -> bool:
            return await open_count(crowd) <= MOST

        await eventually(most_are_gone, "strangers make room for each other")
        node = a_node()
        attachment = Attachment([url], node.name, SECRET)
        node.reports = attachment
        attachment.attach(node.name, node)
        await eventually(lambda: attachment.connected, "the node's stream")
        await attachment.attached()
        async with strangers(url, STRANGERS, *slow):
            placement = await attachment.acquire(request("r1"))
            assert placement.node == "n0"
            assert attachment.connected
        attachment.release(placement.lease)
        attachment.detach(node.name)
        await attachment.close()


async def test_request_in_progress_outlasts_any_number_of_strangers() -> None:
    bearer = {"Authorization": f"Bearer {token(SECRET, ApiRole.CALLER)}"}
    body = {"request": "r1", "function": "f", "models": ["bert"]}
    async with small_scheduler() as (url, asked), aiohttp.ClientSession(headers=bearer) as session:
        waiting = asyncio.create_task(session.post(f"{url}/acquire", json=body))
        await eventually(lambda: asked.paths == ["/acquire"], "it is in progress")
        async with strangers(url, STRANGERS, b""):
            answer = await waiting
            assert answer.status == 503  # no GPU came in the grace
            answer.release()
            async with session.get(f"{url}/readyz") as ready:
                assert ready.status == 200
