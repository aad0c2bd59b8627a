"""One worker as this process sees it: the channels to it, and the storages that it keeps."""

import logging
import mmap
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from torch_shim.errors import BadFrame, ConnectionLost, RemoteFailure
from torch_shim.wire.frame_socket import Frame, FrameSocket
from torch_shim.wire.messages import Done, Fetch, SentTensor
from torch_shim.wire.protocol import MOST_BINDINGS, Buffer, FailureKind, FrameKind
from torch_shim.wire.shared_memory import Arena, LentPages, SharedBlock, shared_blocks

log = logging.getLogger("torch_shim")


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


class DataChannel:
    """One stream to a worker, and the programs and bindings that were sent on it."""

    def __init__(self, wire: FrameSocket) -> None:
        self.wire = wire
        self.broken = False
        self.idle_since_s = 0.0  # while no thread uses it
        self.arena: Arena | None = None
        self.defined: set[int] = set()
        self.bound: dict[int, list[int]] = {}  # of each program, the latest last
        self._last: Frame | None = None

    def room(self, size_bytes: int) -> Arena:
        """Return an arena of at least this size, shared with the worker."""
        arena = self.arena
        if arena is None or arena.size_bytes < size_bytes:
            arena = Arena(size_bytes)
            self.ask(FrameKind.ARENA, [arena.size_bytes], descriptors=[arena.descriptor])
            arena.forget_descriptor()
            self.arena = arena
        return arena

    def define(self, number: int, digest: str, packed: bytes) -> None:
        if number not in self.defined:
            self.ask(FrameKind.DEFINE, [number, digest], [packed])
            self.defined.add(number)

    def bind(self, number: int, binding: int, tensors: dict[int, SentTensor]) -> None:
        """Send a program's binding, its constant inputs, unless the worker still has it."""
        bindings = self.bound.setdefault(number, [])
        if binding in bindings:
            bindings.remove(binding)
        else:
            self.ask(FrameKind.BIND, (number, binding, tensors))
        bindings.append(binding)
        del bindings[:-MOST_BINDINGS]

    def forget(self, number: int) -> None:
        """Send a program and its bindings again: the worker lacks something of them."""
        self.defined.discard(number)
        self.bound.pop(number, None)

    def fetch(self, key: int, epoch: int, *, gives_back: bool = False) -> Frame:
        """Return the bytes of a kept storage, as a descriptor or the body; RemoteFailure if the
        worker does not have them. With `gives_back` the file may be one to be given back."""
        return self.ask(FrameKind.FETCH, Fetch(key, epoch, gives_back))

    def hung_up(self) -> bool:
        """Whether the worker has closed this channel; for a channel that is not in use."""
        try:
            self.wire.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True  # nothing comes unasked but the last frame of a worker that ends

    def last_frame(self, patience_s: float) -> Frame | None:
        """Return what a worker that ends sends on one of its channels; None if it is not here."""
        last, self._last = self._last, None
        while last is None:
            try:
                self.wire.socket.settimeout(patience_s)
                frame = self.wire.receive()
            except (ConnectionLost, BadFrame, OSError):
                return None
            last = frame if frame.kind is FrameKind.LEFT else None
        return last

    def close(self) -> None:
        """Close the socket; the worker then frees the channel's memory."""
        self.broken = True
        self.wire.close()
        if self.arena is not None:
            self.arena.close()

    def ask(
        self,
        kind: FrameKind,
        meta: Any,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
    ) -> Frame:
        """Send a request, and return its answer; raise RemoteFailure if the worker refuses it."""
        self.broken = True  # until the answer has been read completely: an interrupt may intervene
        self.wire.send(kind, meta, body, descriptors)
        frame = self.wire.receive()
        if frame.kind is FrameKind.LEFT:
            self._last = frame
            raise ConnectionLost("the worker ends")
        if frame.kind is FrameKind.FAILED:
            self.broken = False
            raise RemoteFailure(*frame.meta)
        if frame.kind is not (FrameKind.RESULT if kind is FrameKind.CALL else FrameKind.DONE):
            raise BadFrame(f"{frame.kind.name} as the answer to {kind.name}")
        self.broken = False
        return frame


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
        self._lost = False
        self._dropped: deque[int] = deque()
        # What the worker had when it ended: epoch and bytes by key.
        self._left: dict[int, tuple[int, memoryview]] = {}

    def take(self) -> DataChannel | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def give(self, channel: DataChannel) -> None:
        with self._lock:
            if not channel.broken and not self._lost:
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
            self._lost = True
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
            self._changed.wait_for(lambda: self._idle or self._lost)
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
