"""HELLO: identifies the client of a connection and checks the role that it requests."""

import os
import socket
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gpu_manager.credentials import ADMINISTRATOR, FunctionCredentials, FunctionIdentity
from gpu_manager.errors import ClientNotAllowed
from gpu_manager.node.node import GpuNode
from gpu_manager.sessions.sessions import ClientSession
from gpu_manager.wire import request_fields as read
from gpu_manager.wire.request_fields import Fields
from torch_shim.errors import BadFrame

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
    """Return the fields of the answer to a HELLO."""
    gpus = [
        {"id": gpu.id, "name": gpu.device.name, "memory_bytes": gpu.device.memory_bytes}
        for gpu in node.gpus.values()
    ]
    return {"node": node.name, "gpus": gpus, "nonce": session.nonce, "local": local}
