"""The process's session with one GPU manager: leases, and channels to the workers behind them."""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_shim.errors import ConnectionLost, ManagerUnreachable, RemoteFailure
from torch_shim.process_report import report
from torch_shim.wire import call_timings
from torch_shim.wire.control_connection import ControlConnection, ManagerAnswer
from torch_shim.wire.data_channel import DataChannel
from torch_shim.wire.dialing import CONNECT_TIMEOUT_S, connect
from torch_shim.wire.frame_socket import FrameSocket
from torch_shim.wire.protocol import TRACE, VERSION, FailureKind, FrameKind
from torch_shim.wire.worker_memory import WorkerStorages

log = logging.getLogger("gpufaas")

_RETRY_S = 0.1
# Nobody waits anew for a manager that was waited for in vain so lately: others that queued behind
# would do so one after the other.
IN_VAIN_S = 1.0


class WorkerPeer:
    """One worker as this process knows it: idle channels to it, and what it keeps for us."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kept = WorkerStorages()
        self._idle: list[DataChannel] = []
        self._lock = threading.Lock()
        self._gone = False

    def take(self) -> DataChannel | None:
        """A channel that nobody uses, or None."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def give(self, channel: DataChannel) -> None:
        """Put a channel back after use, or a new one here."""
        with self._lock:
            if not channel.broken and not self._gone:
                self._idle.append(channel)
                return
        channel.close()

    def lost(self) -> None:
        """The worker is gone, and all that it held."""
        with self._lock:
            self._gone = True
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    def hung_up(self) -> bool:
        """Whether the worker, from which nothing is expected, has closed its channels."""
        with self._lock:
            return bool(self._idle) and self._idle[0].hung_up()

    def close_copies(self) -> None:
        """In a forked child: let go of the parent's channels without a word on them."""
        for channel in self._idle:
            channel.wire.socket.close()


@dataclass(slots=True, eq=False)
class ModelLease:
    """The right to run one model's graphs on the worker that has it, until it is over."""

    number: int
    digest: str
    peer: WorkerPeer
    session: str  # the name under which it was given
    over: bool = False


@dataclass(frozen=True, slots=True)
class LeaseElsewhere:
    """A lease that was given on another node, with what to show there."""

    number: int
    node: str
    addresses: tuple[str, ...]
    token: str


