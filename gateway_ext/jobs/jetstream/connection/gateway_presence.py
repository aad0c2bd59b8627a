"""Which gateways are alive, by their heartbeats, and the identity of this one."""

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from gateway_ext.errors import QueueFailed

_FORGET_S = 24 * 3600.0


@dataclass(slots=True)
class _Gateway:
    seq: int
    session: str
    received_s: float
    written_s: float  # by the servers' clock


class GatewayPresence:
    """The sessions of gateways; `now_s` is a monotonic clock.

    A session is dead once it closed, once its gateway has a later session, or after `lease_s`
    without a heartbeat while this gateway was connected.
    """

    def __init__(self, lease_s: float, now_s: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._now_s = now_s
        self._gateways: dict[str, _Gateway] = {}
        self._servers_s = 0.0
        self._lost: set[str] = set()

    def lives(self, session: str) -> bool:
        """Whether a session may still hold its claims."""
        known = self._gateways.get(gateway_of(session))
        if known is None or known.session != session:
            return False
        return self._now_s() - known.received_s <= self._lease_s

    def receive(self, gateway: str, seq: int, content: bytes, written_s: float) -> None:
        """Note a heartbeat, which names the gateway's session; an empty session means closed."""
        try:
            session = str(json.loads(content)["session"])
        except RecursionError as error:
            raise ValueError("no heartbeat of a gateway") from error
        self._gateways[gateway] = _Gateway(seq, session, self._now_s(), written_s)
        self._servers_s = max(self._servers_s, written_s)
        self._lost.discard(session)

    def session_of(self, gateway: str) -> str:
        """The current session of a gateway; "" where it has none."""
        known = self._gateways.get(gateway)
        return known.session if known is not None else ""

    def restart_leases(self) -> None:
        """Start all leases again, as heartbeats could not arrive without a connection."""
        for known in self._gateways.values():
            known.received_s = self._now_s()

    def newly_dead(self, sessions: list[str]) -> list[str]:
        """The dead ones of these sessions that the previous call did not return."""
        found = [one for one in sessions if one not in self._lost and not self.lives(one)]
        self._lost |= set(found)
        self._lost &= set(sessions)
        return found

    def old(self) -> list[tuple[str, int]]:
        """Gateways without a heartbeat for a day, each with the number of its message."""
        before_s = self._servers_s - _FORGET_S
        return [(name, one.seq) for name, one in self._gateways.items() if one.written_s < before_s]

    def forget(self, gateway: str) -> None:
        """Drop a gateway whose message was removed from the stream."""
        self._gateways.pop(gateway, None)


class GatewayIdentity:
    """The name of this gateway, kept in its state folder, which is locked against other processes.

    `session` is new at each start, so that claims of the session before are released at once.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            self._file = os.open(folder / "gateway", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise QueueFailed(f"the job queue has no folder: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.gateway = os.pread(self._file, 64, 0).decode("ascii")
            if not self.gateway.isalnum():
                self.gateway = uuid4().hex
                os.pwrite(self._file, self.gateway.encode(), 0)
        except (OSError, ValueError) as error:
            os.close(self._file)
            raise QueueFailed(f"another gateway has the folder {folder}: {error}") from error
        self.session = f"{self.gateway}.{uuid4().hex[:12]}"

    def close(self) -> None:
        """Unlock the folder for another process."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def beat(session: str) -> bytes:
    """The content of a heartbeat; an empty session announces that the gateway closes."""
    return json.dumps({"session": session}).encode()


def gateway_of(session: str) -> str:
    """The gateway of a session."""
    return session.partition(".")[0]
