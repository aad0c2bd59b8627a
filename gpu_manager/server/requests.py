"""HELLO, and the handlers of the requests that clients send after it, one for each role."""

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from gpu_manager.credentials import ADMINISTRATOR, FunctionCredentials, FunctionIdentity
from gpu_manager.errors import ClientNotAllowed
from gpu_manager.node.node import GpuNode
from gpu_manager.runtimes.runtime import Preparation
from gpu_manager.server.connection_limits import ConnectionLimits
from gpu_manager.sessions import request_fields as read
from gpu_manager.sessions.acquiring import Acquiring
from gpu_manager.sessions.administration import NodeAdministration
from gpu_manager.sessions.data_requests import DataRequests, NodeData
from gpu_manager.sessions.request_fields import Fields
from gpu_manager.sessions.sessions import ClientSession, ClientSessions
from gpu_manager.sessions.weight_requests import Library, WeightRequests
from torch_shim.errors import BadFrame
from torch_shim.wire.frame_socket import Frame
from torch_shim.wire.protocol import MAX_PIECE_BYTES, FrameKind


@dataclass(slots=True)
class ClientAnswer:
    """The fields of an answer, with descriptors and sockets that are closed after sending."""

    fields: dict[str, Any]
    copies: Sequence[int] = ()
    ends: Sequence[socket.socket] = field(default=())
    body: bytes | None = None  # a piece of data: then the frame is CONTENT

    @property
    def descriptors(self) -> list[int]:
        return [*self.copies, *(end.fileno() for end in self.ends)]

    def close(self) -> None:
        for copy in self.copies:
            os.close(copy)
        for end in self.ends:
            end.close()


class Handler(Protocol):
    """Answers the requests of one connection."""

    @property
    def most_body_bytes(self) -> int:
        """The size of the body that the next frame may have."""

    def waits(self, frame: Frame) -> bool:
        """Whether a request may wait, so that it is answered concurrently with others."""

    async def handle(self, frame: Frame) -> ClientAnswer | None:
        """Handle a request; return None if it has no answer."""

    def close(self) -> None:
        """Release the handler's state after the connection is closed."""


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
    """Handles the requests of a function process, for weights and GPU time."""

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

    def waits(self, frame: Frame) -> bool:
        """Whether a request hashes weights, or waits for a lease or for room.

        Pieces keep order, and follow the answer to the request that announced them.
        """
        whole = frame.kind is FrameKind.UPLOAD and bool(frame.descriptors)
        puts = frame.kind is FrameKind.PUT and self._local
        about = frame.kind in _OF_ONE and self._data.waits(read.request(frame.meta)[1])
        return whole or puts or about or frame.kind in _WAITING

    async def handle(self, frame: Frame) -> ClientAnswer | None:
        _, fields = read.request(frame.meta)
        if frame.kind in _ABOUT_DATA:
            return await self._about_data(frame, fields)
        return await self._about_models(frame, fields)

    async def _about_models(self, frame: Frame, fields: Fields) -> ClientAnswer | None:
        if frame.kind is FrameKind.ACQUIRE:
            answer, ends = await self._acquiring.acquire(self._session, fields, local=self._local)
            return ClientAnswer(answer, ends=ends)
        if frame.kind is FrameKind.PROVE:
            answer, copies = await self._weights.prove(fields, local=self._local)
            return ClientAnswer(answer, copies)
        if frame.kind is FrameKind.OFFER:
            return ClientAnswer(self._weights.offer(fields))
        if frame.kind is FrameKind.UPLOAD:
            return ClientAnswer(await self._weights.upload(frame, fields))
        if frame.kind is FrameKind.CHUNK:
            return ClientAnswer(await self._weights.chunk(frame, fields))
        if frame.kind is FrameKind.WHERE:
            return ClientAnswer(self._acquiring.locate(self._session, fields))
        if frame.kind is FrameKind.PING:
            return ClientAnswer({})
        if frame.kind is FrameKind.RELEASE:
            self._acquiring.release(self._session, fields)
        elif frame.kind is FrameKind.CLAIMED:
            self._acquiring.claimed(self._session, fields)
        elif frame.kind is FrameKind.FORGET:
            self._weights.forget(fields)
        else:
            raise BadFrame(f"{frame.kind.name} is not a request of a shim")
        return None

    async def _about_data(self, frame: Frame, fields: Fields) -> ClientAnswer | None:
        data = self._data
        if frame.kind is FrameKind.PUT:
            answer, copies = await data.put(fields)
            return ClientAnswer(answer, copies)
        if frame.kind is FrameKind.GET:
            answer, copies, body = await data.get(fields)
            return ClientAnswer(answer, copies, body=body)
        if frame.kind is FrameKind.PIECE:
            return ClientAnswer(await data.piece(frame, fields))
        if frame.kind is FrameKind.DISCARD:
            await data.drop(fields)
        else:
            data.give_back(fields)
        return None

    def close(self) -> None:
        self._weights.close()
        self._data.close()


