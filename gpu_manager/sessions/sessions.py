"""Sessions: function processes (or administrators) and their open connections."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from cache_manager.model.ids import ModelId
from common.latest import Latest
from gpu_manager.credentials import FunctionIdentity
from gpu_manager.node.leases import SessionKey
from scheduler.api import LeaseId, RequestId
from torch_shim.wire.image_digests import new_nonce

T = TypeVar("T")

# Remembered of a session: questions, and leases elsewhere.
_MOST_QUESTIONS, REMEMBERED = 32, 64


@dataclass(slots=True)
class ClientSession:
    """One process of one function; its key is unique, because it contains the function's name."""

    key: SessionKey
    identity: FunctionIdentity
    nonce: str = field(default_factory=new_nonce)
    # One for each connection: notifies the client of the end of a lease of its session.
    connections: list[Callable[[LeaseId], None]] = field(default_factory=list)
    # Questions for leases that got none in their time: since when each was asked, and its end.
    expired: Latest[tuple[ModelId, ...], tuple[float, float]] = field(
        default_factory=lambda: Latest(_MOST_QUESTIONS)
    )
    # Leases on other nodes that it may not have claimed there, with the request that has each, and
    # the time of the answer.
    elsewhere: Latest[tuple[LeaseId, RequestId], float] = field(
        default_factory=lambda: Latest(REMEMBERED)
    )


class ClientSessions:
    """The sessions, each from its first connection to the end of its last one."""

    def __init__(self, ended: Callable[[ClientSession], None]) -> None:
        self._ended = ended
        self._sessions: dict[SessionKey, ClientSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def join(
        self, identity: FunctionIdentity, name: str, lease_ended: Callable[[LeaseId], None]
    ) -> ClientSession:
        """Add a connection to a function's session of this name, and return the session."""
        key = session_key(identity, name)
        session = self._sessions.setdefault(key, ClientSession(key, identity))
        session.connections.append(lease_ended)
        return session

    def leave(self, session: ClientSession, lease_ended: Callable[[LeaseId], None]) -> None:
        """Remove a closed connection; the session ends with its last connection."""
        session.connections.remove(lease_ended)
        if not session.connections:
            del self._sessions[session.key]
            self._ended(session)

    def lease_ended(self, key: SessionKey, lease: LeaseId) -> None:
        session = self._sessions.get(key)
        if session is not None:
            for tell in list(session.connections):
                tell(lease)


def session_key(identity: FunctionIdentity, name: str) -> SessionKey:
    return SessionKey(f"{identity}/{name}")


def fresh_request_id(key: SessionKey) -> str:
    return f"{key}/{secrets.token_hex(8)}"


async def in_thread(work: Callable[[], T], discard: Callable[[T], None] | None = None) -> T:
    """Run work in a thread; work that has begun is finished even if cancelled."""
    done = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait({done})
        if discard is not None and done.exception() is None:
            discard(done.result())
        raise
