"""A scheduler that answers HTTP on loopback, with fake nodes attached in its own process."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from common.frame_line import FrameLine
from common.stream_upgrade import dial
from scheduler.service.access import ApiRole, token
from scheduler.service.http.app import listen, make_app, serving
from scheduler.service.leadership.term import Office
from scheduler.service.scheduler_service import SchedulerService
from scheduler.settings import Serving, Settings
from scheduler.wire.caller_stream import MAX_FRAME_BYTES, PATH
from tests.kit.cores.builders import gpu
from tests.kit.library_caches import forget_endpoints
from tests.kit.nodes.attaching import attach_in_process
from tests.kit.nodes.fake_node import FakeNode, fake_node
from tests.kit.worlds.waiting_caller import WaitingCaller

SECRET = b"a secret of the tests, long enough"


@dataclass(frozen=True, slots=True)
class Said:
    """One answer: its status, its JSON (or text), its headers."""

    status: int
    body: Any
    headers: Mapping[str, str]


@dataclass(slots=True)
class World:
    """One scheduler with its server, and somebody who asks it."""

    service: SchedulerService
    url: str
    session: aiohttp.ClientSession
    office: Office | None = None

    async def ask(self, method: str, path: str, body: object = None, **more: Any) -> Said:
        """One request and its answer."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | more.pop("headers", {})
        url = self.url + path
        async with self.session.request(method, url, data=data, headers=headers) as answer:
            text = await answer.text()
            kind = answer.headers.get("content-type", "")
            found = json.loads(text) if kind == "application/json" else text
            return Said(answer.status, found, answer.headers)

    async def get(self, path: str, **more: Any) -> Said:
        return await self.ask("GET", path, **more)

    async def acquire(self, request: str, *models: str, query: str = "", **more: Any) -> Said:
        """Ask for a lease for these models (for bert, where none is named)."""
        body = {"request": request, "function": "team/reader", "models": models or ("bert",)}
        headers = more.pop("headers", {})
        return await self.ask("POST", f"/acquire{query}", body | more, headers=headers)

    async def release(self, lease: int, **more: Any) -> Said:
        return await self.ask("POST", "/release", {"lease": lease} | more)

    def attach(self, node: FakeNode) -> FakeNode:
        """Let a node attach and report itself."""
        assert self.office is not None
        attach_in_process(self.office.driver, node)
        return node

    async def dialed(self) -> FrameLine:
        """A line for a caller's stream, on which nothing was sent yet."""
        headers = {"Authorization": f"Bearer {token(SECRET, ApiRole.CALLER)}"}
        return await dial(self.url, PATH, headers, MAX_FRAME_BYTES)

    def leases(self, *more_urls: str, patience_s: float = 10.0) -> WaitingCaller:
        """A client for leases of this scheduler and perhaps others."""
        urls = [self.url, *more_urls]
        return WaitingCaller(urls, token(SECRET, ApiRole.CALLER), patience_s=patience_s)


@asynccontextmanager
async def a_world(
    *, role: ApiRole = ApiRole.ADMIN, **serving_settings: Any
) -> AsyncIterator[World]:
    """A scheduler that stands by; `leading` makes it the leader."""
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    settings = Settings(scheduler=Serving(**serving_settings))
    service = SchedulerService(settings, SECRET, "s0", url)
    headers = {"Authorization": f"Bearer {token(SECRET, role)}"}
    try:
        async with (
            serving(make_app(service), listener, streams=service.serve_stream),
            aiohttp.ClientSession(headers=headers) as session,
        ):
            yield World(service, url, session)
    finally:
        forget_endpoints()


@asynccontextmanager
async def leading(
    *nodes: FakeNode, term: int = 1, role: ApiRole = ApiRole.ADMIN, **serving_settings: Any
) -> AsyncIterator[World]:
    """A scheduler that leads, with these nodes (one, of one GPU)."""
    async with a_world(role=role, **serving_settings) as world, world.service.lead(term) as office:
        world.office = office
        for node in nodes or (fake_node("n0", gpu("g0", node="n0"), load_s=0.0),):
            world.attach(node)
        yield world