_WAITING = {FrameKind.PROVE, FrameKind.ACQUIRE}
_OF_ONE = {FrameKind.GET, FrameKind.DISCARD}  # piece of data
_ABOUT_DATA = {
    FrameKind.PUT,
    FrameKind.GET,
    FrameKind.PIECE,
    FrameKind.DISCARD,
    FrameKind.RETURN,
}


class AdminRequests:
    """Handles the requests of an administrator."""

    def __init__(self, services: Services) -> None:
        self._administration = services.administration

    @property
    def most_body_bytes(self) -> int:
        """None: administrators send no bodies."""
        return 0

    def waits(self, frame: Frame) -> bool:
        return frame.kind is FrameKind.ADMIN

    async def handle(self, frame: Frame) -> ClientAnswer | None:
        if frame.kind is not FrameKind.ADMIN:
            raise BadFrame(f"{frame.kind.name} is not a request of an administrator")
        _, fields = read.request(frame.meta)
        return ClientAnswer(await self._administration.answer(fields))

    def close(self) -> None:
        """Do nothing: the handler has no state."""


_PEER = struct.Struct("3i")  # process, user, group
_SESSION_CHARACTERS = 64


class ClientRole(StrEnum):
    """The purpose of a connection."""

    SHIM = "shim"
    ADMIN = "admin"
    CHANNEL = "channel"


@dataclass(frozen=True, slots=True)
class AdmittedClient:
    """A client that was admitted; `worker` names the hosted model of a data channel."""

    identity: FunctionIdentity
    role: ClientRole
    session: str
    worker: str


def admit(
    fields: Fields, credentials: FunctionCredentials, connection: socket.socket
) -> AdmittedClient:
    """Admit a client; raise ClientNotAllowed, or BadFrame for an invalid HELLO."""
    role = _role(read.text(fields, "role"))
    identity = credentials.identify(read.text(fields, "credential"))
    if role is ClientRole.ADMIN:
        if identity != ADMINISTRATOR and not _same_user(connection):
            raise ClientNotAllowed("administration needs a credential or the manager's own user")
        identity = ADMINISTRATOR
    if identity is None:
        raise ClientNotAllowed("this manager did not issue that credential")
    session = read.text(fields, "session")
    if not 0 < len(session) <= _SESSION_CHARACTERS:
        raise BadFrame(f"the session's name must have 1 to {_SESSION_CHARACTERS} characters")
    worker = read.text(fields, "worker") if role is ClientRole.CHANNEL else ""
    return AdmittedClient(identity, role, session, worker)


def _role(name: str) -> ClientRole:
    try:
        return ClientRole(name)
    except ValueError as error:
        raise BadFrame(f"unknown role {name!r}") from error


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


def handler_for(
    role: ClientRole, session: ClientSession, services: Services, *, local: bool
) -> Handler:
    if role is ClientRole.ADMIN:
        return AdminRequests(services)
    return ShimRequests(session, services, local=local)
