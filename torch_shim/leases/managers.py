"""Sessions with GPU managers: this node's, and those of other nodes that leases refer to."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch_shim.errors import ManagerUnreachable, WireError
from torch_shim.wire.connections import CONNECT_TIMEOUT_S
from torch_shim.wire.manager_session import ManagerSession, WorkerPeer
from torch_shim.wire.protocol import FrameKind

log = logging.getLogger("gpufaas")

# After this time an idle session with another node is closed: it costs sockets and memory there.
IDLE_S = 120.0


class Nodes:
    """One session for each GPU manager; idle sessions with other nodes are closed.

    So are, sooner, channels of all sessions that only a burst of calls needed.
    """

    def __init__(self, address: str, credential: str, idle_s: float = IDLE_S) -> None:
        self.own = ManagerSession(address, credential, CONNECT_TIMEOUT_S)
        self._credential = credential
        self._idle_s = idle_s
        self._others: dict[str, ManagerSession] = {}
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def holder(self, token: str, node: str | None) -> ManagerSession:
        """Return a session with the GPU manager that has a token's lease; the token names its node.

        A caller can send any token and any address with a request. Therefore no address from a
        caller is dialed: this node's manager verifies the token and names the other manager.
        RemoteFailure if the token is forged, or (LEASE) its lease is no longer usable.
        """
        if node is None or node == self.own.node:
            return self.own
        located = self.own.control.ask(FrameKind.WHERE, {"token": token}).fields
        return self.reach(located["addresses"], located["node"])

    def reach(self, addresses: Sequence[str], node: str) -> ManagerSession:
        """Return a session with a node's GPU manager, which listens at these addresses.

        The addresses come from a GPU manager. Addresses on this machine are tried first. Raise
        ManagerUnreachable if the node answers at none of them.
        """
        failures = []
        for session in self._candidates(addresses, node):
            try:
                if session.node == node:
                    return session
                failures.append(f"{session.address} is node {session.node}")
            except WireError as error:
                failures.append(str(error))
        tried = ", ".join(addresses) or "no address"
        detail = "; ".join(failures) or "none of these addresses can be reached from here"
        raise ManagerUnreachable(tried, f"node {node}: {detail}")

    def sessions(self) -> list[ManagerSession]:
        return [self.own, *list(self._others.values())]

    def peers(self) -> list[WorkerPeer]:
        return [peer for session in self.sessions() for peer in session.peers()]

    def sweep_later(self) -> None:
        if self._timer is None:
            with self._lock:
                self._start_timer()

    def close(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        for session in self.sessions():
            session.close()

    def _candidates(self, addresses: Sequence[str], node: str) -> Iterator[ManagerSession]:
        """Yield the sessions to try; each machine may use the same socket path for its manager."""
        own = self.own
        if own.address in addresses or (own.connected and own.node == node):
            yield own
        others = [address for address in addresses if address != own.address]
        here = [other for other in others if other.startswith("unix:") and _is_here(other)]
        for address in (*here, *(other for other in others if other.startswith(("tls:", "tcp:")))):
            session = self._other(address)
            yield session
            if session.retired:  # it was idle, and is closed meanwhile
                yield self._other(address)

    def _other(self, address: str) -> ManagerSession:
        with self._lock:
            session = self._others.get(address)
            if session is None or session.retired:
                session = ManagerSession(address, self._credential, patience_s=0.0)
                self._others[address] = session
            self._start_timer()
            return session

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(self._idle_s / 4, self._sweep)
            self._timer.daemon = True
            self._timer.start()

    def _sweep(self) -> None:
        """Close what is idle for too long; repeat while there is anything to close."""
        now_s, others = time.monotonic(), list(self._others.values())
        idle = [found for found in others if found.retire_if_idle(now_s - self._idle_s)]
        since_s = now_s - self._idle_s / 4
        unused = [peer.close_unused(since_s) for peer in self.peers()]
        with self._lock:
            for session in idle:
                if self._others.get(session.address) is session:
                    del self._others[session.address]
            if self._timer is None:
                return
            self._timer = None
            if self._others or any(unused):
                self._start_timer()


def _is_here(address: str) -> bool:
    """Whether a Unix socket may be on this machine; an abstract one is tried by connecting."""
    name = address.removeprefix("unix:")
    return name.startswith("@") or Path(name).is_socket()
