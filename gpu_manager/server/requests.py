"""HELLO, and the handlers of the requests that clients send after it, one for each role."""

import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from cache_manager.model.ids import NodeId
from common.telemetry.metrics import MetricFamily
from gpu_manager.credentials import ADMINISTRATOR, FunctionCredentials, FunctionIdentity
from gpu_manager.devices.gpu_device import GpuDevice
from gpu_manager.devices.paths import DiskPath, GpuPaths
from gpu_manager.errors import ClientNotAllowed
from gpu_manager.node.node import GpuNode
from gpu_manager.node.settings import NodeSettings
from gpu_manager.runtimes.runtime import NodeFeature, Preparation
from gpu_manager.server.connection_limits import ConnectionLimits
from gpu_manager.sessions.acquiring import Acquiring
from gpu_manager.sessions.administration import NodeAdministration
from gpu_manager.sessions.sessions import ClientSession, ClientSessions
from gpu_manager.sessions.weight_requests import Library, WeightRequests
from torch_shim.errors import BadFrame
from torch_shim.wire.messages import Hello
from torch_shim.wire.protocol import MAX_PIECE_BYTES, REQUESTS, Frame, FrameKind


@dataclass(slots=True)
class ClientAnswer:
    """The fields of an answer, with descriptors that are closed after sending."""

    fields: dict[str, Any]
    descriptors: Sequence[int] = ()
    body: bytes | None = None  # a piece of data: then the frame is CONTENT

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


class ManagerSpace(NamedTuple):
    """What a feature gets of its manager: how many descriptors there are, where other nodes are."""

    settings: NodeSettings
    descriptors: int
    locate: Callable[[NodeId], Awaitable[tuple[str, ...]]]  # a node's addresses; none if unknown


class FeatureRequests:
    """A feature's part of one connection of a function. Here it has none."""

    # By the kind of a request; a handler answers it, or nothing if the client expects no answer.
    handlers: Mapping[FrameKind, Callable[[Frame, Any], Awaitable[ClientAnswer | None]]] = {}

    def is_arriving(self) -> bool:
        """Whether pieces of something are to come."""
        return False

    def waits(self, kind: FrameKind, fields: Any) -> bool:  # noqa: ARG002 - none does
        """Whether a request may wait for something: others go on then."""
        return False

    def close(self) -> None:
        """Handle the end of the connection."""


class ManagerFeature(NodeFeature):
    """What a manager does beside hosting models; `daemon.py` names the features."""

    def __init__(self, manager: ManagerSpace) -> None:
        self.manager = manager

    def requests(self, session: ClientSession, node: GpuNode, *, local: bool) -> FeatureRequests:
        """Return what serves one connection of a session, whose client may be `local`."""
        del session, node, local
        return FeatureRequests()

    def end_session(self, session: ClientSession) -> None:
        """Handle the end of a session."""

    def paths(self, device: GpuDevice) -> GpuPaths | None:  # noqa: ARG002 - it has none
        """Return what bytes pass between the host and this GPU."""
        return None

    def disk(self) -> DiskPath | None:
        """Return what weights pass on their way from disk."""
        return None

    def families(self) -> Iterator[MetricFamily]:
        """Yield the feature's metrics as they are now."""
        yield from ()

    async def close(self) -> None:
        """Handle the manager's end."""


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
    features: Sequence[ManagerFeature]
    hello_s: float


class ShimRequests:
    """Answers the requests of one connection of a function process, for weights and GPU time."""

    def __init__(self, session: ClientSession, services: Services, *, local: bool) -> None:
        self._session = session
        self._acquiring = services.acquiring
        self._weights = WeightRequests(services.library, session)
        self._features = [
            feature.requests(session, services.node, local=local) for feature in services.features
        ]
        self._local = local

    @property
    def most_body_bytes(self) -> int:
        """The largest body of a frame now: one piece during an upload, otherwise none."""
        arrives = self._weights.arriving or any(each.is_arriving() for each in self._features)
        return MAX_PIECE_BYTES if arrives else 0

    def waits(self, frame: Frame, fields: Any) -> bool:
        """Whether a request hashes weights, or waits for a lease or for room: others go on then.

        Pieces keep order, and follow the answer to the request that announced them.
        """
        match frame.kind:
            case FrameKind.PROVE | FrameKind.ACQUIRE:
                return True
            case FrameKind.UPLOAD:
                return bool(frame.descriptors)
            case _:
                return any(feature.waits(frame.kind, fields) for feature in self._features)

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
                self._acquiring.forget_elsewhere(session, fields)
            case FrameKind.FORGET:
                self._weights.forget(fields.digest)
            case FrameKind.OFFER | FrameKind.PROVE | FrameKind.UPLOAD | FrameKind.CHUNK:
                return ClientAnswer(*await self._handle_weights(frame, fields))
            case _:
                return await self._handle_by_feature(frame, fields)
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

    async def _handle_by_feature(self, frame: Frame, fields: Any) -> ClientAnswer | None:
        for feature in self._features:
            handle = feature.handlers.get(frame.kind)
            if handle is not None:
                return await handle(frame, fields)
        raise BadFrame(f"{frame.kind.name} is not a request of a shim")

    def close(self) -> None:
        self._weights.close()
        for feature in self._features:
            feature.close()


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
