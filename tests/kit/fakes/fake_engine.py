"""An Engine that answers as a test sets it up, on a Unix socket: for what real ones do rarely."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

IMAGE = {"Id": "sha256:1", "Config": {"Labels": {"com.gpufaas.template": "t"}}}


class FakeEngine:
    """Containers as dictionaries; `failing` has answers to give instead, by `METHOD path`.

    `held` has answers that are ready and not given before their event, by how `METHOD path` ends.
    """

    def __init__(self, path: Path) -> None:
        self.url = f"unix://{path}"
        self.asked: list[str] = []
        self.queries: list[dict[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: dict[str, Any] = {}
        self.containers: dict[str, dict[str, Any]] = {}
        self.images = {"f:1": IMAGE}
        self.failing: dict[str, tuple[int, str]] = {}
        self.held: dict[str, asyncio.Event] = {}
        self.pulls: list[dict[str, str]] = []  # the messages of a pull
        self.pull_ends = asyncio.Event()
        self.pull_ends.set()
        self.pulled: dict[str, Any] = {}  # what it brings
        self.version = "1.41"
        self.port = 8080
        self.output = b""
        self._path = path
        self._runner: web.AppRunner | None = None
        self._events: list[asyncio.Queue[dict[str, Any] | None]] = []

    async def start(self, tls: ssl.SSLContext | None = None, *, tcp: bool = False) -> None:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        if not tcp:
            await web.UnixSite(self._runner, str(self._path)).start()
            return
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls).start()
        self.url = f"tcp://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        for queue in self._events:
            queue.put_nowait(None)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def dies(self, name: str, code: int = 1, **state: Any) -> None:
        """A container ends, and the Engine reports it."""
        self.containers[name]["State"] = {"Running": False, "ExitCode": code, **state}
        self.says({"name": name, "exitCode": str(code)})

    def says(self, attributes: dict[str, str]) -> None:
        """Send an event that something has ended."""
        for queue in self._events:
            queue.put_nowait({"Actor": {"Attributes": attributes}})

    def break_off(self) -> None:
        """End every stream of events."""
        for queue in self._events:
            queue.put_nowait(None)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = (
            request.path.removeprefix("/").partition("/")[2] if "/v1" in request.path else "_ping"
        )
        content = f"{request.method} {path}"
        self.asked.append(content)
        self.queries.append(dict(request.query))
        self.headers.append(dict(request.headers))
        if content in self.failing:
            status, text = self.failing[content]
            return web.json_response({"message": text}, status=status)
        answer = await self._ready(request, path)
        for end, event in self.held.items():
            if content.endswith(end):
                await event.wait()
        return answer

    async def _ready(self, request: web.Request, path: str) -> web.StreamResponse:
        if path == "_ping":
            return web.Response(text="OK", headers={"API-Version": self.version})
        if path == "info":
            return web.json_response(
                {"IndexServerAddress": "https://index.usual.io/v1/", "NCPU": 2}
            )
        kind, _, rest = path.partition("/")
        if kind == "events":
            return await self._say_events(request)
        if kind == "images":
            return await self._image(request, rest)
        if kind == "containers":
            return await self._container(request, rest)
        if kind in {"networks", "volumes"}:
            return web.json_response({"Volumes": []} if request.method == "GET" else {})
        return web.json_response({"message": "page not found"}, status=404)

    async def _say_events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._events.append(queue)
        while (event := await queue.get()) is not None:
            await response.write(json.dumps(event).encode() + b"\n")
        self._events.remove(queue)
        return response

    async def _image(self, request: web.Request, rest: str) -> web.StreamResponse:
        if rest == "create":
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write("\n".join(json.dumps(one) for one in self.pulls).encode())
            await self.pull_ends.wait()
            self.images |= self.pulled
            return response
        name = rest.removesuffix("/json")
        by_id = {found["Id"]: found for found in self.images.values()}
        image = self.images.get(name) or by_id.get(name)
        if image is None:
            return web.json_response({"message": f"No such image: {name}"}, status=404)
        return web.json_response(image)

    async def _container(self, request: web.Request, rest: str) -> web.StreamResponse:
        if rest == "json":
            return web.json_response([_listed(name, one) for name, one in self.containers.items()])
        if rest == "create":
            name = request.query["name"]
            self.bodies[name] = body = await request.json()
            self.containers[name] = {"Config": body, "State": {"Running": False}}
            return web.json_response({"Id": name}, status=201)
        name, _, what = rest.partition("/")
        container = self.containers.get(name)
        if container is None:
            return web.json_response({"message": f"No such container: {name}"}, status=404)
        if request.method == "DELETE":
            del self.containers[name]
        elif what == "start":
            container["State"] = {"Running": True}
        elif what in {"stop", "kill"}:
            self.dies(name, 143 if what == "stop" else 137)
        elif what == "json":
            return web.json_response(_inspected(container))
        elif what == "logs":
            return web.Response(body=self.output)
        return web.Response(status=204)


def _listed(name: str, container: dict[str, Any]) -> dict[str, Any]:
    state = "running" if container["State"].get("Running") else "exited"
    return {"Names": [f"/{name}"], "Labels": container["Config"]["Labels"], "State": state}


def _inspected(container: dict[str, Any]) -> dict[str, Any]:
    network = container["Config"].get("HostConfig", {}).get("NetworkMode", "")
    networks = {network: {"IPAddress": "127.0.0.1"}}
    return {"State": container["State"], "NetworkSettings": {"Networks": networks}}


@asynccontextmanager
async def fake_engine(folder: Path) -> AsyncIterator[FakeEngine]:
    found = FakeEngine(folder / "docker.sock")
    await found.start()
    try:
        yield found
    finally:
        await found.stop()
