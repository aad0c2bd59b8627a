"""The process's session with the GPU manager: weights, leases, and channels to workers."""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_shim.channel import Channel
from torch_shim.errors import ConnectionLost, RemoteFailure, WireError
from torch_shim.kept import Kept
from torch_shim.protocol import VERSION, Kind
from torch_shim.report import report
from torch_shim.wire import Buffer, Frame, Wire

log = logging.getLogger("gpufaas")

CONNECT_TIMEOUT_S = 5.0
UPLOAD_PIECE_BYTES = 16 << 20


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
    """One control connection: any number of threads ask, one thread reads the answers."""

    def __init__(self, address: str, credential: str, session: str) -> None:
        self.wire = Wire(connect(address))
        self._sending = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._numbers = 0
        self.lost: str | None = None  # why there is no connection any more
        self.ended_leases: set[int] = set()
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
        with self._sending:
            if self.lost is not None:
                raise ConnectionLost(self.lost)
            self._numbers += 1
            number = self._numbers
            self._waiting[number] = waiting
            self.wire.send(kind, [number, fields], body, descriptors)
        waiting.done.wait()
        if waiting.frame is None:
            raise ConnectionLost(self.lost)
        frame = waiting.frame
        if frame.kind is Kind.REFUSED:
            _, failure, message, facts = frame.meta
            raise RemoteFailure(failure, message, facts)
        return Answer(frame.meta[1], frame.descriptors)

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
                    self.ended_leases.add(frame.meta[1]["lease"])
                    continue
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


class Lease:
    """The right to run one model's graphs, and channels to the worker that does."""

    def __init__(self, number: int, worker: str, channels: list[Channel]) -> None:
        self.number = number
        self.worker = worker
        self._channels = channels
        self._lock = threading.Lock()
        self.over = False

    def take(self) -> Channel | None:
        """A channel nobody uses, or None: the caller acquires another one."""
        with self._lock:
            return self._channels.pop() if self._channels else None

    def give(self, channel: Channel) -> None:
        """Put a channel back after use."""
        if channel.broken:
            channel.close()
            return
        with self._lock:
            self._channels.append(channel)

    def channels(self) -> list[Channel]:
        """The idle channels."""
        return self._channels

    def drain(self) -> list[Channel]:
        """Every idle channel; the lease keeps none."""
        with self._lock:
            channels, self._channels = self._channels, []
        return channels


