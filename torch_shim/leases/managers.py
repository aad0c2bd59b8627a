"""The GPU managers that this process talks to: its own node's, and others where it was sent."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch_shim.errors import ManagerUnreachable, WireError
from torch_shim.wire.dialing import CONNECT_TIMEOUT_S
from torch_shim.wire.manager_session import ManagerSession

log = logging.getLogger("gpufaas")

# A session with another node costs sockets and memory there.
IDLE_S = 120.0
_AT_ONCE_S = 0.0


class Nodes:
    """One session for each GPU manager; those with other nodes are closed when they are idle."""

    def __init__(self, address: str, credential: str, idle_s: float = IDLE_S) -> None:
        self.own = ManagerSession(address, credential, CONNECT_TIMEOUT_S)
        self._credential = credential
        self._idle_s = idle_s
        self._others: dict[str, ManagerSession] = {}
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def holder(self, token: str, node: str | None) -> ManagerSession:
        """A session with the GPU manager that has a token's lease; the token names that node.

        Whoever calls a function can give it any token, and any address beside it. So none of their
        addresses is dialled, and a manager that is not ours hears of us only by the word of ours.
        """
        if node is None or node == self.own.node:
            return self.own
        where = self.own.where(token)
        return self.reach(where.addresses, where.node)

    def reach(self, addresses: Sequence[str], node: str) -> ManagerSession:
        """A session with this node's GPU manager, which listens at these addresses.

        They are those that a GPU manager told. One on the same machine goes before the others.
        Unreachable where none of them answers.
        """
        trouble = []
        for session in self._candidates(addresses, node):
            try:
                if session.node == node:
                    return session
                trouble.append(f"{session.address} is node {session.node}")
            except WireError as error:
                trouble.append(str(error))
        where = ", ".join(addresses) or "no address"
        detail = "; ".join(trouble) or "none of them can be reached from here"
        raise ManagerUnreachable(where, f"node {node}: {detail}")

    @property
    def elsewhere(self) -> int:
        """How many managers of other nodes have a session here."""
        return len(self._others)

    def close(self) -> None:
        """Hang up everywhere."""
        self._stop_timer()
        for session in [self.own, *list(self._others.values())]:
            session.close()

    def close_copies(self) -> None:
        """In a forked child: let go of the parent's connections without a word on them."""
        for session in [self.own, *self._others.values()]:
            session.close_copies()

    def _candidates(self, addresses: Sequence[str], node: str) -> Iterator[ManagerSession]:
        """The same path may stand for another manager on each machine: only its name tells."""
        own = self.own
        if own.address in addresses or (own.connected and own.node == node):
            yield own
        for address in addresses:
            if address != own.address and address.startswith("unix:") and _is_here(address):
                yield self._other(address)
        for address in addresses:
            if address != own.address and address.startswith(("tls:", "tcp:")):
                yield self._other(address)

    def _other(self, address: str) -> ManagerSession:
        with self._lock:
            session = self._others.get(address)
            if session is None or session.retired:
                session = ManagerSession(address, self._credential, _AT_ONCE_S)
                self._others[address] = session
            if self._timer is None:
                self._start_timer()
            return session

    def _start_timer(self) -> None:
        self._timer = threading.Timer(self._idle_s / 4, self._sweep)
        self._timer.daemon = True
        self._timer.start()

    def _stop_timer(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _sweep(self) -> None:
        """Part with what was idle for long; come back as long as there is anything to part with."""
        since_s = time.monotonic() - self._idle_s
        idle = [found for found in list(self._others.values()) if found.retire_if_idle(since_s)]
        with self._lock:
            for session in idle:
                if self._others.get(session.address) is session:
                    del self._others[session.address]
            if self._timer is None:
                return
            self._timer = None
            if self._others:
                self._start_timer()


def _is_here(address: str) -> bool:
    """Whether a Unix socket may be on this machine; for an abstract one, asking is as cheap."""
    name = address.removeprefix("unix:")
    return name.startswith("@") or Path(name).is_socket()
