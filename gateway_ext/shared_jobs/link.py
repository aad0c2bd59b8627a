"""Keeps a connection to NATS, with a new one whenever it is lost.

The client's own reconnecting is not used: it would delay writes and send them after their callers
have given up. Here a lost connection fails every request that was under way on it.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from logging import Logger
from pathlib import Path
from typing import Any

from nats.aio.client import Client

from common.tasks import until_first
from common.time_limits import time_limit
from gateway_ext.errors import QueueAway, QueueFailed
from gateway_ext.jobs.attempts import BackOff
from gateway_ext.shared_jobs.requests import FAILURES, NatsRequests, describe
from gateway_ext.shared_jobs.settings import JetStreamSettings

_AGAIN = BackOff(first_s=0.25, most_s=5.0)
_PING_S = 5
_DISCONNECT_S = 2.0
_CHECK_S = 0.25

# Uses a new connection until it ends, and calls the second argument once others may use it.
UseConnection = Callable[[NatsRequests, Callable[[], None]], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class NatsLink:
    """Keeps a connection; `session` uses each new one, and signals when others may use it.

    `what` is kept at the servers, for the log.
    """

    settings: JetStreamSettings
    session: UseConnection
    log: Logger
    what: str = "job queue"
    _wire: NatsRequests | None = None
    _why: str = "the connection is being made"
    _task: asyncio.Task[None] | None = None
    _closed: bool = False
    _up: asyncio.Event = field(default_factory=asyncio.Event)
    _tried: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name="nats")
        self._task.add_done_callback(self._stopped)

    @property
    def up(self) -> bool:
        return self._wire is not None

    async def wait(self, within_s: float) -> bool:
        with suppress(TimeoutError):
            async with time_limit(within_s):
                await self._up.wait()
        return self.up

    async def first_try(self, within_s: float) -> None:
        """Wait until a connection is usable, or the first one failed, at most this long."""
        with suppress(TimeoutError):
            async with time_limit(within_s):
                await self._tried.wait()

    async def until_up(self) -> None:
        """Wait for a usable connection; QueueFailed once the link is closed."""
        if not self._closed:
            await self._up.wait()
        self.wire()

    async def close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._up.set()  # wakes every waiting task, to find the link closed

    def wire(self) -> NatsRequests:
        """Raise QueueAway where no connection is usable."""
        if self._closed:
            raise QueueFailed("the job queue is closed")
        if self._wire is None:
            raise QueueAway(self._why)
        return self._wire

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """Report an end of the task other than by `close`, which is a defect."""
        if not task.cancelled():
            self._why = "a defect of the gateway"
            self.log.critical("%s: connecting stopped", self.what, exc_info=task.exception())

    # -- the connection --------------------------------------------------------------------------

    async def _keep(self) -> None:
        failures = 0
        while True:
            began = asyncio.get_running_loop().time()
            try:
                await self._once()
            except (*FAILURES, QueueFailed) as error:
                self._why = describe(error)
            self._tried.set()
            held = asyncio.get_running_loop().time() - began > _AGAIN.most_s
            failures = 1 if held else failures + 1
            wait_s = _AGAIN.wait_s(failures, 1.0)
            self.log.error("%s: no connection: %s; again in %.1f s", self.what, self._why, wait_s)
            await asyncio.sleep(wait_s)

    async def _once(self) -> None:
        ended = asyncio.Event()

        async def closed() -> None:
            ended.set()

        async def failed(error: Exception) -> None:
            self._why = describe(error)

        client = await self._connected(closed, failed)
        wire = NatsRequests(client, self.settings.answer_s)
        self._why = "the connection was lost"

        def usable() -> None:
            self._wire = wire
            self._up.set()
            self._tried.set()

        try:
            await until_first(self.session(wire, usable), _until_closed(client, ended))
        finally:
            self._wire = None
            self._up.clear()
            wire.mark_lost()
            await _disconnect(client)

    async def _connected(
        self, closed: Callable[[], Awaitable[None]], failed: Callable[[Exception], Awaitable[None]]
    ) -> Client:
        settings = self.settings
        secret = await asyncio.to_thread(_secret, settings)
        client = Client()
        try:
            async with time_limit(settings.connect_s * len(settings.servers)):
                await client.connect(
                    list(settings.servers),
                    name="gpufaas gateway",
                    user=settings.user or None,
                    password=secret if settings.user else None,
                    token=None if settings.user else secret,
                    tls=_tls(settings),
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=max(1, round(settings.connect_s)),
                    ping_interval=_PING_S,
                    closed_cb=closed,
                    error_cb=failed,
                )
        except BaseException:
            await _disconnect(client)
            raise
        return client


async def _until_closed(client: Client, closed: asyncio.Event) -> None:
    """Wait until the client is closed; its callback is missing where closing fails."""
    while not client.is_closed:
        with suppress(TimeoutError):
            async with time_limit(_CHECK_S):
                await closed.wait()
                return


async def _disconnect(client: Client) -> None:
    with suppress(*FAILURES):
        async with time_limit(_DISCONNECT_S):
            await client.close()


def _secret(settings: JetStreamSettings) -> str | None:
    """The password or token, read for every connection, as it may have changed."""
    return Path(settings.password_file).read_text().strip() if settings.password_file else None


def _tls(settings: JetStreamSettings) -> ssl.SSLContext | None:
    if not (settings.ca_file or any(server.startswith("tls://") for server in settings.servers)):
        return None
    context = ssl.create_default_context(cafile=settings.ca_file or None)
    if settings.cert_file:
        context.load_cert_chain(settings.cert_file, settings.key_file)
    return context
