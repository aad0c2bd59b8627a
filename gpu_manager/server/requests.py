"""HELLO, and the handlers of the requests that clients send after it, one for each role."""

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gpu_manager.credentials import ADMINISTRATOR, FunctionCredentials, FunctionIdentity
from gpu_manager.errors import ClientNotAllowed
from gpu_manager.node.node import GpuNode
from gpu_manager.runtimes.runtime import Preparation
from gpu_manager.server.connection_limits import ConnectionLimits
from gpu_manager.sessions.acquiring import Acquiring
from gpu_manager.sessions.administration import NodeAdministration
from gpu_manager.sessions.data_requests import DataRequests, NodeData
from gpu_manager.sessions.sessions import ClientSession, ClientSessions
from gpu_manager.sessions.weight_requests import Library, WeightRequests
from torch_shim.errors import BadFrame
from torch_shim.wire.frame_socket import Frame
from torch_shim.wire.messages import Hello
from torch_shim.wire.protocol import MAX_PIECE_BYTES, REQUESTS, FrameKind


@dataclass(slots=True)
class ClientAnswer:
    """The fields of an answer, with descriptors that are closed after sending."""

    fields: dict[str, Any]
    descriptors: Sequence[int] = ()
    body: bytes | None = None  # a piece of data: then the frame is CONTENT

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Services:
    """The services of one manager; a new connection has `hello_s` to send HELLO."""

    node: GpuNode
    credentials: FunctionCredentials
    sessions: ClientSessions
    library: Library
    acquiring: Acquiring
    administration: NodeAdministration
    limits: ConnectionLimits
    preparation: Preparation
    data: NodeData
    hello_s: float


class ShimRequests:
    """Answers the requests of one connection of a function process, for weights and GPU time."""

    def __init__(self, session: ClientSession, services: Services, *, local: bool) -> None:
        self._session = session
        self._acquiring = services.acquiring
        self._weights = WeightRequests(services.library, session)
        self._data = DataRequests(services.data, session, local=local)
        self._local = local

    @property
    def most_body_bytes(self) -> int:
        """The largest body of a frame now: one piece during an upload, otherwise none."""
        return MAX_PIECE_BYTES if self._weights.arriving or self._data.arriving else 0

    def waits(self, frame: Frame, fields: Any) -> bool:
        """Whether a request hashes weights, or waits for a lease or for room: others go on then.

        Pieces keep order, and follow the answer to the request that announced them.
        """
        match frame.kind:
            case FrameKind.PROVE | FrameKind.ACQUIRE:
                return True
            case FrameKind.UPLOAD:
                return bool(frame.descriptors)
            case FrameKind.PUT:
                return self._local
            case FrameKind.GET:
                return self._data.waits(fields.handle, here=fields.here)
            case FrameKind.DISCARD:
                return self._data.waits(fields.handle)
            case _:
                return False

    async def handle(self, frame: Frame, fields: Any) -> ClientAnswer | None:
        session, local = self._session, self._local
        match frame.kind:
            case FrameKind.ACQUIRE:
                return ClientAnswer(*await self._acquiring.acquire(session, fields, local=local))
            case FrameKind.WHERE:
                return ClientAnswer(self._acquiring.locate(session, fields.token))
            case FrameKind.PING:
                return ClientAnswer({})
            case FrameKind.RELEASE:
                self._acquiring.release(session, fields)
            case FrameKind.CLAIMED:
                self._acquiring.claimed(session, fields)
            case FrameKind.FORGET:
                self._weights.forget(fields.digest)
            case FrameKind.OFFER | FrameKind.PROVE | FrameKind.UPLOAD | FrameKind.CHUNK:
                return ClientAnswer(*await self._handle_weights(frame, fields))
            case _:
                return await self._handle_data(frame, fields)
        return None

    async def _handle_weights(
        self, frame: Frame, fields: Any
    ) -> tuple[dict[str, Any], tuple[int, ...]]:
        match frame.kind:
            case FrameKind.OFFER:
                return self._weights.offer(fields.digest), ()
            case FrameKind.PROVE:
                return await self._weights.prove(fields, local=self._local)
            case FrameKind.UPLOAD:
                return await self._weights.upload(frame, fields), ()
            case _:
                return await self._weights.chunk(frame, fields), ()

    async def _handle_data(self, frame: Frame, fields: Any) -> ClientAnswer | None:
        match frame.kind:
            case FrameKind.PUT:
                return ClientAnswer(*await self._data.put(fields))
            case FrameKind.GET:
                return ClientAnswer(*await self._data.get(fields))
            case FrameKind.PIECE:
                return ClientAnswer(await self._data.piece(frame, fields))
            case FrameKind.DISCARD:
                await self._data.drop(fields.handle)
            case FrameKind.RETURN:
                self._data.give_back(fields.handle)
            case _:
                raise BadFrame(f"{frame.kind.name} is not a request of a shim")
        return None

    def close(self) -> None:
        self._weights.close()
        self._data.close()


class AdminRequests:
    """Answers the requests of one connection of an administrator, as `ShimRequests` does."""

    most_body_bytes = 0

    def __init__(self, services: Services) -> None:
        self._administration = services.administration

    def waits(self, frame: Frame, fields: Any) -> bool:
        del fields
        return frame.kind is FrameKind.ADMIN

    async def handle(self, frame: Frame, fields: Any) -> ClientAnswer | None:
        if frame.kind is not FrameKind.ADMIN:
            raise BadFrame(f"{frame.kind.name} is not a request of an administrator")
        return ClientAnswer(await self._administration.answer(fields))

    def close(self) -> None:
        """Do nothing: the handler has no state."""


_PEER = struct.Struct("3i")  # process, user, group


def read_request(frame: Frame) -> tuple[int, Any]:
    """Return a request's number and fields, whose texts logs and traces can show."""
    if frame.kind not in REQUESTS:
        raise BadFrame(f"{frame.kind.name} is not a request")
    number, fields = frame.meta
    for name, value in msgspec.structs.asdict(fields).items():
        texts = value if isinstance(value, list) else [value]
        if not all(text.isprintable() for text in texts if isinstance(text, str)):
            raise BadFrame(f"{name} is not a printable string")
    return number, fields


def admit(
    hello: Hello, credentials: FunctionCredentials, connection: socket.socket
) -> FunctionIdentity:
    """Return who is admitted with these credentials, or raise ClientNotAllowed."""
    identity = credentials.identify(hello.credential)
    if hello.role == "admin":
        if identity != ADMINISTRATOR and not _same_user(connection):
            raise ClientNotAllowed("administration needs a credential or the manager's own user")
        identity = ADMINISTRATOR
    if identity is None:
        raise ClientNotAllowed("this manager did not issue that credential")
    return identity


def _same_user(connection: socket.socket) -> bool:
    """Whether the peer is a local process of root or of this manager's user."""
    if connection.family != socket.AF_UNIX:
        return False
    peer: bytes = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, user, _ = _PEER.unpack(peer)
    return user in {0, os.getuid()}


def welcome(node: GpuNode, session: ClientSession, *, local: bool) -> dict[str, Any]:
    gpus = [
        {"id": gpu.id, "name": gpu.device.name, "memory_bytes": gpu.device.memory_bytes}
        for gpu in node.gpus.values()
    ]
    return {"node": node.name, "gpus": gpus, "nonce": session.nonce, "local": local}
