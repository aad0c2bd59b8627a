"""The process's session with one GPU manager: its leases, their workers, channels to those."""

import logging
import mmap
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch_shim.errors import (
    BadFrame,
    ConnectionLost,
    ManagerUnreachable,
    QuotaUsedUp,
    RemoteFailure,
)
from torch_shim.process_report import report
from torch_shim.wire import current_call
from torch_shim.wire.connections import CONNECT_TIMEOUT_S, connect
from torch_shim.wire.control_connection import ControlConnection, ManagerAnswer
from torch_shim.wire.data_channel import DataChannel
from torch_shim.wire.messages import Done
from torch_shim.wire.protocol import (
    FailureKind,
    Frame,
    FrameKind,
    FrameSocket,
)
from torch_shim.wire.shared_memory import LentPages, SharedBlock, shared_blocks

log = logging.getLogger("gpufaas")

_RETRY_S = 0.1
_MOST_WORKERS = 256  # that leases are expected on
_MOST_IMAGES = 4096  # that a session remembers; others are offered again
# After a failed connect that waited this long, further attempts fail at once for this long:
# otherwise threads that queue for the connection would each wait in turn.
FAILED_CONNECT_S = 1.0

# What names the content of a storage of this process: its write epoch, autograd's count of writes.
Content = tuple[int, int]

# How long a worker that ends may take to send what only it has.
_LEAVING_S = 3.0
_MOST_DROPPED = 1 << 14  # keys in one message, whose lists are bounded


class Fetched(NamedTuple):
    """Bytes that a worker had: in a file to be mapped, whose descriptor the receiver closes, or
    in a buffer to be copied. Who maps a file holds `lent` meanwhile. What the worker sent as it
    ended was `left`."""

    descriptor: int | None
    memory: memoryview
    lent: LentPages | None = None
    left: bool = False


