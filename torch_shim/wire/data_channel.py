"""A data channel, by which one thread at a time defines, binds and runs programs on a worker."""

import socket
from collections.abc import Sequence
from typing import Any

from torch_shim.errors import BadFrame, RemoteFailure
from torch_shim.wire.arena import Arena
from torch_shim.wire.frame_socket import Buffer, Frame, FrameSocket
from torch_shim.wire.protocol import FrameKind


class DataChannel:
    """One stream to a worker, and the programs and bindings that were sent on it."""

    def __init__(self, wire: FrameSocket) -> None:
        self.wire = wire
        self.broken = False
        self.arena: Arena | None = None
        self.defined: set[int] = set()
        self.bound: dict[int, int] = {}

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
        """Send a program's binding, its constant inputs, to the worker if it has changed."""
        if self.bound.get(number) != binding:
            self._ask(FrameKind.BIND, [number, binding, tensors])
            self.bound[number] = binding

    def call(self, meta: list[Any], body: Sequence[Buffer]) -> Frame:
        """Run a program; raise RemoteFailure with the worker's reason if the call fails."""
        return self._ask(FrameKind.CALL, meta, body)

    def drop(self, keys: list[int]) -> None:
        """Make the worker drop kept storages."""
        self._ask(FrameKind.DROP, keys)

    def hung_up(self) -> bool:
        """Whether the worker has closed this channel; for a channel that is not in use."""
        try:
            return not self.wire.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

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
        if frame.kind is FrameKind.FAILED:
            self.broken = False
            raise RemoteFailure(*frame.meta)
        if frame.kind is not (FrameKind.RESULT if kind is FrameKind.CALL else FrameKind.DONE):
            raise BadFrame(f"{frame.kind.name} as the answer to {kind.name}")
        self.broken = False
        return frame