class Session:
    """What this process is to the GPU manager. A forked child makes a new one."""

    def __init__(self, address: str, credential: str) -> None:
        self.address = address
        self.name = secrets.token_hex(16)
        self._credential = credential
        self._lock = threading.RLock()
        self._control: Control | None = None
        self._leases: dict[str, Lease] = {}
        self._idle: dict[str, list[Channel]] = {}
        self._acquiring: dict[str, threading.Lock] = {}
        self._kept: dict[str, Kept] = {}

    @property
    def control(self) -> Control:
        """The connection, made anew when it was lost."""
        with self._lock:
            if self._control is None or self._control.lost is not None:
                self._start_anew()
                self._control = self._connect()
            return self._control

    def lease(self, digest: str, batch: int) -> Lease:
        """A lease for this model in force as far as we know, waiting for one if need be."""
        lease = self._leases.get(digest)
        if lease is not None and not lease.over:
            return lease
        with self._lock:
            lock = self._acquiring.setdefault(digest, threading.Lock())
        with lock:
            lease = self._leases.get(digest)
            if lease is None or lease.over:
                lease = self._acquire(digest, batch)
                self._leases[digest] = lease
            return lease

    def end(self, lease: Lease) -> None:
        """The worker says that this lease is over; idle channels stay good for the next one."""
        lease.over = True
        with self._lock:
            self._idle.setdefault(lease.worker, []).extend(lease.drain())

    def channel(self, digest: str, lease: Lease, batch: int) -> Channel | None:
        """A channel of this lease for one call; None if the lease is over meanwhile."""
        channel = lease.take()
        if channel is not None:
            return channel
        answer = self._ask_acquire(digest, batch, known=())
        opened = self._open(answer)
        found = opened.pop(lease.worker, [])
        for worker, channels in opened.items():
            self._idle.setdefault(worker, []).extend(channels)
        if answer.fields["lease"] != lease.number or not found:
            for channel in found:
                channel.close()
            return None
        return found[0]

    def kept(self, worker: str) -> Kept:
        """What this worker holds for us."""
        return self._kept.setdefault(worker, Kept())

    def lost(self, lease: Lease) -> None:
        """The worker is gone, and all that it held."""
        lease.over = True
        with self._lock:
            self._kept.pop(lease.worker, None)
            for channel in self._idle.pop(lease.worker, []) + lease.drain():
                channel.close()

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            if self._control is not None:
                self._control.close()
            self._start_anew()

    def close_copies(self) -> None:
        """In a forked child: let go of the parent's connections without a word on them."""
        if self._control is not None:
            self._control.wire.socket.close()
        for lease in self._leases.values():
            for channel in lease.channels():
                channel.wire.socket.close()
        for channels in self._idle.values():
            for channel in channels:
                channel.wire.socket.close()

    # -- inside ------------------------------------------------------------------------------

    def _connect(self) -> Control:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            try:
                return Control(self.address, self._credential, self.name)
            except (OSError, ConnectionLost) as error:
                if time.monotonic() > deadline:
                    raise ConnectionLost(
                        f"no GPU manager answers at {self.address} ({error}); start one with "
                        "`gpufaas gpu-manager`, or run the program by `gpufaas exec`"
                    ) from error
                time.sleep(0.1)

    def _acquire(self, digest: str, batch: int) -> Lease:
        answer = self._ask_acquire(digest, batch, known=tuple(self._idle))
        report.acquired(answer.fields["queue_s"], answer.fields["load_s"])
        opened = self._open(answer)
        worker = answer.fields["workers"][digest]
        with self._lock:
            channels = self._idle.pop(worker, []) + opened.pop(worker, [])
        return Lease(answer.fields["lease"], worker, channels)

    def _ask_acquire(self, digest: str, batch: int, known: tuple[str, ...]) -> Answer:
        fields = {"models": [digest], "batch": batch, "request": None, "deadline_s": None}
        return self.control.ask(Kind.ACQUIRE, fields | {"workers": list(known)})

    def _open(self, answer: Answer) -> dict[str, list[Channel]]:
        """The channels that came with an answer, or new connections where none can come."""
        fresh = answer.fields.get("fresh", [])
        if self.control.wire.local:
            ends = [socket.socket(fileno=descriptor) for descriptor in answer.descriptors]
        else:
            ends = [self._dial(worker) for worker in fresh]
        opened: dict[str, list[Channel]] = {}
        for worker, end in zip(fresh, ends, strict=True):
            opened.setdefault(worker, []).append(Channel(Wire(end, eager=True)))
        return opened

    def _dial(self, worker: str) -> socket.socket:
        wire = Wire(connect(self.address))
        hello = {"version": VERSION, "credential": self._credential, "session": self.name}
        wire.send(
            Kind.HELLO, [0, hello | {"pid": os.getpid(), "role": "channel", "worker": worker}]
        )
        frame = wire.receive()
        if frame.kind is not Kind.ANSWER:
            wire.close()
            raise RemoteFailure(*frame.meta[1:4])
        return wire.socket

    def _start_anew(self) -> None:
        """A manager that was gone knows nothing of us; under the old name we know things of it."""
        self.name = secrets.token_hex(16)
        self._leases.clear()
        self._kept.clear()
        for channels in self._idle.values():
            for channel in channels:
                channel.close()
        self._idle.clear()


def connect(address: str) -> socket.socket:
    """A stream socket to `unix:/path`, `unix:@name` or `tcp:host:port`."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        where: Any = "\0" + rest[1:] if rest.startswith("@") else rest
    elif scheme == "tcp":
        host, _, port = rest.rpartition(":")
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        where = (host.strip("[]"), int(port))
    else:
        raise ConnectionLost(f"no address of a GPU manager: {address!r}")
    try:
        connection.connect(where)
    except OSError:
        connection.close()
        raise
    return connection
