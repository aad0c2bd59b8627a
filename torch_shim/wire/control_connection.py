"""One connection to a GPU manager, on which requests are answered in any order."""

import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_shim.errors import ConnectionLost, OtherVersion, RemoteFailure, WireError
from torch_shim.wire.connections import CONNECT_TIMEOUT_S, connect
from torch_shim.wire.protocol import Buffer, Frame, FrameKind, FrameSocket

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
