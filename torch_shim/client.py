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

from torch_shim import timings
from torch_shim.channel import Channel
from torch_shim.control import Answer, Control
from torch_shim.dialing import CONNECT_TIMEOUT_S, connect
from torch_shim.errors import ConnectionLost, RemoteFailure, Unreachable
from torch_shim.kept import Kept
from torch_shim.protocol import TRACE, VERSION, Failure, Kind
from torch_shim.report import report
from torch_shim.wire import Wire

log = logging.getLogger("gpufaas")

_RETRY_S = 0.1
# Nobody waits anew for a manager that was waited for in vain so lately: others that queued behind
# would do so one after the other.
_IN_VAIN_S = 1.0


class Peer:
    """One worker as this process knows it: idle channels to it, and what it keeps for us."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kept = Kept()
        self._idle: list[Channel] = []
        self._lock = threading.Lock()
        self._gone = False

    def take(self) -> Channel | None:
        """A channel that nobody uses, or None."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def give(self, channel: Channel) -> None:
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
class Lease:
    """The right to run one model's graphs on the worker that has it, until it is over."""

    number: int
    digest: str
    peer: Peer
    session: str  # the name under which it was given
    over: bool = False


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A lease that was given on another node, with what to show there."""

    number: int
    node: str
    addresses: tuple[str, ...]
    token: str


class Session:
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
        self._control: Control | None = None
        self._peers: dict[str, Peer] = {}
        self._calls = 0
        self._in_vain_until_s = 0.0
        self.retired = False  # for good: whoever still has it asks for another one

    @property
    def control(self) -> Control:
        """The connection, made anew when it was lost."""
        with self._lock:
            if self._control is None or self._control.lost is not None:
                if self.retired:
                    raise ConnectionLost(f"the session with {self.address} was idle for long")
                if time.monotonic() < self._in_vain_until_s:
                    raise Unreachable(self.address, "it did not answer a moment ago")
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

    def holds(self, lease: Lease) -> bool:
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
    ) -> Lease | Elsewhere:
        """A lease for this model, waiting for one if need be.

        With a token or a number it is that lease, or RemoteFailure (LEASE) where it is of no use
        any more; with a token `again`, another one for its request, which gave that one back.
        """
        named = {"token": token, "lease": lease} | ({"again": True} if again else {})
        timing = timings.current()
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
            return Elsewhere(number, node, addresses, elsewhere["token"])
        report.acquired(queue_s, load_s)
        self._open(answer)
        peer = self._peer(answer.fields["workers"][digest])
        return Lease(answer.fields["lease"], digest, peer, self.name)

    def where(self, token: str) -> Elsewhere:
        """Where the lease of a token is, by this manager's word.

        RemoteFailure where the token is forged, or (LEASE) is of no use any more.
        """
        control = self.control
        if not control.knows(Kind.WHERE):
            message = "our own GPU manager is too old to say where that lease is"
            raise RemoteFailure(Failure.LEASE, message)
        found = control.ask(Kind.WHERE, {"token": token}).fields
        return Elsewhere(found["lease"], found["node"], tuple(found["addresses"]), token)

    def claimed(self, number: int) -> None:
        """A lease that was given elsewhere is in use there, and does not end with this session."""
        control = self._control
        if control is None or not control.knows(Kind.CLAIMED):
            return
        try:
            control.tell(Kind.CLAIMED, {"lease": number})
        except ConnectionLost as error:  # the session has ended, and with it what it was told of
            log.info("%s was not told of a lease elsewhere: %s", self.address, error)

    def release(self, number: int) -> None:
        """A lease that was given elsewhere will not be used."""
        self.control.tell(Kind.RELEASE, {"lease": number})

    def give_back(self, leases: Sequence[Lease]) -> None:
        """These, which are one by their number, are needed no more, or perhaps later again."""
        control = self._control
        held = [lease for lease in leases if self.holds(lease)]
        for lease in leases:
            lease.over = True
        if held and control is not None:
            control.tell(Kind.RELEASE, {"lease": held[0].number, "may_return": True})

    def channel(self, lease: Lease, batch: int) -> Channel | None:
        """A channel of this lease for one call; None if the lease is over meanwhile."""
        channel = lease.peer.take()
        if channel is None:
            channel = self._another(lease, batch)
        if channel is not None:
            with self._lock:
                self._calls += 1
        return channel

    def give(self, lease: Lease, channel: Channel) -> None:
        """The call is over."""
        lease.peer.give(channel)
        with self._lock:
            self._calls -= 1
            self.used_s = time.monotonic()

    def lost(self, lease: Lease) -> None:
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
            if self.retired or not quiet or self._calls or self.used_s >= since_s:
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

    def _connect(self, patience_s: float) -> Control:
        began_s = time.monotonic()
        deadline = began_s + patience_s
        while True:
            try:
                control = Control(self.address, self._credential, self.name)
            except (OSError, ConnectionLost) as error:
                now_s = time.monotonic()
                if now_s >= deadline:
                    if now_s >= began_s + _IN_VAIN_S:
                        self._in_vain_until_s = now_s + _IN_VAIN_S
                    raise Unreachable(self.address, str(error)) from error
                time.sleep(_RETRY_S)
            else:
                self.used_s = time.monotonic()
                return control

    def _another(self, lease: Lease, batch: int) -> Channel | None:
        """One more channel to the lease's worker, for one more thread."""
        try:
            answer = self._ask_acquire(lease.digest, batch, lease=lease.number, workers=())
        except RemoteFailure as failure:
            if failure.failure == Failure.LEASE:
                return None
            raise
        self._open(answer)
        return lease.peer.take() if answer.fields["lease"] == lease.number else None

    def _ask_acquire(self, digest: str, batch: int, **more: Any) -> Answer:
        fields = {"models": [digest], "batch": batch, "request": None, "deadline_s": None}
        timing = timings.current()
        if timing is not None:
            more["trace"] = timing.header
        return self.control.ask(Kind.ACQUIRE, fields | {"follow": True} | more)

    def _known(self) -> list[str]:
        """The workers to which a channel is open; those that hung up are forgotten."""
        with self._lock:
            for name, peer in list(self._peers.items()):
                if peer.hung_up():
                    self._peers.pop(name).lost()
            return list(self._peers)

    def _peer(self, worker: str) -> Peer:
        with self._lock:
            return self._peers.setdefault(worker, Peer(worker))

    def _open(self, answer: Answer) -> None:
        """Keep the channels that came with an answer, or new connections where none can come."""
        fresh = answer.fields.get("fresh", [])
        if self.control.wire.local:
            ends = [socket.socket(fileno=descriptor) for descriptor in answer.descriptors]
        else:
            ends = [self._dial(worker) for worker in fresh]
        for worker, end in zip(fresh, ends, strict=True):
            self._peer(worker).give(Channel(Wire(end, eager=True)))

    def _dial(self, worker: str) -> socket.socket:
        try:
            wire = Wire(connect(self.address))
        except OSError as error:
            raise ConnectionLost(f"{self.address}: {error}") from error
        wire.socket.settimeout(CONNECT_TIMEOUT_S)
        hello = {"version": VERSION, "credential": self._credential, "session": self.name}
        hello |= {"pid": os.getpid(), "role": "channel", "worker": worker}
        try:
            wire.send(Kind.HELLO, [0, hello])
            frame = wire.receive()
            if frame.kind is not Kind.ANSWER:
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
