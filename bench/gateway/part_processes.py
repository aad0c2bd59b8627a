"""The processes of the bench of the invocation path: a function, a scheduler and gateways."""

import asyncio
from contextlib import AsyncExitStack
from enum import StrEnum
from pathlib import Path
from typing import cast

from bench.measure.child_process import ParentPipe
from bench.measure.instant_node import InstantNode
from bench.measure.load_figures import http_post
from common.http.asgi import App, Receive, Scope, Send, send_response
from common.http.client import HttpClient
from common.http.server import listen, serving
from gateway_ext.calls.exchange import InvokeSettings
from gateway_ext.calls.function_table import Functions
from gateway_ext.calls.invoke import Invoke
from gateway_ext.calls.lease_pool import LeasePool
from gateway_ext.metrics import GatewayMeters
from gateway_ext.model import DEFAULT_NAMESPACE, Deployment, Endpoint, FunctionId
from scheduler.client.lease_client import LeaseClient
from scheduler.service.access import ApiRole, token
from scheduler.service.http.app import make_app
from scheduler.service.scheduler_service import SchedulerService
from scheduler.settings import Settings
from tests.kit.nodes.attaching import attach_in_process

GPUS = 8
FUNCTIONS = 16
_SECRET = b"the secret of the gateway's bench"
_DRAIN_S = 1.0
_BODY = b"hi"


class PathPart(StrEnum):
    """How far a call goes along the invocation path."""

    BARE = "uvicorn that only answers"
    FUNCTION = "the function itself"
    PLAIN = "the gateway, a plain function"
    GPU = "the gateway, a GPU function"


def calls() -> list[bytes]:
    """A call of each function."""
    return [http_post(f"/function/{_name(number)}", body=_BODY) for number in range(FUNCTIONS)]


def _name(number: int) -> str:
    return f"f{number}"


async def serve_function(parent: ParentPipe, path: str) -> None:
    """The cheapest instance possible, at a Unix socket for gateways and a port for clients."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        local = await loop.create_unix_server(_OneAnswer, path, backlog=512)
        stack.callback(Path(path).unlink, missing_ok=True)
        stack.callback(local.close)
        remote = await loop.create_server(_OneAnswer, "127.0.0.1", 0, backlog=512)
        stack.callback(remote.close)
        parent.ready(f"http://127.0.0.1:{remote.sockets[0].getsockname()[1]}")
        await parent.order()


async def serve_scheduler(parent: ParentPipe) -> None:
    """A scheduler that leads, with emulated GPUs that are ready at once."""
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    service = SchedulerService(Settings(), _SECRET, "bench", url)
    async with (
        service.lead(1) as office,
        serving(make_app(service), listener, _DRAIN_S, streams=service.serve_stream),
    ):
        attach_in_process(office.driver, InstantNode("node", GPUS))
        parent.ready(url)
        await parent.order()


async def serve_gateway(parent: ParentPipe, part: PathPart, path: str, scheduler_url: str) -> None:
    """The invocation path under uvicorn, as the gateway runs it."""
    async with AsyncExitStack() as stack:
        listener = listen("127.0.0.1", 0)
        app = _bare if part is PathPart.BARE else await _invoke(stack, part, path, scheduler_url)
        await stack.enter_async_context(serving(app, listener, _DRAIN_S))
        parent.ready(f"http://127.0.0.1:{listener.getsockname()[1]}")
        await parent.order()


async def _invoke(stack: AsyncExitStack, part: PathPart, path: str, scheduler_url: str) -> App:
    settings, functions = InvokeSettings(), Functions()
    meters = GatewayMeters(functions.loads)
    pool = None
    if part is PathPart.GPU:
        client = LeaseClient([scheduler_url], token(_SECRET, ApiRole.CALLER))
        pool = LeasePool(await stack.enter_async_context(client), meters)
    for number in range(FUNCTIONS):
        deployment = Deployment(
            FunctionId(DEFAULT_NAMESPACE, _name(number)),
            "bench",
            annotations={
                "com.gpufaas.enabled": str(part is PathPart.GPU),
                "com.gpufaas.model": f"{number:064x}"[::-1],
            },
        )
        functions.function_is(deployment, [Endpoint(f"i{number}", f"unix:{path}")], wanted=1)
    invoke = Invoke(functions, HttpClient(settings.client), pool, settings, meters)
    stack.push_async_callback(invoke.close)
    return invoke


async def _bare(scope: Scope, receive: Receive, send: Send) -> None:
    assert scope["type"] == "http"
    await receive()
    await send_response(send, 200, b"hello")


class _OneAnswer(asyncio.Protocol):
    """Gives the same answer to every request that ends with the body of this bench's calls."""

    _ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\nhello"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._received.endswith(b"\r\n\r\n" + _BODY):
            self._received = b""
            self._transport.write(self._ANSWER)
