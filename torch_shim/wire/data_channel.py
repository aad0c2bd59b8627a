"""One stream to a worker, on which one thread at a time asks and is answered."""

import mmap
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from torch_shim.errors import BadFrame, ConnectionLost, RemoteFailure
from torch_shim.wire.messages import Fetch, SentTensor
from torch_shim.wire.protocol import (
    MOST_BINDINGS,
    Buffer,
    Frame,
    FrameKind,
    FrameSocket,
    pack_frame,
)
from torch_shim.wire.shared_memory import make_arena

_CALLS = (FrameKind.CALL, FrameKind.CALL_AGAIN)


class DataChannel:
    """One stream to a worker, and the programs and bindings that were sent on it."""

    def __init__(self, wire: FrameSocket) -> None:
        self.wire = wire
        self.broken = False
        self.idle_since_s = 0.0  # while no thread uses it
        self.arena: mmap.mmap | None = None
        self.defined: set[int] = set()
        self.bound: dict[int, list[int]] = {}  # of each program, the latest last
        self.recordings: Any = None  # calls that are recorded with the arena
        self._last: Frame | None = None

    def room(self, size_bytes: int) -> mmap.mmap:
        """Return an arena of at least this size, shared with the worker."""
        if self.arena is None or len(self.arena) < size_bytes:
            descriptor, arena = make_arena(size_bytes)
            try:
                self.ask(FrameKind.ARENA, [len(arena)], descriptors=[descriptor])
            finally:
                os.close(descriptor)
            self.arena, self.recordings = arena, None
        return self.arena

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
        self.recordings = None

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

    def ask(
        self,
        kind: FrameKind,
        meta: Any,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
        meanwhile: Callable[[], object] | None = None,
    ) -> Frame:
        """Send a request, and return its answer; raise RemoteFailure if the worker refuses it.

        `meanwhile` is called while the worker works on it.
        """
        self.broken = True  # until the answer has been read completely: an interrupt may intervene
        self.wire.send(kind, meta, body, descriptors)
        if meanwhile is not None:
            meanwhile()
        answers = FrameKind.RESULT if kind in _CALLS else FrameKind.DONE
        frame = self._checked(self.wire.receive(), answers)
        self.broken = False
        return frame

    def run_again(self, packed: bytes, usual: bytes) -> None:
        """Have a recorded call run, whose frame and usual answer are these; else as `ask`."""
        self.broken = True
        self.wire.send_packed(packed)
        frame = self.wire.receive_unless(usual)
        if frame is not None:  # it may have come in pieces
            frame = self._checked(frame, FrameKind.RAN_AGAIN)
            if pack_frame(frame.kind, frame.meta) != usual:
                raise BadFrame(f"another recorded call was answered: {frame.meta}")
        self.broken = False

    def _checked(self, frame: Frame, wanted: FrameKind) -> Frame:
        if frame.kind is FrameKind.LEFT:
            self._last = frame
            raise ConnectionLost("the worker ends")
        if frame.kind is FrameKind.FAILED:
            self.broken = False
            raise RemoteFailure(*frame.meta)
        if frame.kind is not wanted:
            raise BadFrame(f"{frame.kind.name} instead of {wanted.name}")
        return frame
