"""One connection to the manager: HELLO, then requests or a relayed data channel."""

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
from gpu_manager.server.greeting import AdmittedClient, ClientRole, admit, welcome
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
    """Serves one client until either side closes; invalid input affects only this client."""

    def __init__(self, client: socket.socket, services: Services) -> None:
        self._services = services
        self._stream = FrameStream(client, MAX_HELLO_BYTES, 0)
        self._tasks = BackgroundTasks(log, "a request", self._failed)
        self._peer = "an unidentified client"

    async def serve(self) -> None:
        """Serve the connection from HELLO until its end."""
        try:
            async with asyncio.timeout(self._services.hello_s):
                client, hosted = await self._hello()
            if hosted is not None:
                await self._relay(client, hosted)
            else:
                await self._serve_requests(client)
        except BadFrame as error:
            log.warning("closed the connection of %s: %s", self._peer, error)
        except ClientNotAllowed as error:
            log.warning("rejected a client: %s", error)
        except TimeoutError:
            log.warning("closed a connection that sent no HELLO in time")
        except ConnectionLost as error:
            log.debug("the connection of %s: %s", self._peer, error)
        finally:
            self._tasks.cancel()
            self._stream.close()

    def lease_ended(self, lease: LeaseId) -> None:
        """Notify the client of a lease's end; a lost notification does no harm."""
        self._tasks.start(self._notify_lease_ended(lease))

    # -- HELLO ----------------------------------------------------------------------------------

    async def _hello(self) -> tuple[AdmittedClient, HostedModel | None]:
        """Return the client, and the model of a data channel; raise ClientNotAllowed."""
        frame = await self._stream.read()
        _close(frame)
        if frame.kind is not FrameKind.HELLO:
            raise BadFrame(f"{frame.kind.name} before HELLO")
        number, fields = read.request(frame.meta)
        try:
            client = admit(fields, self._services.credentials, self._stream.socket)
            hosted = self._worker(client) if client.role is ClientRole.CHANNEL else None
        except (ClientNotAllowed, NoWorker, UnknownVersion) as error:
            await self._refuse(number, refusal(error))
            raise ClientNotAllowed(str(error)) from error
        self._peer = f"{client.identity} (session {client.session})"
        self._number = number
        return client, hosted

    def _worker(self, client: AdmittedClient) -> HostedModel:
        """Return the worker of a data channel; raise ClientNotAllowed if it is not permitted."""
        hosted = self._services.node.hosted(HostedId(client.worker))
        tenant, digest = hosted.order.tenant, hosted.order.digest
        store = self._services.library.store
        if tenant != client.identity.tenant or not store.allowed(str(client.identity), digest):
            raise ClientNotAllowed(f"{client.identity} may not use worker {client.worker}")
        return hosted

    async def _relay(self, client: AdmittedClient, hosted: HostedModel) -> None:
        """Relay bytes until either side closes; the worker checks the frames."""
        ours, workers = socket.socketpair()
        with ours:
            ours.setblocking(False)
            key = session_key(client.identity, client.session)
            hosted.channel(key, client.identity.function, workers)
            await self._stream.send(FrameKind.ANSWER, [self._number, {}])
            await relay(self._stream.socket, ours)

    # -- requests -------------------------------------------------------------------------------

    async def _serve_requests(self, client: AdmittedClient) -> None:
        session = self._services.sessions.join(client.identity, client.session, self)
        handler = handler_for(client.role, session, self._services, local=self._stream.local)
        try:
            hello = welcome(self._services.node, session, local=self._stream.local)
            await self._stream.send(FrameKind.ANSWER, [self._number, hello])
            self._stream.set_limits(_MOST_META_BYTES, _MOST_BODY_BYTES)
            room = asyncio.Semaphore(_MOST_AT_ONCE)
            while True:
                await self._handle(await self._stream.read(), handler, room)
        finally:
            handler.close()
            self._services.sessions.leave(session, self)

    async def _handle(self, frame: Frame, handler: Handler, room: asyncio.Semaphore) -> None:
        """Answer a request: in order if it cannot wait, else concurrently in a task."""
        try:
            number, _ = read.request(frame.meta)
            waits = handler.waits(frame)
        except BadFrame:
            _close(frame)
            raise
        if not waits:
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

    async def _notify_lease_ended(self, lease: LeaseId) -> None:
        await self._stream.send(FrameKind.LEASE_ENDED, [0, {"lease": lease}])

    # -- tasks ----------------------------------------------------------------------------------

    def _failed(self, error: BaseException) -> None:
        """Close the connection, because a request could not be answered."""
        if isinstance(error, BadFrame):
            log.warning("closed the connection of %s: %s", self._peer, error)
        elif not isinstance(error, ConnectionLost):
            log.error("a request of %s failed", self._peer, exc_info=error)
        self._stream.close()


def _close(frame: Frame) -> None:
    for descriptor in frame.descriptors:
        os.close(descriptor)
