"""One control connection to a GPU manager: any number of threads ask, one reads the answers."""

import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_shim.errors import ConnectionLost, RemoteFailure, WireError
from torch_shim.wire.dialing import CONNECT_TIMEOUT_S, connect
from torch_shim.wire.frame_socket import Buffer, Frame, FrameSocket
from torch_shim.wire.protocol import VERSION, FrameKind

# How often who waits for an answer asks for a sign of life, and how many may stay away: a manager
# answers at once, however long it takes to answer the request itself.
PING_S = 2.0
_MOST_SILENT = 5
# It reads a piece of weights to its end first, and the last one when it has hashed all of them.
_MOST_SILENT_TAKING = 60
# So long no byte may leave before the manager counts as frozen.
_SEND_TIMEOUT_S = 10
# A manager takes 64 requests at once, and reads nothing more before it has answered one.
_MOST_AT_ONCE = 60


@dataclass(slots=True)
class ManagerAnswer:
    """What the manager answered: fields, and descriptors that are the caller's now."""

    fields: dict[str, Any]
    descriptors: tuple[int, ...] = ()


@dataclass(slots=True)
class _SentRequest:
    """One request on its way."""

    kind: FrameKind
    done: threading.Event = field(default_factory=threading.Event)
    frame: Frame | None = None


class ControlConnection:
    """One control connection of a session; `welcome` is what the manager answered to HELLO.

    A manager that falls silent is given up, as one that hung up is.
    """

    def __init__(self, address: str, credential: str, session: str) -> None:
        self.session = session
        self.welcome: dict[str, Any] = {}
        self.wire = FrameSocket(connect(address))
        seconds = struct.pack("ll", _SEND_TIMEOUT_S, 0)
        self.wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        self._sending = threading.Lock()
        self._room = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._waiting: dict[int, _SentRequest] = {}
        self._numbers = 0
        self._heard = 0
        self._used_s = time.monotonic()
        self.lost: str | None = None  # why there is no connection any more
        threading.Thread(target=self._read, name="gpufaas-control", daemon=True).start()
        hello = {"version": VERSION, "credential": credential, "session": session}
        try:
            answer = self.ask(FrameKind.HELLO, hello | {"pid": os.getpid(), "role": "shim"})
        except BaseException:
            self.close()
            raise
        self.welcome = answer.fields

    def knows(self, kind: FrameKind) -> bool:
        """Whether the manager knows this one of the requests that came later."""
        return kind.name in self.welcome.get("knows", ())

    def ask(
        self,
        kind: FrameKind,
        fields: dict[str, Any],
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
    ) -> ManagerAnswer:
        """Send a request and wait for its answer; RemoteFailure if it is refused."""
        with self._room:
            frame = self._answer(kind, fields, body, descriptors)
        if frame.kind is FrameKind.REFUSED:
            _, failure, message, facts = frame.meta
            raise RemoteFailure(failure, message, facts)
        return ManagerAnswer(frame.meta[1], frame.descriptors)

    def idle_since(self, since_s: float) -> bool:
        """Whether nothing was asked since then, nor is being asked."""
        return self._used_s < since_s and not self._waiting

    def tell(self, kind: FrameKind, fields: dict[str, Any]) -> None:
        """Send something that has no answer."""
        with self._sending:
            if self.lost is not None:
                raise ConnectionLost(self.lost)
            self._send(kind, [0, fields])

    def close(self) -> None:
        """Hang up: the manager ends what this session holds."""
        self._give_up("closed")

    # -- inside ------------------------------------------------------------------------------

    def _answer(
        self,
        kind: FrameKind,
        fields: dict[str, Any],
        body: Sequence[Buffer],
        descriptors: Sequence[int],
    ) -> Frame:
        waiting = _SentRequest(kind)
        self._used_s = time.monotonic()
        with self._sending:
            if self.lost is not None:
                raise ConnectionLost(self.lost)
            self._numbers += 1
            self._waiting[self._numbers] = waiting
            self._send(kind, [self._numbers, fields], body, descriptors)
        self._wait(waiting)
        self._used_s = time.monotonic()
        if waiting.frame is None:
            raise ConnectionLost(self.lost)
        return waiting.frame

    def _wait(self, waiting: _SentRequest) -> None:
        """Until there is an answer, or nobody any more who could give one."""
        if waiting.kind is FrameKind.HELLO:
            if not waiting.done.wait(CONNECT_TIMEOUT_S):
                self._give_up(f"it did not answer within {CONNECT_TIMEOUT_S:g} s")
            return
        if not self.knows(FrameKind.PING):
            waiting.done.wait()
            return
        # Counted, not timed: a process that was stopped itself finds much time gone, and answers.
        heard, silent = self._heard, 0
        while not waiting.done.wait(PING_S):
            if heard != self._heard:
                heard, silent = self._heard, 0
            taking = any(each.kind is FrameKind.CHUNK for each in list(self._waiting.values()))
            if silent >= (_MOST_SILENT_TAKING if taking else _MOST_SILENT):
                self._give_up(f"the manager gave no sign of life for {silent * PING_S:g} s")
                return
            silent += 1
            self.tell(FrameKind.PING, {})

    def _send(
        self,
        kind: FrameKind,
        meta: Any,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        """After half a frame nothing can be said any more."""
        try:
            self.wire.send(kind, meta, body, descriptors)
        except ConnectionLost as error:
            self._give_up(str(error))
            raise

    def _give_up(self, why: str) -> None:
        """The reader finds the connection closed, and tells whoever waits."""
        self.lost = self.lost or why
        try:
            self.wire.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            self.wire.close()  # it was not connected any more

    def _read(self) -> None:
        try:
            while True:
                frame = self.wire.receive()
                self._heard += 1
                if frame.kind is FrameKind.LEASE_ENDED:
                    continue  # the worker says so too, to whoever calls
                if not frame.meta[0]:
                    continue  # the answer to a PING
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
