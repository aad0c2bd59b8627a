"""The connection to NATS: made again whenever it is lost.

The client's own reconnecting is not used: it would hold writes back and send them later, when
nobody waits for them any more. Here a connection that is lost is lost, and with it what was asked.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from logging import Logger
from pathlib import Path

from nats.aio.client import Client

from gateway_ext.errors import QueueAway, QueueFailed
from gateway_ext.jobs.jetstream.settings import JetStreamSettings
from gateway_ext.jobs.jetstream.wire import FAILURES, Wire, told
from gateway_ext.jobs.retry import BackOff

_AGAIN = BackOff(first_s=0.25, most_s=5.0)
_PING_S = 5
_HANG_UP_S = 2.0
_LOOK_S = 0.25

# What is done with a new connection; it says when it may be used, and goes on as long as it is.
Session = Callable[[Wire, Callable[[], None]], Awaitable[None]]


class Link:
    """Keeps a connection; `session` is run with each new one, and says when it may be used."""

    def __init__(self, settings: JetStreamSettings, session: Session, log: Logger) -> None:
        self._settings = settings
        self._session = session
        self._log = log
        self._wire: Wire | None = None
        self._why = "the connection is being made"
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._up = asyncio.Event()

    def start(self) -> None:
        """Begin to connect."""
        self._task = asyncio.create_task(self._keep(), name="nats")
        self._task.add_done_callback(self._stopped)

    @property
    def up(self) -> bool:
        """Whether it may be used."""
        return self._wire is not None

    async def wait(self, within_s: float) -> bool:
        """Until it may be used, for so long at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._up.wait()
        return self.up

    async def until_up(self) -> None:
        """Until it may be used; QueueFailed where it is closed."""
        if not self._closed:
            await self._up.wait()
        self.wire()

    async def close(self) -> None:
        """Hang up."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._up.set()  # whoever waits is told that it is closed

    def wire(self) -> Wire:
        """The connection; QueueAway where there is none that may be used."""
        if self._closed:
            raise QueueFailed("the job queue is closed")
        if self._wire is None:
            raise QueueAway(self._why)
        return self._wire

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """Only `close` may end it; anything else is a bug that must not pass in silence."""
        if not task.cancelled():
            self._why = "a fault of the gateway"
            self._log.critical("job queue: it is not connected any more", exc_info=task.exception())

    # -- the connection --------------------------------------------------------------------------

    async def _keep(self) -> None:
        failures = 0
        while True:
            began = asyncio.get_running_loop().time()
            try:
                await self._once()
            except (*FAILURES, QueueFailed) as error:
                self._why = told(error)
            held = asyncio.get_running_loop().time() - began > _AGAIN.most_s
            failures = 1 if held else failures + 1
            wait_s = _AGAIN.wait_s(failures, 1.0)
            self._log.error("job queue: no connection: %s; again in %.1f s", self._why, wait_s)
            await asyncio.sleep(wait_s)

    async def _once(self) -> None:
        """One connection, from its making to its end."""
        ended = asyncio.Event()

        async def closed() -> None:
            ended.set()

        async def failed(error: Exception) -> None:
            self._why = told(error)

        client = await self._connected(closed, failed)
        wire = Wire(client, self._settings.answer_s)
        self._why = "the connection was lost"

        def usable() -> None:
            self._wire = wire
            self._up.set()

        session = asyncio.ensure_future(self._session(wire, usable))
        ending = asyncio.ensure_future(_until_closed(client, ended))
        try:
            await asyncio.wait((session, ending), return_when=asyncio.FIRST_COMPLETED)
            if session.done():
                await session
        finally:
            self._wire = None
            self._up.clear()
            wire.lost()
            session.cancel()
            ending.cancel()
            await asyncio.gather(session, ending, return_exceptions=True)
            await _hang_up(client)

    async def _connected(
        self, closed: Callable[[], Awaitable[None]], failed: Callable[[Exception], Awaitable[None]]
    ) -> Client:
        settings = self._settings
        secret = await asyncio.to_thread(_secret, settings)
        client = Client()
        try:
            async with asyncio.timeout(settings.connect_s * len(settings.servers)):
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
            await _hang_up(client)
            raise
        return client


async def _until_closed(client: Client, told: asyncio.Event) -> None:
    """The client tells when it is closed, unless closing fails: then one has to look."""
    while not client.is_closed:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await told.wait()
                return


async def _hang_up(client: Client) -> None:
    with suppress(*FAILURES):
        async with asyncio.timeout(_HANG_UP_S):
            await client.close()


def _secret(settings: JetStreamSettings) -> str | None:
    """Read for every connection: it may have been changed."""
    return Path(settings.password_file).read_text().strip() if settings.password_file else None


def _tls(settings: JetStreamSettings) -> ssl.SSLContext | None:
    if not (settings.ca_file or any(one.startswith("tls://") for one in settings.servers)):
        return None
    context = ssl.create_default_context(cafile=settings.ca_file or None)
    if settings.cert_file:
        context.load_cert_chain(settings.cert_file, settings.key_file)
    return context
