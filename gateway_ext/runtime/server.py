"""One serving process: its connections, health, readiness, and how it ends.

The loop has a thread of its own, so that the handler's module runs in the main thread, as any
program does, while health is answered.
"""

import asyncio
import json
import os
import resource
import socket
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime

from gateway_ext.runtime.calls import Handler, HandlerCalls
from gateway_ext.runtime.connection import ClientLeft, ConnectionSite, RequestHead, ServerConnection
from gateway_ext.runtime.handler_values import HandlerEvent, HandlerResponse
from gateway_ext.runtime.settings import RuntimeSettings

_FINE = HandlerResponse(200, [("Content-Type", "text/plain; charset=utf-8")], b"OK\n")
_MOST_CONNECTIONS = 4096
_HEALTH, _READY = "/_/health", "/_/ready"


class FunctionServer:
    """Serves health from the start, and calls once there is a handler."""

    def __init__(self, settings: RuntimeSettings) -> None:
        self._settings = settings
        self._site = ConnectionSite(
            self._begin,
            self._catch_up,
            max_connections=_most_connections(),
            max_body_bytes=settings.max_body_bytes,
            read_timeout_s=settings.read_timeout_s,
        )
        self._calls: HandlerCalls | None = None
        self._waited_for = asyncio.Event()
        self._stopping = asyncio.Event()
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._unfinished = False
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)

    def start(self) -> None:
        """Prepare the server; `listen` opens it."""
        self._thread.start()

    def listen(self, listener: socket.socket) -> None:
        """Accept connections; returns once the server does so."""
        loop = self._loop.result()
        asyncio.run_coroutine_threadsafe(self._listen(listener), loop).result()

    def ready(self, handler: Handler) -> None:
        asyncio.run_coroutine_threadsafe(self._ready(handler), self._loop.result()).result()

    @property
    def is_ready(self) -> bool:
        """Whether calls may have begun; any thread may ask."""
        return self._calls is not None

    def stop(self) -> None:
        """Accept nothing more, finish the calls in progress, and end."""
        with suppress(RuntimeError):  # told again: it has ended
            self._loop.result().call_soon_threadsafe(self._stopping.set)

    def wait(self) -> bool:
        """Wait for the end; False if calls were abandoned. It is called last."""
        self._loop.result().call_soon_threadsafe(self._waited_for.set)
        # With a time limit, however long, so that signals are noticed.
        while self._thread.is_alive():
            self._thread.join(3600)
        return not self._unfinished

    def _begin(
        self, head: RequestHead, body: bytes, connection: ServerConnection
    ) -> ClientLeft | None:
        calls = self._calls
        if head.target == _HEALTH:
            connection.answer(_FINE)
        elif calls is None or self._stopping.is_set():
            connection.refuse(503, "the function is not ready", last=True)
        elif head.target == _READY:
            connection.answer(_FINE)
        elif 0 < self._settings.max_inflight <= len(calls.live):
            connection.refuse(429, "the function has as many calls as it takes")
        else:
            event = HandlerEvent(head.method, head.target, head.headers, body, calls.data)
            return calls.begin(event, connection).cancel
        return None

    def _catch_up(self) -> None:
        if self._calls is not None:
            self._calls.mailbox.catch_up()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop.set_result(asyncio.get_running_loop())
        await self._stopping.wait()
        if self._calls is not None and self._calls.taker is not None:
            self._calls.taker.hurry()
        await self._waited_for.wait()  # the loop is open for a `listen` that follows `stop`
        deadline_s = asyncio.get_running_loop().time() + self._settings.stop_timeout_s
        while self._site.connections and asyncio.get_running_loop().time() < deadline_s:
            self._catch_up()
            for connection in list(self._site.connections):
                connection.finish()
            await asyncio.sleep(0.01)
        self._close()

    def _close(self) -> None:
        self._catch_up()
        if self._calls is None:
            return
        for call in list(self._calls.live):
            self._unfinished = True
            call.cancel()
        self._unfinished |= bool(self._calls.in_threads)
        self._calls.threads.close()

    async def _listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: ServerConnection(self._site), sock=listener, backlog=1024
        )
        # `Server.close` does not wait for connections: `stop` lets their calls finish.
        self._closer = loop.create_task(self._close_with(server))

    async def _close_with(self, server: asyncio.Server) -> None:
        await self._stopping.wait()
        server.close()

    async def _ready(self, handler: Handler) -> None:
        self._calls = HandlerCalls(
            handler,
            self._settings,
            exhausted=self._give_way,
            log_line=_write_as_json if self._settings.log_json else _write_plainly,
        )

    def _give_way(self) -> None:
        # Not to stdout: a thread may be held in a write to it.
        write_line("every thread is held by calls that timed out: this process ends")
        os._exit(1)


def _most_connections() -> int:
    """At most half of the files that this process may open: without files nobody can connect."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return min(_MOST_CONNECTIONS, files // 2)


def _write_plainly(text: str, call_id: str, trace_id: str) -> None:
    del trace_id
    write_line(f"[{''.join(filter(str.isprintable, call_id))}] {text}")


def _write_as_json(text: str, call_id: str, trace_id: str) -> None:
    """A line of JSON, in the format of our other processes."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
    fields = {"time": f"{at}Z", "level": "error", "logger": "runtime", "message": text}
    ids = {"call_id": call_id, "trace_id": trace_id}
    write_line(json.dumps(fields | {name: value for name, value in ids.items() if value}))


def write_line(line: str) -> None:
    """Write a line to the log at once."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
