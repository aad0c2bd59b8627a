"""One serving process: its connections, health, readiness, and how it ends.

The loop has a thread of its own, so that the handler's module runs in the main thread, as any
program does, while health is answered.
"""

import asyncio
import os
import socket
import sys
import threading
from concurrent.futures import Future

from gateway_ext.runtime.answer import Answer
from gateway_ext.runtime.calls import Call, Calls
from gateway_ext.runtime.connection import Connection
from gateway_ext.runtime.event import Event
from gateway_ext.runtime.gpu import placements
from gateway_ext.runtime.handler import Handle
from gateway_ext.runtime.log_lines import say_as_json, say_plainly
from gateway_ext.runtime.parsing import Head
from gateway_ext.runtime.settings import RuntimeSettings

_FINE = Answer(200, [("Content-Type", "text/plain; charset=utf-8")], b"OK\n")
_HEALTH, _READY = "/_/health", "/_/ready"


class Service:
    """Serves health from the start, and calls once there is a handler."""

    def __init__(self, settings: RuntimeSettings) -> None:
        self.connections: set[Connection] = set()
        self.max_body_bytes = settings.max_body_bytes
        self.read_timeout_s = settings.read_timeout_s
        self._settings = settings
        self._calls: Calls | None = None
        self._stopping = asyncio.Event()
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._unfinished = False
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)

    def start(self) -> None:
        """Begin: `listen` makes it be heard."""
        self._thread.start()

    def listen(self, listener: socket.socket) -> None:
        """Answer who connects; returns when that is so."""
        loop = self._loop.result()
        asyncio.run_coroutine_threadsafe(self._listen(listener), loop).result()

    def ready(self, handle: Handle) -> None:
        """From now on calls are served."""
        asyncio.run_coroutine_threadsafe(self._ready(handle), self._loop.result()).result()

    def stop(self) -> None:
        """Take nothing more, finish what is being served, and end."""
        self._loop.result().call_soon_threadsafe(self._stopping.set)

    def wait(self) -> bool:
        """Until it has ended; False where calls had to be left behind."""
        # With a time, however long, so that signals are noticed.
        while self._thread.is_alive():
            self._thread.join(3600)
        return not self._unfinished

    def begin(self, head: Head, body: bytes, connection: Connection) -> Call | None:
        """Serve one request (see `connection.Site`)."""
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
            return calls.begin(Event(head.method, head.target, head.headers, body), connection)
        return None

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop.set_result(asyncio.get_running_loop())
        await self._stopping.wait()
        for connection in list(self.connections):
            connection.finish()
        deadline_s = asyncio.get_running_loop().time() + self._settings.stop_timeout_s
        while self.connections:
            if asyncio.get_running_loop().time() > deadline_s:
                break
            await asyncio.sleep(0.01)
        self._close()

    def _close(self) -> None:
        if self._calls is None:
            return
        for call in list(self._calls.live):
            self._unfinished = True
            call.cancel()
        self._unfinished |= bool(self._calls.in_threads)
        self._calls.pool.shutdown(wait=False, cancel_futures=True)

    async def _listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(self), sock=listener, backlog=1024)
        # Closing belongs to stopping, and does not wait for connections: they are finished there.
        self._closer = loop.create_task(self._close_with(server))

    async def _close_with(self, server: asyncio.Server) -> None:
        await self._stopping.wait()
        server.close()

    async def _ready(self, handle: Handle) -> None:
        self._calls = Calls(
            handle,
            self._settings.hostname,
            threads=self._settings.threads,
            timeout_s=self._settings.exec_timeout_s,
            gpu=placements(gpu=self._settings.gpu),
            exhausted=self._give_way,
            say=say_as_json if self._settings.log_json else say_plainly,
        )

    def _give_way(self) -> None:
        sys.stderr.write("every thread is held by calls that timed out: this process ends\n")
        sys.stderr.flush()
        os._exit(1)
