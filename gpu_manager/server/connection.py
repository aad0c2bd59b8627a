"""One connection to the manager: HELLO, then requests or a relayed data channel."""

import asyncio
import logging
import socket
from contextlib import ExitStack, suppress
from typing import Any

from common.tasks import BackgroundTasks, until_first
from common.time_limits import time_limit
from gpu_manager import errors
from gpu_manager.credentials import FunctionIdentity
from gpu_manager.errors import ClientNotAllowed, NoWorker
from gpu_manager.frame_stream import FrameStream
from gpu_manager.node.leases import SessionKey
from gpu_manager.runtimes.runtime import HostedId, HostedModel
from gpu_manager.server.connection_limits import ConnectionPlace
from gpu_manager.server.requests import (
    AdminRequests,
    Services,
    ShimRequests,
    admit,
    read_request,
    welcome,
)
from gpu_manager.sessions.sessions import session_key
from scheduler import api as scheduling
from scheduler.api import LeaseId
from torch_shim.errors import BadFrame, ConnectionLost, OtherVersion
from torch_shim.wire.messages import Hello
from torch_shim.wire.protocol import MAX_HELLO_BYTES, MAX_META_BYTES, FailureKind, Frame, FrameKind

log = logging.getLogger(__name__)

_MOST_AT_ONCE = 64
_MOST_TASKS = 4 * _MOST_AT_ONCE
# Requests with a descriptor that are handled at once, and the descriptors of one frame: others'
# open files count against this process's limit.
_MOST_WITH_DESCRIPTORS = 2
_LOOK_S = 0.5
_MOST_DESCRIPTORS = 1


# The first matching class counts, so subclasses precede their bases.
_FAILURES: tuple[tuple[type[Exception], FailureKind], ...] = (
    (errors.ClientNotAllowed, FailureKind.NOT_ALLOWED),
    (OtherVersion, FailureKind.UNKNOWN_VERSION),
    (errors.UnknownImage, FailureKind.UNKNOWN_MODEL),
    (errors.WeightStoreError, FailureKind.WEIGHTS),
    (errors.NoSuchData, FailureKind.NO_DATA),
    (errors.DataError, FailureKind.NO_ROOM),
    (errors.LoadFailure, FailureKind.LOST),
    (errors.NoWorker, FailureKind.LOST),
    (errors.LeaseOver, FailureKind.LEASE),
    (errors.PlacedElsewhere, FailureKind.LOST),
    (errors.NoScheduler, FailureKind.LOST),
    (scheduling.ModelsTooLarge, FailureKind.TOO_LARGE),
    (scheduling.QueueFull, FailureKind.QUEUE_FULL),
    (scheduling.OverQuota, FailureKind.OVER_QUOTA),
    (scheduling.RequestExpired, FailureKind.EXPIRED),
    (scheduling.RequestWithdrawn, FailureKind.CANCELLED),
    (scheduling.RequestEnded, FailureKind.LOST),
    (scheduling.EventRefused, FailureKind.NOT_ALLOWED),
)
_FACTS = ("digest", "model", "node", "needed_bytes", "largest_bytes", "limit_bytes", "waiting")

_Handler = ShimRequests | AdminRequests

# Errors of a request that do not indicate a bug in the manager.
Expected = errors.GpuManagerError, scheduling.SchedulerError


def refusal(error: Exception) -> tuple[FailureKind, str, dict[str, Any]]:
    """Return the fields of a REFUSED frame."""
    failure = next(
        (found for kind, found in _FAILURES if isinstance(error, kind)), FailureKind.INTERNAL
    )
    if isinstance(error, errors.LoadFailure) and error.out_of_memory:
        failure = FailureKind.OUT_OF_MEMORY
    facts = {name: getattr(error, name) for name in _FACTS if hasattr(error, name)}
    return failure, str(error), facts


