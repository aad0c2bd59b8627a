"""Sessions: function processes (or administrators) and the connections that each has open."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from gpu_manager.credentials import FunctionIdentity
from gpu_manager.node.leases_in_force import SessionKey
from scheduler.api import LeaseId
from torch_shim.wire.image_digests import new_nonce


class Listening(Protocol):
    """A connection to which something can be said unasked."""

    def lease_ended(self, lease: LeaseId) -> None:
        """A lease of this session has ended."""
        ...


@dataclass(slots=True)
class ClientSession:
    """One process of one function; the key is unique, whatever the process calls itself."""

    key: SessionKey
    identity: FunctionIdentity
    nonce: str = field(default_factory=new_nonce)
    connections: list[Listening] = field(default_factory=list)


class ClientSessions:
    """Every session from its first connection to the end of its last one."""

    def __init__(self, ended: Callable[[ClientSession], None]) -> None:
        self._ended = ended
        self._sessions: dict[SessionKey, ClientSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def join(self, identity: FunctionIdentity, name: str, connection: Listening) -> ClientSession:
        """One more connection of the session that this function calls by this name."""
        key = session_key(identity, name)
        session = self._sessions.setdefault(key, ClientSession(key, identity))
        session.connections.append(connection)
        return session

    def leave(self, session: ClientSession, connection: Listening) -> None:
        """A connection is closed; with the last one the session ends."""
        session.connections.remove(connection)
        if not session.connections:
            del self._sessions[session.key]
            self._ended(session)

    def lease_ended(self, key: SessionKey, lease: LeaseId) -> None:
        """Tell a session that a lease of its own has ended."""
        session = self._sessions.get(key)
        if session is not None:
            for connection in list(session.connections):
                connection.lease_ended(lease)


def session_key(identity: FunctionIdentity, name: str) -> SessionKey:
    """The key of the session that a function calls by this name."""
    return SessionKey(f"{identity}/{name}")


def fresh_request_id(key: SessionKey) -> str:
    """An id for a request that came without one."""
    return f"{key}/{secrets.token_hex(8)}"
