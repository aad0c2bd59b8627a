"""One control connection to a GPU manager: any number of threads ask, one reads the answers."""

import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_shim.errors import ConnectionLost, RemoteFailure, WireError
from torch_shim.protocol import VERSION, Kind
from torch_shim.wire import Buffer, Frame, Wire

CONNECT_TIMEOUT_S = 5.0
# A manager whose machine went away without a word is noticed after about this many seconds.
_SILENCE_S = 15


@dataclass(slots=True)
class Answer:
    """What the manager answered: fields, and descriptors that are the caller's now."""

    fields: dict[str, Any]
    descriptors: tuple[int, ...] = ()


@dataclass(slots=True)
class _Waiting:
    """One request on its way."""

    done: threading.Event = field(default_factory=threading.Event)
    frame: Frame | None = None


class Control:
    """One control connection; `welcome` is what the manager answered to HELLO."""

    def __init__(self, address: str, credential: str, session: str) -> None:
        self.wire = Wire(connect(address))
        self._sending = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._numbers = 0
        self._used_s = time.monotonic()
        self.lost: str | None = None  # why there is no connection any more
        threading.Thread(target=self._read, name="gpufaas-control", daemon=True).start()
        hello = {"version": VERSION, "credential": credential, "session": session}
        self.welcome = self.ask(Kind.HELLO, hello | {"pid": os.getpid(), "role": "shim"}).fields

    def ask(
        self,
        kind: Kind,
        fields: dict[str, Any],
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
    ) -> Answer:
        """Send a request and wait for its answer; RemoteFailure if it is refused."""
        waiting = _Waiting()
        self._used_s = time.monotonic()
        with self._sending:
            if self.lost is not None:
                raise ConnectionLost(self.lost)
            self._numbers += 1
            number = self._numbers
            self._waiting[number] = waiting
            self.wire.send(kind, [number, fields], body, descriptors)
        waiting.done.wait()
        self._used_s = time.monotonic()
        if waiting.frame is None:
            raise ConnectionLost(self.lost)
        frame = waiting.frame
        if frame.kind is Kind.REFUSED:
            _, failure, message, facts = frame.meta
            raise RemoteFailure(failure, message, facts)
        return Answer(frame.meta[1], frame.descriptors)

    def idle_since(self, since_s: float) -> bool:
        """Whether nothing was asked since then, nor is being asked."""
        return self._used_s < since_s and not self._waiting

    def tell(self, kind: Kind, fields: dict[str, Any]) -> None:
        """Send something that has no answer."""
        with self._sending:
            self.wire.send(kind, [0, fields])

    def close(self) -> None:
        """Hang up: the manager ends what this session holds."""
        self.lost = "closed"
        try:
            self.wire.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            self.wire.close()  # it was not connected any more

    def _read(self) -> None:
        try:
            while True:
                frame = self.wire.receive()
                if frame.kind is Kind.LEASE_ENDED:
                    continue  # the worker says so too, to whoever calls
                waiting = self._waiting.pop(frame.meta[0], None)
                if waiting is None:
                    raise ConnectionLost(f"an answer to nothing: {frame.meta!r:.80}")
                waiting.frame = frame
                waiting.done.set()
        except (WireError, LookupError, TypeError) as error:
            self.lost = self.lost or str(error)
        with self._sending:
            for waiting in self._waiting.values():
                waiting.done.set()
            self._waiting.clear()
            self.wire.close()


def connect(address: str) -> socket.socket:
    """A stream socket to `unix:/path`, `unix:@name` or `tcp:host:port`."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        where: Any = "\0" + rest[1:] if rest.startswith("@") else rest
    elif scheme == "tcp":
        host, _, port = rest.rpartition(":")
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        _watch_over(connection)
        where = (host.strip("[]"), int(port))
    else:
        raise ConnectionLost(f"no address of a GPU manager: {address!r}")
    try:
        connection.settimeout(CONNECT_TIMEOUT_S)
        connection.connect(where)
        connection.settimeout(None)
    except OSError:
        connection.close()
        raise
    return connection


def _watch_over(connection: socket.socket) -> None:
    """Questions are small and wanted at once; a dead machine must not be waited for."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE_S // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000)