class ClientConnection:
    """Serves one client until either side closes; invalid input affects only this client."""

    def __init__(self, client: socket.socket, services: Services, place: ConnectionPlace) -> None:
        """`place` counts the connection, from now on as one of its tenant."""
        self._services = services
        self._strangers = services.limits.strangers
        self._place = place
        self._stream = FrameStream(client, MAX_HELLO_BYTES, 0, _MOST_DESCRIPTORS)
        self._room = asyncio.Semaphore(_MOST_AT_ONCE)
        self._descriptor_room = asyncio.Semaphore(_MOST_WITH_DESCRIPTORS)
        self._tasks = BackgroundTasks(log, "a request")
        self._peer = "an unidentified client"

    async def serve(self) -> None:
        try:
            async with time_limit(self._services.hello_s):
                identity, hello, hosted = await self._hello()
            if hosted is not None:
                await self._relay(session_key(identity, hello.session), str(identity), hosted)
            else:
                await self._serve_requests(identity, hello)
        except BadFrame as error:
            self._strangers.warn("closed the connection of %s: %s", self._peer, error)
        except ClientNotAllowed as error:
            self._strangers.warn("rejected a client: %s", error)
        except TimeoutError:
            self._strangers.warn("closed a connection that sent no HELLO in time")
        except ConnectionLost as error:
            log.debug("the connection of %s: %s", self._peer, error)
        finally:
            self._tasks.cancel()
            self._stream.close()

    # -- HELLO ----------------------------------------------------------------------------------

    async def _hello(self) -> tuple[FunctionIdentity, Hello, HostedModel | None]:
        """Return who it is and the model of a data channel; raise ClientNotAllowed."""
        try:
            frame = await self._stream.read()
        except OtherVersion as error:
            await self._refuse(0, error)
            raise ClientNotAllowed(str(error)) from error
        frame.close_descriptors()
        if frame.kind is not FrameKind.HELLO:
            raise BadFrame(f"{frame.kind.name} before HELLO")
        number, hello = read_request(frame)
        try:
            identity = admit(hello, self._services.credentials, self._stream.socket)
            self._services.limits.identified(self._place, identity.tenant)
            hosted = self._worker(identity, hello) if hello.role == "channel" else None
        except (ClientNotAllowed, NoWorker) as error:
            await self._refuse(number, error)
            raise ClientNotAllowed(str(error)) from error
        self._peer = f"{identity} (session {hello.session})"
        self._number = number
        return identity, hello, hosted

    def _worker(self, identity: FunctionIdentity, hello: Hello) -> HostedModel:
        """Return the worker of a data channel; raise ClientNotAllowed if it is not permitted."""
        hosted = self._services.node.hosted(HostedId(hello.worker))
        tenant, digest = hosted.order.tenant, hosted.order.digest
        store = self._services.library.store
        if tenant != identity.tenant or not store.allowed(str(identity), digest):
            raise ClientNotAllowed(f"{identity} may not use worker {hosted.id}")
        return hosted

    async def _relay(self, session: SessionKey, function: str, hosted: HostedModel) -> None:
        """Relay bytes until either side closes; the worker checks the frames."""
        ours, workers = socket.socketpair()
        with ours:
            ours.setblocking(False)
            hosted.channel(session, function, workers)
            await self._stream.send(FrameKind.ANSWER, [self._number, {}])
            client = self._stream.socket
            await until_first(_copy(client, ours), _copy(ours, client))

    # -- requests -------------------------------------------------------------------------------

    async def _serve_requests(self, identity: FunctionIdentity, hello: Hello) -> None:
        services, local = self._services, self._stream.local
        session = services.sessions.join(identity, hello.session, self._lease_ended)
        handler: _Handler
        if hello.role == "admin":
            handler = AdminRequests(services)
        else:
            services.preparation.need()
            handler = ShimRequests(session, services, local=local)
        try:
            answer = welcome(services.node, session, local=local)
            await self._stream.send(FrameKind.ANSWER, [self._number, answer])
            while True:
                self._stream.set_limits(MAX_META_BYTES, handler.most_body_bytes)
                await self._handle(await self._stream.read(), handler)
        finally:
            handler.close()
            services.sessions.leave(session, self._lease_ended)

    async def _handle(self, frame: Frame, handler: _Handler) -> None:
        """Answer a request: in order if it cannot wait, else concurrently in a task."""
        with ExitStack() as held:
            held.callback(frame.close_descriptors)
            number, fields = read_request(frame)
            if not handler.waits(frame, fields):
                await self._answer(frame, number, fields, handler)
                return
            for room in (self._room, self._descriptor_room)[: 2 if frame.descriptors else 1]:
                await self._enter(room)
                held.callback(room.release)
            task = self._tasks.start(
                self._answer(frame, number, fields, handler), failed=self._failed
            )
            of_task = held.pop_all()
            task.add_done_callback(lambda _: of_task.close())

    async def _enter(self, room: asyncio.Semaphore) -> None:
        """Wait for room; nothing is read meanwhile, so the client's end has to be looked for."""
        while True:
            try:
                async with time_limit(_LOOK_S):
                    await room.acquire()
                    return
            except TimeoutError:
                if self._stream.hung_up():
                    raise ConnectionLost("closed while its requests waited") from None

    async def _answer(self, frame: Frame, number: int, fields: Any, handler: _Handler) -> None:
        try:
            answer = await handler.handle(frame, fields)
        except Expected as error:
            await self._refuse(number, error)
            return
        if answer is None:
            return
        try:
            meta, body = [number, answer.fields], answer.body
            if body is not None:
                await self._stream.send(FrameKind.CONTENT, meta, (body,))
            else:
                await self._stream.send(FrameKind.ANSWER, meta, (), answer.descriptors)
        finally:
            answer.close()

    async def _refuse(self, number: int, error: Exception) -> None:
        await self._stream.send(FrameKind.REFUSED, [number, *refusal(error)])

    def _lease_ended(self, lease: LeaseId) -> None:
        """Notify the client of a lease's end; a lost notification does no harm."""
        if len(self._tasks) < _MOST_TASKS:  # else the client does not read
            notice = self._stream.send(FrameKind.LEASE_ENDED, [0, {"lease": lease}])
            self._tasks.start(notice, failed=self._failed)

    # -- tasks ----------------------------------------------------------------------------------

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, BadFrame):
            self._strangers.warn("closed the connection of %s: %s", self._peer, error)
        elif not isinstance(error, ConnectionLost):
            log.error("a request of %s failed", self._peer, exc_info=error)
        self._stream.close()


_PIECE_BYTES = 1 << 20


async def _copy(source: socket.socket, sink: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    room = memoryview(bytearray(_PIECE_BYTES))
    with suppress(OSError):  # the side has closed, which ends the channel
        while count := await loop.sock_recv_into(source, room):
            await loop.sock_sendall(sink, room[:count])
