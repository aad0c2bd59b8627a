"""A whole gateway with a function that answers with pages, served by a thread of this process."""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from gateway_ext.model import Deployment, FunctionId
from scheduler.client.operator_client import OperatorClient
from tests.kit.fakes.fake_function import FakeFunction, Got, a_function
from tests.kit.fakes.memory_provider import MemoryProvider
from tests.kit.page.devtools import PATIENCE_S
from tests.kit.worlds.gateway_world import gateway_world

NAME = "evil"
VICTIM = FunctionId("openfaas-fn", "victim")
_PAGE = b"""<!doctype html><title>no script has run</title>
<form method="post" enctype="text/plain" action="/system/scale-function/victim">
<input name='{"serviceName": "victim", "replicas": 5, "x": "' value='"}'></form>
<script>document.title = "works"</script>"""
_HTML = "content-type: text/html\r\n"
_JSON = "content-type: application/json\r\naccess-control-allow-origin: *\r\n"
_WEAKER = "content-security-policy: sandbox allow-same-origin allow-scripts\r\n"
_CHALLENGE = 'www-authenticate: Basic realm="Restricted"\r\n'
_WORKER = "content-type: text/javascript\r\nservice-worker-allowed: /\r\n"
_COOKIES = "set-cookie: everywhere=1; Path=/\r\nset-cookie: below=1; path=/function/evil/x\r\n"
_HOST_WIDE = 'clear-site-data: "*"\r\n'
_ANSWERS = {
    "/": (200, _HTML, _PAGE),
    "/weaker": (200, _HTML + _WEAKER, _PAGE),
    "/weaker-twice": (200, _HTML + _WEAKER + _WEAKER, _PAGE),
    "/data": (200, _JSON, b'{"works": true}'),
    "/worker.js": (200, _WORKER, b"self.onfetch = null"),
    "/cookies": (200, _HTML + _COOKIES + _HOST_WIDE, _PAGE),
    "/onward": (307, "location: /system/scale-function/victim\r\n", b""),
    "/challenge": (401, _HTML + _CHALLENGE, b"who are you?"),
}


@dataclass(frozen=True, slots=True)
class FunctionPages:
    """The gateway's port, its provider, and what the functions got."""

    port: int
    provider: MemoryProvider
    got: list[Got]

    def url(self, path: str = "", host: str = "127.0.0.1") -> str:
        """The address of a path of the function's."""
        return f"{self.at(f'/function/{NAME}{path}', host)}"

    def at(self, path: str, host: str = "127.0.0.1") -> str:
        """The address of a path of the gateway's."""
        return f"http://{host}:{self.port}{path}"


@contextlib.contextmanager
def function_pages(function_hosts: tuple[str, ...] = ()) -> Iterator[FunctionPages]:
    """The gateway, for as long as the context lasts."""
    ready: Future[FunctionPages] = Future()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        try:
            async with _world(function_hosts) as world:
                ready.set_result(world)
                await over.wait()
        except OSError as error:
            if ready.done():
                raise
            ready.set_exception(error)

    def run() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(serve())

    thread = threading.Thread(target=run, name="function pages")
    thread.start()
    try:
        yield ready.result(PATIENCE_S)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the gateway has not ended"


@contextlib.asynccontextmanager
async def _world(hosts: tuple[str, ...]) -> AsyncIterator[FunctionPages]:
    got: list[Got] = []
    async with AsyncExitStack() as exits:

        async def behave(request: Got, writer: asyncio.StreamWriter) -> None:
            await request.whole()
            got.append(request)
            status, headers, body = _ANSWERS.get(request.target, (404, "", b"no such page"))
            head = f"HTTP/1.1 {status} X\r\n{headers}content-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)

        async def start(_: Deployment, name: str) -> FakeFunction:
            return await exits.enter_async_context(a_function(behave, name))

        provider = MemoryProvider(start)
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        # No scheduler is there; the page says so.
        console = OperatorClient(["http://127.0.0.1:1"], "no token", patience_s=0.1)
        await exits.enter_async_context(console)
        made = gateway_world(
            *(folder, provider), console=console, scaling=False, function_hosts=hosts
        )
        world = await exits.enter_async_context(made)
        for name in (NAME, VICTIM.name):
            await world.deploy(name)
        yield FunctionPages(world.gateway.address[1], provider, got)
