"""One connection to the manager: HELLO, then requests, or a data channel that is relayed."""

import asyncio
import logging
import os
import socket

from common.tasks import BackgroundTasks
from gpu_manager.errors import ClientNotAllowed, NoWorker, UnknownVersion
from gpu_manager.runtimes.runtime import HostedId, HostedModel
from gpu_manager.server.byte_relay import relay
from gpu_manager.server.client_errors import ClientRefusal, Expected, refusal
from gpu_manager.server.client_requests import Handler, handler_for
from gpu_manager.server.greeting import ClientRole, Guest, greet, welcome
from gpu_manager.server.services import Services
from gpu_manager.sessions.sessions import session_key
from gpu_manager.wire import request_fields as read
from gpu_manager.wire.frame_stream import FrameStream
from scheduler.api import LeaseId
from torch_shim.errors import BadFrame, ConnectionLost
from torch_shim.wire.frame_socket import Frame
from torch_shim.wire.protocol import MAX_HELLO_BYTES, MAX_META_BYTES, FrameKind

log = logging.getLogger(__name__)

# Tables of weights are the largest metadata, pieces of weights the only bodies.
_MOST_META_BYTES = MAX_META_BYTES // 4
_MOST_BODY_BYTES = 64 << 20
_MOST_AT_ONCE = 64


class ClientConnection:
    """Serves one client until either side ends it; whatever it sends, only it is affected."""

    def __init__(self, client: socket.socket, services: Services) -> None:
        self._services = services
        self._stream = FrameStream(client, MAX_HELLO_BYTES, 0)
        self._tasks = BackgroundTasks(log, "a request", self._failed)
        self._peer = "a stranger"

    async def serve(self) -> None:
        """Everything from HELLO to the end."""
        try:
            async with asyncio.timeout(self._services.hello_s):
                guest, hosted = await self._hello()
            if hosted is not None:
                await self._relay(guest, hosted)
            else:
                await self._attend(guest)
        except BadFrame as error:
            log.warning("closed the connection of %s: %s", self._peer, error)
        except ClientNotAllowed as error:
            log.warning("turned a client away: %s", error)
        except TimeoutError:
            log.warning("closed a connection that said no HELLO in time")
        except ConnectionLost as error:
            log.debug("the connection of %s: %s", self._peer, error)
        finally:
            self._tasks.cancel()
            self._stream.close()

    def lease_ended(self, lease: LeaseId) -> None:
        """Tell the client; it is a hint, and lost with the connection."""
        self._tasks.start(self._hint(lease))

    # -- HELLO ----------------------------------------------------------------------------------

    async def _hello(self) -> tuple[Guest, HostedModel | None]:
        """The client, and its model if it wants a data channel; refused ones raise."""
        frame = await self._stream.read()
        _close(frame)
        if frame.kind is not FrameKind.HELLO:
            raise BadFrame(f"{frame.kind.name} before HELLO")
        number, fields = read.request(frame.meta)
        try:
            guest = greet(fields, self._services.credentials, self._stream.socket)
            hosted = self._worker(guest) if guest.role is ClientRole.CHANNEL else None
        except (ClientNotAllowed, NoWorker, UnknownVersion) as error:
            await self._refuse(number, refusal(error))
            raise ClientNotAllowed(str(error)) from error
        self._peer = f"{guest.identity} (session {guest.session})"
        self._number = number
        return guest, hosted

    def _worker(self, guest: Guest) -> HostedModel:
        """The worker to which this client may open a data channel."""
        hosted = self._services.node.hosted(HostedId(guest.worker))
        tenant, digest = hosted.order.tenant, hosted.order.digest
        store = self._services.library.store
        if tenant != guest.identity.tenant or not store.allowed(str(guest.identity), digest):
            raise ClientNotAllowed(f"{guest.identity} has no business with worker {guest.worker}")
        return hosted

    async def _relay(self, guest: Guest, hosted: HostedModel) -> None:
        """Pass bytes on until either side ends it; what they say is the worker's to judge."""
        ours, workers = socket.socketpair()
        with ours:
            ours.setblocking(False)
            key = session_key(guest.identity, guest.session)
            hosted.channel(key, guest.identity.function, workers)
            await self._stream.send(FrameKind.ANSWER, [self._number, {}])
            await relay(self._stream.socket, ours)

    # -- requests -------------------------------------------------------------------------------

    async def _attend(self, guest: Guest) -> None:
        session = self._services.sessions.join(guest.identity, guest.session, self)
        handler = handler_for(guest.role, session, self._services, local=self._stream.local)
        try:
            hello = welcome(self._services.node, session, local=self._stream.local)
            await self._stream.send(FrameKind.ANSWER, [self._number, hello])
            self._stream.set_limits(_MOST_META_BYTES, _MOST_BODY_BYTES)
            room = asyncio.Semaphore(_MOST_AT_ONCE)
            while True:
                await self._take(await self._stream.read(), handler, room)
        finally:
            handler.close()
            self._services.sessions.leave(session, self)

    async def _take(self, frame: Frame, handler: Handler, room: asyncio.Semaphore) -> None:
        """Answer now what must keep its order, and beside the others what may have to wait."""
        try:
            number, _ = read.request(frame.meta)
            work = handler.waits(frame)
        except BadFrame:
            _close(frame)
            raise
        if not work:
            try:
                await self._answer(frame, number, handler)
            finally:
                _close(frame)
            return
        await room.acquire()
        task = self._tasks.start(self._answer(frame, number, handler))
        task.add_done_callback(lambda _: _close(frame))
        task.add_done_callback(lambda _: room.release())

    async def _answer(self, frame: Frame, number: int, handler: Handler) -> None:
        try:
            answer = await handler.handle(frame)
        except Expected as error:
            await self._refuse(number, refusal(error))
            return
        if answer is None:
            return
        try:
            fields = answer.fields
            await self._stream.send(FrameKind.ANSWER, [number, fields], (), answer.descriptors)
        finally:
            answer.close()

    async def _refuse(self, number: int, why: ClientRefusal) -> None:
        await self._stream.send(FrameKind.REFUSED, [number, why.failure, why.message, why.facts])

    async def _hint(self, lease: LeaseId) -> None:
        await self._stream.send(FrameKind.LEASE_ENDED, [0, {"lease": lease}])

    # -- tasks ----------------------------------------------------------------------------------

    def _failed(self, error: BaseException) -> None:
        """A request that could not be answered ends the connection."""
        if isinstance(error, BadFrame):
            log.warning("closed the connection of %s: %s", self._peer, error)
        elif not isinstance(error, ConnectionLost):
            log.error("a request of %s failed", self._peer, exc_info=error)
        self._stream.close()


def _close(frame: Frame) -> None:
    for descriptor in frame.descriptors:
        os.close(descriptor)