class WorkerStorages:
    """The storages that one worker keeps for this session, by key.

    An entry has the epoch and version of this process's storage when both copies were equal, and
    the worker's epoch.
    """

    def __init__(self) -> None:
        self.epochs: dict[int, tuple[Content, int]] = {}
        self.sent: dict[int, Content] = {}

    def result(self, key: int, content: Content) -> None:
        """Record that the worker keeps a result under this key, with epoch 0."""
        self.epochs[key] = (content, 0)

    def forget(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.epochs.pop(key, None)
            self.sent.pop(key, None)


class WorkerPeer:
    """One worker: the idle channels to it, and the storages that it keeps for this process."""

    def __init__(self, name: str, node: str) -> None:
        self.name = name
        self.node = node
        self.kept = WorkerStorages()
        self._maps_blocks = True  # until it has no room for another one
        self._blocks: set[int] = set()  # that the worker maps
        self.sole: set[int] = set()  # the keys of storages whose bytes only the worker has
        self._idle: list[DataChannel] = []
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.lost = False
        self._dropped: deque[int] = deque()
        # What the worker had when it ended: epoch and bytes by key.
        self._left: dict[int, tuple[int, memoryview]] = {}

    def take(self) -> DataChannel | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def give(self, channel: DataChannel) -> None:
        with self._lock:
            if not channel.broken and not self.lost:
                channel.idle_since_s = time.monotonic()
                self._idle.append(channel)
                self._changed.notify()
                return
        self._close(channel)

    @property
    def has_unused(self) -> bool:
        """Whether more than one channel is idle."""
        return len(self._idle) > 1

    def close_unused(self, since_s: float) -> bool:
        """Close the channels that no thread has needed since then, but keep one that is idle.

        Each costs the worker a thread, and the manager two sockets if it is on another machine.
        Return whether others are unused.
        """
        with self._lock:
            count = sum(channel.idle_since_s < since_s for channel in self._idle[:-1])
            unused, self._idle = self._idle[:count], self._idle[count:]
        for channel in unused:
            channel.close()
        return self.has_unused

    def mark_lost(self) -> None:
        with self._lock:
            self.lost = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for channel in idle:
            self._close(channel)

    def hung_up(self) -> bool:
        with self._lock:
            return bool(self._idle) and self._idle[0].hung_up()

    def waits(self) -> bool:
        """Whether a channel is idle, and the worker there."""
        with self._changed:
            return bool(self._idle) and not self._idle[-1].hung_up()

    def close_copies(self) -> None:
        """Close a forked child's copies of the channels without sending anything on them."""
        for channel in self._idle:
            channel.wire.socket.close()

    def drop(self, key: int) -> None:
        """Note that the function needs a storage no more; safe in a finalizer."""
        self.sole.discard(key)
        self._dropped.append(key)

    def lent(self, number: int) -> LentPages | None:
        """Return what to hold while a file is mapped that came with an answer and has a number."""
        return LentPages(partial(self.drop, -number)) if number else None

    def share(self, block: SharedBlock, channel: DataChannel) -> bool:
        """Have the worker map a block, unless it does already; whether calls may name it."""
        if not self._maps_blocks or not channel.wire.local:
            return False
        if block.key not in self._blocks:
            try:
                shared = [block.key, block.size_bytes]
                channel.ask(FrameKind.SHARE, shared, descriptors=[block.descriptor])
            except RemoteFailure as refused:  # it has no room for the mapping: send it all copies
                log.warning("a worker maps no further memory of this function: %s", refused)
                self._maps_blocks = False
                return False
            self._blocks.add(block.key)
            block.forget.append(self._forget_block)
        return True

    def is_with(self, peer: Any) -> bool:
        """Whether bytes that this worker has are used by that one where they are."""
        return peer is self

    def _forget_block(self, key: int) -> None:
        self._blocks.discard(key)
        self._dropped.append(key)

    @property
    def has_dropped(self) -> bool:
        """Whether keys were noted that a call is to send."""
        return bool(self._dropped)

    def take_dropped(self) -> list[int]:
        """Return keys noted since, for the caller to send; they are forgotten here."""
        taken: list[int] = []
        while self._dropped and len(taken) < _MOST_DROPPED:
            taken.append(self._dropped.popleft())
        self.kept.forget(taken)
        return taken

    def send_dropped(self) -> None:
        """Send the keys noted since, if a channel is idle: no call may follow for long."""
        shared_blocks.trim()
        channel = self.take() if self._dropped else None
        if channel is None:
            return
        try:
            channel.ask(FrameKind.DROP, self.take_dropped())
        except ConnectionLost:
            self.mark_lost()  # and with the worker went what it kept
        finally:
            self.give(channel)

    @contextmanager
    def channel_for(self, channel: DataChannel | None) -> Iterator[DataChannel | None]:
        """Yield this channel, or else an idle one; wait for one. None if the worker is lost."""
        if channel is not None:
            yield channel
            return
        with self._lock:
            self._changed.wait_for(lambda: self._idle or self.lost)
            borrowed = self._idle.pop() if self._idle else None
        try:
            yield borrowed
        finally:
            if borrowed is not None:
                self.give(borrowed)

    def fetch(self, key: int, channel: DataChannel | None) -> Fetched:
        """Return the bytes of a storage that only the worker has; RemoteFailure if they are lost.

        Without a channel, what the worker sent when it ended is all there is.
        """
        if channel is None:
            return self._fetch_left(key)
        _, epoch = self.kept.epochs.get(key, (None, -1))  # an epoch that no worker has: it is lost
        try:
            frame = channel.fetch(key, epoch, gives_back=True)
        except ConnectionLost:
            self._close(channel)
            self.mark_lost()
            return self._fetch_left(key)
        try:
            answer: Done = frame.meta
        except BadFrame:
            frame.close_descriptors()
            raise
        lent = self.lent(answer.file)
        self.sole.discard(key)
        return Fetched(frame.descriptors[0] if frame.descriptors else None, frame.body, lent)

    def _fetch_left(self, key: int) -> Fetched:
        epoch, content = self._left.pop(key, (-1, memoryview(b"")))
        self.sole.discard(key)
        # Another epoch: a call whose answer did not come has written to it already.
        if epoch != self.kept.epochs.get(key, (None, None))[1]:
            message = "the worker has ended, and with it a tensor that only it had"
            raise RemoteFailure(FailureKind.LOST, message, {"key": key})
        return Fetched(None, content, left=True)

    def _close(self, channel: DataChannel) -> None:
        """Close a channel; a worker that ends in good order sends first what only it has."""
        if self.sole - self._left.keys():
            frame = channel.last_frame(_LEAVING_S)
            if frame is not None:
                with suppress(BadFrame):  # what cannot be read is lost with the worker
                    self._take_left(frame)
        channel.close()

    def _take_left(self, frame: Frame) -> None:
        if frame.descriptors:
            try:
                size = os.fstat(frame.descriptors[0]).st_size
                whole = memoryview(mmap.mmap(frame.descriptors[0], size, flags=mmap.MAP_PRIVATE))
            finally:
                frame.close_descriptors()
        else:
            whole = frame.body
        for key, epoch, offset, size in frame.meta:
            if offset + size > len(whole):
                raise BadFrame(f"what a worker left: {size} bytes at {offset} of {len(whole)}")
            self._left[key] = epoch, whole[offset : offset + size]


@dataclass(slots=True, eq=False)
class ModelLease:
    """The right to run one model's graphs on the worker that holds the model, until `over`."""

    number: int
    digest: str
    peer: WorkerPeer
    session: "ManagerSession"
    over: bool = False

    @property
    def in_force(self) -> bool:
        """Whether this process believes so: a session that lost its connection lost its workers."""
        return not self.over and not self.peer.lost


@dataclass(frozen=True, slots=True)
class LeaseElsewhere:
    """A lease that was granted on another node, with the token that claims it there."""

    number: int
    node: str
    addresses: tuple[str, ...]
    token: str


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
        return ModelLease(answer.fields["lease"], digest, self._peer(worker), self)

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
        return ModelLease(number, digest, peer, self)

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
        held = [lease for lease in leases if lease.in_force]
        for lease in leases:
            lease.over = True
        if held and control is not None:
            given_back = {"lease": held[0].number, "may_return": True, "request": request}
            control.notify(FrameKind.RELEASE, given_back)

    def channel(self, lease: ModelLease, batch: int) -> DataChannel | None:
        """Return a channel of this lease for one call; None if the lease has ended."""
        channel = self.idle_channel(lease)
        if channel is None:
            try:
                answer = self._ask_acquire(lease.digest, batch, lease=lease.number, workers=())
            except RemoteFailure as failure:
                if failure.failure == FailureKind.LEASE:
                    return None
                raise
            self._open(answer)
            if answer.fields["lease"] == lease.number:
                channel = self.idle_channel(lease)
        return channel

    def idle_channel(self, lease: ModelLease) -> DataChannel | None:
        """Return a channel of this lease for one call; None if none is idle."""
        channel = lease.peer.take()
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
                if peer.lost or peer.hung_up():
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
