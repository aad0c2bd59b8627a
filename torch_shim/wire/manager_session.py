"""The process's session with one GPU manager: its leases, and channels to the leases' workers."""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_shim.errors import (
    BadFrame,
    ConnectionLost,
    ManagerUnreachable,
    OtherVersion,
    QuotaUsedUp,
    RemoteFailure,
    WireError,
)
from torch_shim.process_report import report
from torch_shim.wire import current_call
from torch_shim.wire.connections import CONNECT_TIMEOUT_S, connect
from torch_shim.wire.frame_socket import Frame, FrameSocket
from torch_shim.wire.protocol import Buffer, FailureKind, FrameKind
from torch_shim.wire.worker_peer import DataChannel, WorkerPeer

log = logging.getLogger("gpufaas")

_RETRY_S = 0.1
_MOST_WORKERS = 256  # that leases are expected on
_MOST_IMAGES = 4096  # that a session remembers; others are offered again
# After a failed connect that waited this long, further attempts fail at once for this long:
# otherwise threads that queue for the connection would each wait in turn.
FAILED_CONNECT_S = 1.0


@dataclass(slots=True, eq=False)
class ModelLease:
    """The right to run one model's graphs on the worker that holds the model, until `over`."""

    number: int
    digest: str
    peer: WorkerPeer
    session: str  # the session's name when the lease was granted
    over: bool = False


@dataclass(frozen=True, slots=True)
class LeaseElsewhere:
    """A lease that was granted on another node, with the token that claims it there."""

    number: int
    node: str
    addresses: tuple[str, ...]
    token: str


# While a thread waits for an answer, it sends a PING at this interval; after so many unanswered
# PINGs the manager counts as lost. A manager answers a PING at once, even while requests wait.
PING_S = 2.0
_MOST_UNANSWERED = 5
# While a manager receives a piece of weights it answers no PING, and after the last one it hashes.
_MOST_UNANSWERED_UPLOADING = 60
# If no byte can be sent for this long, the manager counts as frozen.
_SEND_TIMEOUT_S = 10
# A manager handles 64 requests at once, and reads no further frame until one is answered.
_MOST_AT_ONCE = 60


@dataclass(slots=True)
class ManagerAnswer:
    """A manager's answer: fields, descriptors that the caller owns, and a piece of data."""

    fields: dict[str, Any]
    descriptors: tuple[int, ...] = ()
    body: memoryview | None = None


@dataclass(slots=True)
class _SentRequest:
    """A request that waits for its answer."""

    kind: FrameKind
    done: threading.Event = field(default_factory=threading.Event)
    frame: Frame | None = None
    said: Sequence[Any] = ()  # the answer's metadata, behind its number


