"""A data channel, by which one thread at a time defines, binds and runs programs on a worker."""

import socket
from collections.abc import Iterator, Sequence
from typing import Any

from torch_shim.errors import BadFrame, ConnectionLost, RemoteFailure
from torch_shim.wire.arena import Arena
from torch_shim.wire.bounded_msgpack import shown
from torch_shim.wire.frame_socket import Buffer, Frame, FrameSocket
from torch_shim.wire.protocol import MOST_BINDINGS, FrameKind


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
            self._ask(FrameKind.ARENA, [arena.size_bytes], descriptors=[arena.descriptor])
            arena.forget_descriptor()
            self.arena = arena
        return arena

    def define(self, number: int, digest: str, packed: bytes) -> None:
        """Send a program to the worker, once."""
        if number not in self.defined:
            self._ask(FrameKind.DEFINE, [number, digest], [packed])
            self.defined.add(number)

    def bind(self, number: int, binding: int, tensors: dict[int, Any]) -> None:
        """Send a program's binding, its constant inputs, unless the worker still has it."""
        known = self.bound.setdefault(number, [])
        if binding in known:
            known.remove(binding)
        else:
            self._ask(FrameKind.BIND, [number, binding, tensors])
        known.append(binding)
        del known[:-MOST_BINDINGS]

    def call(self, meta: list[Any], body: Sequence[Buffer]) -> Frame:
        """Run a program; raise RemoteFailure with the worker's reason if the call fails."""
        return self._ask(FrameKind.CALL, meta, body)

    def fetch(self, key: int, epoch: int, *, gives_back: bool = False) -> Frame:
        """Return the bytes of a kept storage, as a descriptor or the body; RemoteFailure if the
        worker does not have them. With `gives_back` the file may be one to be given back."""
        return self._ask(FrameKind.FETCH, [key, epoch, *([True] if gives_back else [])])

    def share(self, key: int, size_bytes: int, descriptor: int) -> None:
        """Have the worker map a block of this process's memory."""
        self._ask(FrameKind.SHARE, [key, size_bytes], descriptors=[descriptor])

    def publish(self, key: int, epoch: int, handle: str, about: bytes) -> None:
        """Let other functions use a kept storage, by the handle of its data."""
        self._ask(FrameKind.PUBLISH, [key, epoch, handle, about])

    def put(self, key: int, epoch: int, about: bytes, lifetime_s: float | None) -> str:
        """Let other functions use a kept storage; return its handle.

        RemoteFailure if the manager has to be asked.
        """
        lifetime = [] if lifetime_s is None else [float(lifetime_s)]
        match self._ask(FrameKind.PUBLISH, [key, epoch, about, *lifetime]).meta:
            case [str(handle)]:
                return handle
            case other:
                raise BadFrame(f"the answer to PUBLISH: {shown(other)}")

    def take(self, handle: str, key: int) -> tuple[int, bytes]:
        """Have the worker keep data that was published there, under this key.

        Return its size and its description.
        """
        match self._ask(FrameKind.TAKE, [handle, key]).meta:
            case [int(size_bytes), bytes(about)] if size_bytes > 0:
                return size_bytes, about
            case other:
                raise BadFrame(f"the answer to TAKE: {shown(other)}")

    def take_file(self, key: int, start: int, size_bytes: int, descriptor: int) -> None:
        """Have the worker keep data that lies in a file, under this key."""
        self._ask(FrameKind.TAKE, [key, start, size_bytes], descriptors=[descriptor])

    def drop(self, keys: list[int]) -> None:
        """Make the worker drop kept storages."""
        self._ask(FrameKind.DROP, keys)

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
        found, self._last = self._last, None
        while found is None:
            try:
                self.wire.socket.settimeout(patience_s)
                frame = self.wire.receive()
            except (ConnectionLost, BadFrame, OSError):
                return None
            found = frame if frame.kind is FrameKind.LEFT else None
        return found

    def close(self) -> None:
        """Close the socket; the worker then frees the channel's memory."""
        self.broken = True
        self.wire.close()
        if self.arena is not None:
            self.arena.close()

    def _ask(
        self,
        kind: FrameKind,
        meta: Any,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
    ) -> Frame:
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


def read_left(meta: Any, size_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield key, epoch, offset and size of each storage in a worker's last frame."""
    for entry in meta if isinstance(meta, list) else []:
        match entry:
            case [int(key), int(epoch), int(offset), int(size)] if (
                min(offset, size) >= 0 and offset + size <= size_bytes
            ):
                yield key, epoch, offset, size
            case _:
                raise BadFrame(f"what a worker left: {shown(entry)}")