class ManagerSession:
    """What this process is to one GPU manager. A forked child makes a new one."""

    def __init__(
        self, address: str, credential: str, patience_s: float = CONNECT_TIMEOUT_S
    ) -> None:
        """A manager that does not answer is tried again for `patience_s`."""
        self.address = address
        self.name = secrets.token_hex(16)
        self.used_s = time.monotonic()
        self._credential = credential
        self._patience_s = patience_s
        self._lock = threading.RLock()
        self._control: ControlConnection | None = None
        self._peers: dict[str, WorkerPeer] = {}
        self.calls = 0
        self._in_vain_until_s = 0.0
        self.retired = False  # for good: whoever still has it asks for another one

    @property
    def control(self) -> ControlConnection:
        """The connection, made anew when it was lost."""
        with self._lock:
            if self._control is None or self._control.lost is not None:
                if self.retired:
                    raise ConnectionLost(f"the session with {self.address} was idle for long")
                if time.monotonic() < self._in_vain_until_s:
                    raise ManagerUnreachable(self.address, "it did not answer a moment ago")
                self._start_anew()
                self._control = self._connect(self._patience_s)
            return self._control

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""
        return self._control is not None and self._control.lost is None

    @property
    def node(self) -> str:
        """The name of the manager's node."""
        node: str = self.control.welcome["node"]
        return node

    @property
    def traces(self) -> bool:
        """Whether the manager's workers know what a trace is."""
        control = self._control
        return control is not None and TRACE in control.welcome.get("knows", ())

    def holds(self, lease: ModelLease) -> bool:
        """Whether the lease is in force as far as we know."""
        return not lease.over and lease.session == self.name

    def acquire(
        self,
        digest: str,
        batch: int,
        token: str | None = None,
        *,
        lease: int | None = None,
        again: bool = False,
    ) -> ModelLease | LeaseElsewhere:
        """A lease for this model, waiting for one if need be.

        With a token or a number it is that lease, or RemoteFailure (LEASE) where it is of no use
        any more; with a token `again`, another one for its request, which gave that one back.
        """
        named = {"token": token, "lease": lease} | ({"again": True} if again else {})
        timing = call_timings.current()
        begun_us = 0 if timing is None else timing.now_us
        answer = self._ask_acquire(digest, batch, workers=self._known(), **named)
        elsewhere = answer.fields.get("elsewhere")
        queue_s, load_s = answer.fields["queue_s"], answer.fields.get("load_s", 0.0)
        if timing is not None:
            request = str(answer.fields.get("request") or "")
            timing.acquired(begun_us, answer.fields["lease"], queue_s, load_s, request)
        if elsewhere is not None:
            addresses = tuple(elsewhere["addresses"])
            number, node = answer.fields["lease"], elsewhere["node"]
            return LeaseElsewhere(number, node, addresses, elsewhere["token"])
        report.acquired(queue_s, load_s)
        self._open(answer)
        peer = self._peer(answer.fields["workers"][digest])
        return ModelLease(answer.fields["lease"], digest, peer, self.name)

    def where(self, token: str) -> LeaseElsewhere:
        """Where the lease of a token is, by this manager's word.

        RemoteFailure where the token is forged, or (LEASE) is of no use any more.
        """
        control = self.control
        if not control.knows(FrameKind.WHERE):
            message = "our own GPU manager is too old to say where that lease is"
            raise RemoteFailure(FailureKind.LEASE, message)
        found = control.ask(FrameKind.WHERE, {"token": token}).fields
        return LeaseElsewhere(found["lease"], found["node"], tuple(found["addresses"]), token)

    def claimed(self, number: int) -> None:
        """A lease that was given elsewhere is in use there, and does not end with this session."""
        control = self._control
        if control is None or not control.knows(FrameKind.CLAIMED):
            return
        try:
            control.tell(FrameKind.CLAIMED, {"lease": number})
        except ConnectionLost as error:  # the session has ended, and with it what it was told of
            log.info("%s was not told of a lease elsewhere: %s", self.address, error)

    def release(self, number: int) -> None:
        """A lease that was given elsewhere will not be used."""
        self.control.tell(FrameKind.RELEASE, {"lease": number})

    def give_back(self, leases: Sequence[ModelLease]) -> None:
        """These, which are one by their number, are needed no more, or perhaps later again."""
        control = self._control
        held = [lease for lease in leases if self.holds(lease)]
        for lease in leases:
            lease.over = True
        if held and control is not None:
            control.tell(FrameKind.RELEASE, {"lease": held[0].number, "may_return": True})

    def channel(self, lease: ModelLease, batch: int) -> DataChannel | None:
        """A channel of this lease for one call; None if the lease is over meanwhile."""
        channel = lease.peer.take()
        if channel is None:
            channel = self._another(lease, batch)
        if channel is not None:
            with self._lock:
                self.calls += 1
        return channel

    def give(self, lease: ModelLease, channel: DataChannel) -> None:
        """The call is over."""
        lease.peer.give(channel)
        with self._lock:
            self.calls -= 1
            self.used_s = time.monotonic()

    def lost(self, lease: ModelLease) -> None:
        """The worker is gone, and all that it held."""
        lease.over = True
        lease.peer.lost()
        with self._lock:
            self._peers.pop(lease.peer.name, None)

    def retire_if_idle(self, since_s: float) -> bool:
        """Hang up for good if no call was made since then; whether that is so."""
        with self._lock:
            control = self._control
            quiet = control is None or control.lost is not None or control.idle_since(since_s)
            if self.retired or not quiet or self.calls or self.used_s >= since_s:
                return self.retired
            if self.connected:
                log.info("the session with %s was idle for long", self.address)
            self.retired = True
            self.close()
            return True

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
        for peer in self._peers.values():
            peer.close_copies()

    # -- inside ------------------------------------------------------------------------------

    def _connect(self, patience_s: float) -> ControlConnection:
        began_s = time.monotonic()
        deadline = began_s + patience_s
        while True:
            try:
                control = ControlConnection(self.address, self._credential, self.name)
            except (OSError, ConnectionLost) as error:
                now_s = time.monotonic()
                if now_s >= deadline:
                    if now_s >= began_s + IN_VAIN_S:
                        self._in_vain_until_s = now_s + IN_VAIN_S
                    raise ManagerUnreachable(self.address, str(error)) from error
                time.sleep(_RETRY_S)
            else:
                self.used_s = time.monotonic()
                return control

    def _another(self, lease: ModelLease, batch: int) -> DataChannel | None:
        """One more channel to the lease's worker, for one more thread."""
        try:
            answer = self._ask_acquire(lease.digest, batch, lease=lease.number, workers=())
        except RemoteFailure as failure:
            if failure.failure == FailureKind.LEASE:
                return None
            raise
        self._open(answer)
        return lease.peer.take() if answer.fields["lease"] == lease.number else None

    def _ask_acquire(self, digest: str, batch: int, **more: Any) -> ManagerAnswer:
        fields = {"models": [digest], "batch": batch, "request": None, "deadline_s": None}
        timing = call_timings.current()
        if timing is not None:
            more["trace"] = timing.header
        return self.control.ask(FrameKind.ACQUIRE, fields | {"follow": True} | more)

    def _known(self) -> list[str]:
        """The workers to which a channel is open; those that hung up are forgotten."""
        with self._lock:
            for name, peer in list(self._peers.items()):
                if peer.hung_up():
                    self._peers.pop(name).lost()
            return list(self._peers)

    def _peer(self, worker: str) -> WorkerPeer:
        with self._lock:
            return self._peers.setdefault(worker, WorkerPeer(worker))

    def _open(self, answer: ManagerAnswer) -> None:
        """Keep the channels that came with an answer, or new connections where none can come."""
        fresh = answer.fields.get("fresh", [])
        if self.control.wire.local:
            ends = [socket.socket(fileno=descriptor) for descriptor in answer.descriptors]
        else:
            ends = [self.dial(worker) for worker in fresh]
        for worker, end in zip(fresh, ends, strict=True):
            self._peer(worker).give(DataChannel(FrameSocket(end, eager=True)))

    def dial(self, worker: str) -> socket.socket:
        """A further connection to the manager, for calls of this worker."""
        try:
            wire = FrameSocket(connect(self.address))
        except OSError as error:
            raise ConnectionLost(f"{self.address}: {error}") from error
        wire.socket.settimeout(CONNECT_TIMEOUT_S)
        hello = {"version": VERSION, "credential": self._credential, "session": self.name}
        hello |= {"pid": os.getpid(), "role": "channel", "worker": worker}
        try:
            wire.send(FrameKind.HELLO, [0, hello])
            frame = wire.receive()
            if frame.kind is not FrameKind.ANSWER:
                raise RemoteFailure(*frame.meta[1:4])
        except BaseException:
            wire.close()
            raise
        wire.socket.settimeout(None)
        return wire.socket

    def _start_anew(self) -> None:
        """A manager that was gone knows nothing of us; under the old name we know things of it."""
        self.name = secrets.token_hex(16)
        for peer in self._peers.values():
            peer.lost()
        self._peers.clear()