class ControlConnection:
    """One control connection of a session; `welcome` is the manager's answer to HELLO.

    A manager that does not answer PINGs counts as lost, as if it had closed the connection.
    """

    def __init__(self, address: str, credential: str, session: str) -> None:
        self.session = session
        self.welcome: dict[str, Any] = {}
        self.wire = FrameSocket(connect(address))
        self.wire.send_timeout_s = _SEND_TIMEOUT_S
        self._sending = threading.Lock()
        self._room = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._waiting: dict[int, _SentRequest] = {}
        self._numbers = 0
        self._received = 0
        self._used_s = time.monotonic()
        self.lost: str | None = None  # the reason, once the connection is lost
        self._other_version: OtherVersion | None = None  # which the manager speaks
        threading.Thread(target=self._read, name="gpufaas-control", daemon=True).start()
        hello = {"credential": credential, "session": session, "pid": os.getpid(), "role": "shim"}
        try:
            answer = self.ask(FrameKind.HELLO, hello)
        except BaseException:
            self.close()
            raise
        self.welcome = answer.fields

    def ask(
        self,
        kind: FrameKind,
        fields: dict[str, Any],
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
    ) -> ManagerAnswer:
        """Send a request and wait for its answer; raise RemoteFailure if the manager refuses it."""
        sent = _SentRequest(kind)
        with self._room:
            self._used_s = time.monotonic()
            with self._sending:
                if self.lost is not None:
                    raise ConnectionLost(self.lost)
                self._numbers += 1
                self._waiting[self._numbers] = sent
                self._send(kind, [self._numbers, fields], body, descriptors)
            self._wait(sent)
            self._used_s = time.monotonic()
        frame = sent.frame
        if frame is None:
            raise self._other_version or ConnectionLost(self.lost)
        if frame.kind is FrameKind.REFUSED:
            frame.close_descriptors()
            raise RemoteFailure(*sent.said)
        return ManagerAnswer(sent.said[0], frame.descriptors, frame.body)

    def idle_since(self, since_s: float) -> bool:
        """Whether no request was sent since then, and none waits for an answer."""
        return self._used_s < since_s and not self._waiting

    def notify(self, kind: FrameKind, fields: dict[str, Any]) -> None:
        """Send a frame that has no answer."""
        with self._sending:
            if self.lost is not None:
                raise ConnectionLost(self.lost)
            self._send(kind, [0, fields])

    def close(self) -> None:
        """Close the connection; the manager then ends the session's leases."""
        self._disconnect("closed")

    # -- inside ------------------------------------------------------------------------------

    def _wait(self, waiting: _SentRequest) -> None:
        if waiting.kind is FrameKind.HELLO:
            if not waiting.done.wait(CONNECT_TIMEOUT_S):
                self._disconnect(f"it did not answer within {CONNECT_TIMEOUT_S:g} s")
            return
        # PINGs are counted, not time: if this process was stopped, much time passed unnoticed.
        received, unanswered = self._received, 0
        while not waiting.done.wait(PING_S):
            if received != self._received:
                received, unanswered = self._received, 0
            uploading = any(sent.kind is FrameKind.CHUNK for sent in list(self._waiting.values()))
            if unanswered >= (_MOST_UNANSWERED_UPLOADING if uploading else _MOST_UNANSWERED):
                self._disconnect(f"the manager gave no sign of life for {unanswered * PING_S:g} s")
                return
            unanswered += 1
            self.notify(FrameKind.PING, {})

    def _send(
        self,
        kind: FrameKind,
        meta: Any,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send a frame; after a partial one the connection is unusable and therefore closed."""
        try:
            self.wire.send(kind, meta, body, descriptors)
        except ConnectionLost as error:
            self._disconnect(str(error))
            raise

    def _disconnect(self, reason: str) -> None:
        """Shut the socket down; the reading thread then wakes the waiting threads."""
        self.lost = self.lost or reason
        try:
            self.wire.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            self.wire.close()  # the socket was not connected any more

    def _read(self) -> None:
        try:
            while True:
                frame = self.wire.receive()
                self._received += 1
                delivered = False
                try:
                    delivered = self._deliver(frame)
                finally:
                    if not delivered:
                        frame.close_descriptors()
        except OtherVersion as error:
            self._other_version, self.lost = error, str(error)
        except (WireError, LookupError, TypeError) as error:
            self.lost = self.lost or str(error)
        with self._sending:
            for waiting in self._waiting.values():
                waiting.done.set()
            self._waiting.clear()
            self.wire.close()

    def _deliver(self, frame: Frame) -> bool:
        """Give an answer to the thread that waits for it; return False if no thread wants it."""
        if frame.kind is FrameKind.LEASE_ENDED:
            return False  # the worker refuses the next call of that lease anyway
        number, *said = frame.meta
        if number == 0:
            return False  # the answer to a PING
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            raise ConnectionLost(f"an answer without a request: {number}")
        waiting.frame, waiting.said = frame, said
        waiting.done.set()
        return True


class ManagerSession:
    """This process's session with one GPU manager. A forked child creates a new one."""

    def __init__(
        self, address: str, credential: str, patience_s: float = CONNECT_TIMEOUT_S
    ) -> None:
        """Connecting to a manager that does not answer is retried for `patience_s`."""
        self.address = address
        self.name = secrets.token_hex(16)
        self.used_s = time.monotonic()
        self._credential = credential
        self._patience_s = patience_s
        self._lock = threading.RLock()
        self._control: ControlConnection | None = None
        self._peers: dict[str, WorkerPeer] = {}
        # By GPU and model, the worker that leases of tokens were for.
        self._workers: dict[tuple[str, str], str] = {}
        # The digests of the images that the manager has accepted since this session connected.
        self.images: dict[str, None] = {}
        self.calls = 0
        self._unreachable_until_s = 0.0
        self.retired = False  # closed for good: callers then open another session

    @property
    def control(self) -> ControlConnection:
        """The connection, reopened if it was lost."""
        with self._lock:
            if self._control is None or self._control.lost is not None:
                if self.retired:
                    raise ConnectionLost(f"the idle session with {self.address} was closed")
                if time.monotonic() < self._unreachable_until_s:
                    raise ManagerUnreachable(self.address, "it did not answer a moment ago")
                self._reset()
                self._control = self._connect(self._patience_s)
            return self._control

    @property
    def connected(self) -> bool:
        return self._control is not None and self._control.lost is None

    @property
    def node(self) -> str:
        node: str = self.control.welcome["node"]
        return node

    def connected_images(self) -> dict[str, None]:
        """Return the digests that the manager accepts by this connection, opened if need be.

        After another connect the session has another dictionary; this one is of the former.
        """
        with self._lock:
            _ = self.control
            if len(self.images) >= _MOST_IMAGES:  # others may forget one meanwhile
                for digest in list(self.images)[: 1 - _MOST_IMAGES]:
                    self.images.pop(digest, None)
            return self.images

    def peers(self) -> list[WorkerPeer]:
        with self._lock:
            return list(self._peers.values())

    def holds(self, lease: ModelLease) -> bool:
        """Whether this process believes the lease to be in force."""
        return not lease.over and lease.session == self.name

    def acquire(
        self,
        digest: str,
        batch: int,
        token: str | None = None,
        *,
        lease: int | None = None,
        again: bool = False,
        goes_on: bool = False,
    ) -> ModelLease | LeaseElsewhere:
        """Acquire a lease for this model; wait for one if necessary.

        With a token or a number, return that lease, or raise RemoteFailure (LEASE) if it is no
        longer usable. With a token and `again`, acquire another lease for the token's request,
        which has given the token's lease back. A request that `goes_on` has used a GPU already.
        """
        named = {"token": token, "lease": lease, "again": again, "goes_on": goes_on}
        timing = current_call.timing()
        begun_us = 0 if timing is None else timing.now_us
        answer = self._ask_acquire(digest, batch, workers=self._known(), **named)
        elsewhere = answer.fields.get("elsewhere")
        queue_s, load_s = answer.fields["queue_s"], answer.fields.get("load_s", 0.0)
        if timing is not None:
            request = str(answer.fields.get("request") or "")
            timing.acquired(begun_us, answer.fields["lease"], queue_s, load_s, request)
        if elsewhere is not None:
            number, node = answer.fields["lease"], elsewhere["node"]
            return LeaseElsewhere(number, node, tuple(elsewhere["addresses"]), elsewhere["token"])
        report.add(acquires=1, queue_s=queue_s, load_s=load_s)
        self._open(answer)
        worker = answer.fields["workers"][digest]
        if token is not None:
            with self._lock:
                if len(self._workers) >= _MOST_WORKERS:
                    self._workers.clear()
                self._workers[str(answer.fields["gpu"]), digest] = worker
        return ModelLease(answer.fields["lease"], digest, self._peer(worker), self.name)

    def acquire_here(self, digest: str, batch: int, token: str) -> ModelLease:
        """Acquire the lease of a token for this node; BadFrame where the node names another one."""
        acquired = self.acquire(digest, batch, token)
        if not isinstance(acquired, ModelLease):
            raise BadFrame(f"node {acquired.node!r:.80} instead of the lease on this one")
        return acquired

    def lease_ahead(self, number: int, gpu: str, digest: str) -> ModelLease | None:
        """A lease that a token names, without asking for it, if its worker should know it.

        The worker refuses the call if it does not; then the lease has to be acquired.
        """
        with self._lock:
            peer = self._peers.get(self._workers.get((gpu, digest), ""))
        if peer is None or not self.connected or not peer.waits():
            return None
        report.add(acquires=1)
        return ModelLease(number, digest, peer, self.name)

    def report_claimed(self, number: int, request: str | None) -> None:
        """Report that a lease elsewhere is claimed there, so it does not end with this session."""
        control = self._control
        if control is None:
            return
        try:
            control.notify(FrameKind.CLAIMED, {"lease": number, "request": request})
        except ConnectionLost as error:  # the manager has forgotten the session and the lease
            log.info("the claim of a lease elsewhere was not sent to %s: %s", self.address, error)

    def release(self, number: int, request: str | None) -> None:
        """Release a lease that was granted on another node and will not be used."""
        self.control.notify(FrameKind.RELEASE, {"lease": number, "request": request})

    def give_back(self, leases: Sequence[ModelLease], request: str | None) -> None:
        """Give a lease back; its request may reacquire one. `leases` have the same number."""
        control = self._control
        held = [lease for lease in leases if self.holds(lease)]
        for lease in leases:
            lease.over = True
        if held and control is not None:
            given_back = {"lease": held[0].number, "may_return": True, "request": request}
            control.notify(FrameKind.RELEASE, given_back)

    def channel(self, lease: ModelLease, batch: int) -> DataChannel | None:
        """Return a channel of this lease for one call; None if the lease has ended."""
        channel = lease.peer.take()
        if channel is None:
            try:
                answer = self._ask_acquire(lease.digest, batch, lease=lease.number, workers=())
            except RemoteFailure as failure:
                if failure.failure == FailureKind.LEASE:
                    return None
                raise
            self._open(answer)
            channel = lease.peer.take() if answer.fields["lease"] == lease.number else None
        if channel is not None:
            with self._lock:
                self.calls += 1
        return channel

    def give(self, lease: ModelLease, channel: DataChannel) -> None:
        """Return a lease's channel after the call."""
        lease.peer.give(channel)
        with self._lock:
            self.calls -= 1
            self.used_s = time.monotonic()

    def mark_lost(self, lease: ModelLease) -> None:
        lease.over = True
        lease.peer.mark_lost()
        with self._lock:
            self._peers.pop(lease.peer.name, None)

    def retire_if_idle(self, since_s: float) -> bool:
        """Close the session for good if no call was made since then; return whether it is."""
        with self._lock:
            control = self._control
            quiet = control is None or control.lost is not None or control.idle_since(since_s)
            if self.retired or not quiet or self.calls or self.used_s >= since_s:
                return self.retired
            if any(peer.sole for peer in self._peers.values()):
                return False
            if self.connected:
                log.info("closing the idle session with %s", self.address)
            self.retired = True
            self.close()
            return True

    def close(self) -> None:
        with self._lock:
            if self._control is not None:
                self._control.close()
            self._reset()

    def close_copies(self) -> None:
        """Close a forked child's copies of the connections without sending anything on them."""
        if self._control is not None:
            self._control.wire.socket.close()
        for peer in self._peers.values():
            peer.close_copies()

    # -- inside ------------------------------------------------------------------------------

    def _connect(self, patience_s: float) -> ControlConnection:
        began_s = time.monotonic()
        while True:
            try:
                control = ControlConnection(self.address, self._credential, self.name)
            except (OSError, ConnectionLost) as error:
                now_s = time.monotonic()
                if now_s >= began_s + patience_s:
                    if now_s >= began_s + FAILED_CONNECT_S:
                        self._unreachable_until_s = now_s + FAILED_CONNECT_S
                    raise ManagerUnreachable(self.address, str(error)) from error
                time.sleep(_RETRY_S)
            else:
                self.used_s = time.monotonic()
                return control

    def _ask_acquire(self, digest: str, batch: int, **more: Any) -> ManagerAnswer:
        more["deadline_s"] = current_call.seconds_left()
        timing = current_call.timing()
        if timing is not None:
            more["trace"] = timing.header
        try:
            return self.control.ask(FrameKind.ACQUIRE, {"models": [digest], "batch": batch} | more)
        except RemoteFailure as failure:
            if failure.failure == FailureKind.OVER_QUOTA:
                raise QuotaUsedUp(failure.message) from failure
            raise

    def _known(self) -> list[str]:
        """Return the workers with an open channel; forget those that closed their channels."""
        with self._lock:
            for name, peer in list(self._peers.items()):
                if peer.hung_up():
                    self._peers.pop(name).mark_lost()
            return list(self._peers)

    def forget_worker(self, gpu: str, digest: str) -> None:
        """Ask for the next lease on this GPU: the worker refused the last one."""
        with self._lock:
            self._workers.pop((gpu, digest), None)

    def _peer(self, worker: str) -> WorkerPeer:
        with self._lock:
            peer = self._peers.get(worker)
            if peer is None:
                peer = self._peers[worker] = WorkerPeer(worker, self.node)
            return peer

    def _open(self, answer: ManagerAnswer) -> None:
        """Store the channels that came with an answer; dial them if the manager is remote."""
        fresh = answer.fields.get("fresh", [])
        if self.control.wire.local:
            ends = [socket.socket(fileno=descriptor) for descriptor in answer.descriptors]
        else:
            ends = [self.dial(worker) for worker in fresh]
        for worker, end in zip(fresh, ends, strict=True):
            self._peer(worker).give(DataChannel(FrameSocket(end, eager=True)))

    def dial(self, worker: str) -> socket.socket:
        """Open a connection to the manager that is relayed to this worker."""
        try:
            wire = FrameSocket(connect(self.address))
        except OSError as error:
            raise ConnectionLost(f"{self.address}: {error}") from error
        wire.socket.settimeout(CONNECT_TIMEOUT_S)
        hello: dict[str, Any] = {"credential": self._credential, "session": self.name}
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

    def _reset(self) -> None:
        """Take a new session name and forget all workers: a new connection is a new session."""
        self.name = secrets.token_hex(16)
        for peer in self._peers.values():
            peer.mark_lost()
        self._peers.clear()
        self._workers.clear()
        self.images = {}
