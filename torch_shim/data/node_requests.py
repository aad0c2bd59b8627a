"""Requests about data, to this node's GPU manager and to those of other nodes."""

import mmap
import os
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from torch_shim.errors import (
    BadFrame,
    DataUnavailable,
    DataUnreachable,
    RemoteFailure,
    WireError,
)
from torch_shim.leases.managers import Nodes
from torch_shim.wire.manager_session import ManagerSession
from torch_shim.wire.protocol import FailureKind, FrameKind
from torch_shim.wire.shared_memory import Buffer

_SENT_PIECE_BYTES = 4 << 20
# What a manager says of data that it has not got; of a lost node it is said here.
GONE = (
    "there is no such data: it was dropped, its time was over, its node or worker is lost, "
    "or it never was this namespace's"
)
_REFUSALS = {FailureKind.NO_DATA, FailureKind.NO_ROOM, FailureKind.NOT_ALLOWED, FailureKind.LOST}

# Fills memory with the bytes that are put.
Fill = Callable[[Buffer], None]


class PutTerms(NamedTuple):
    """How long data lives, and whether the function's caller wished for it, who may be anybody."""

    lifetime_s: float | None = None
    wished: bool = False


class FoundData(NamedTuple):
    """What a manager says of data: a descriptor of its file, or the worker that has it alone.

    A local file's descriptor is the receiver's, who gives the file back. Without either, the bytes
    are to be had in pieces.
    """

    session: ManagerSession
    handle: str
    size_bytes: int
    about: bytes
    worker: str
    descriptor: int | None


class NodeRequests:
    """Requests about data, to this node's manager and to those of other nodes. Thread-safe."""

    def __init__(self, nodes: Callable[[], Nodes]) -> None:
        """`nodes` returns the process's sessions, which a fork and a reset make anew."""
        self._nodes = nodes
        self._returned: deque[tuple[ManagerSession, str]] = deque()

    @property
    def nodes(self) -> Nodes:
        return self._nodes()

    def put(
        self, size_bytes: int, about: bytes, terms: PutTerms, parts: list[str], fill: Fill
    ) -> str:
        """Put bytes into this node's memory; return the handle."""
        session = self.nodes.own
        fields = _fields(size_bytes, about, terms) | ({"parts": parts} if parts else {})
        try:
            answer = session.control.ask(FrameKind.PUT, fields)
            handle: str = answer.fields["handle"]
            if answer.descriptors:
                _fill_file(answer.descriptors[0], size_bytes, fill)
                last = {"handle": handle, "last": True}
                session.control.ask(FrameKind.PIECE, last)
            else:
                _send_pieces(session, handle, size_bytes, fill)
        except (RemoteFailure, WireError) as error:
            _refuse(error)
        return handle

    def put_on_worker(
        self,
        session: ManagerSession,
        size_bytes: int,
        about: bytes,
        terms: PutTerms,
        worker: str,
    ) -> str:
        """Note data that a worker of this manager has; RemoteFailure if it cannot be."""
        fields = _fields(size_bytes, about, terms) | {"worker": worker}
        handle: str = session.control.ask(FrameKind.PUT, fields).fields["handle"]
        return handle

    def find(self, handle: str, *, here: bool = False) -> FoundData:
        """Ask what data is, and, if it is to be `here`, for its bytes."""
        self.flush()
        try:
            answer = self._ask(self.nodes.own, handle, here=here)
        except (RemoteFailure, WireError) as error:
            _refuse(error)
        if isinstance(answer, FoundData):
            return answer
        try:
            second_answer = self._ask(self.nodes.reach(*answer), handle, here=here)
        except RemoteFailure as failure:
            _refuse(failure)
        except WireError as error:
            raise DataUnavailable(GONE) from error
        if not isinstance(second_answer, FoundData):
            raise DataUnavailable(GONE)
        return second_answer

    def content(self, data: FoundData) -> bytearray:
        """Return all bytes of data on another node, which come in pieces."""
        content = bytearray(data.size_bytes)
        try:
            with memoryview(content) as room:
                done = 0
                while done < data.size_bytes:
                    fields = {"handle": data.handle, "offset": done, "here": True}
                    body = data.session.control.ask(FrameKind.GET, fields).body or b""
                    if not body or done + len(body) > data.size_bytes:
                        raise BadFrame(f"a piece of {len(body)} bytes at {done}")
                    room[done : done + len(body)] = body
                    done += len(body)
        except RemoteFailure as failure:
            _refuse(failure)
        except WireError as error:
            raise DataUnavailable(GONE) from error
        return content

    def drop(self, handle: str) -> None:
        """End data; nothing if it has ended."""
        self.flush()
        session = self.nodes.own
        try:
            if handle.rpartition(".")[0] != session.node:
                answer = self._ask(session, handle, here=False)
                if not isinstance(answer, FoundData):
                    session = self.nodes.reach(*answer)
            session.control.notify(FrameKind.DISCARD, {"handle": handle})
        except RemoteFailure as failure:
            if failure.failure != FailureKind.NO_DATA:
                _refuse(failure)
        except WireError as error:
            _refuse(error)

    def give_back(self, session: ManagerSession, handle: str) -> None:
        """Note that a file is not mapped here any more; safe in a finalizer."""
        self._returned.append((session, handle))

    def flush(self) -> None:
        """Say which files are not mapped any more."""
        while self._returned:
            session, handle = self._returned.popleft()
            if session.connected:
                try:
                    session.control.notify(FrameKind.RETURN, {"handle": handle})
                except WireError:
                    continue  # the session has ended, and what it read with it

    def _ask(
        self, session: ManagerSession, handle: str, *, here: bool
    ) -> FoundData | tuple[list[str], str]:
        answer = session.control.ask(FrameKind.GET, {"handle": handle, "here": here})
        elsewhere = answer.fields.get("elsewhere")
        if elsewhere is not None:
            return elsewhere["addresses"], elsewhere["node"]
        descriptor = answer.descriptors[0] if answer.descriptors else None
        size, about = answer.fields.get("size"), answer.fields.get("about")
        worker = answer.fields.get("worker", "")
        if type(size) is not int or size < 0 or not isinstance(about, bytes):
            if descriptor is not None:
                os.close(descriptor)
            raise BadFrame("an answer about data of unknown shape")
        return FoundData(session, handle, size, about, str(worker), descriptor)


def _fields(size_bytes: int, about: bytes, terms: PutTerms) -> dict[str, object]:
    fields: dict[str, object] = {"size": size_bytes, "about": about}
    if terms.lifetime_s is not None:
        fields["lifetime_s"] = float(terms.lifetime_s)
    return fields | ({"wished": True} if terms.wished else {})


def _fill_file(descriptor: int, size_bytes: int, fill: Fill) -> None:
    try:
        if size_bytes:
            # All pages at once: a fault for each of them takes longer than the copy.
            how = mmap.MAP_SHARED | mmap.MAP_POPULATE
            with mmap.mmap(descriptor, size_bytes, flags=how) as memory:
                fill(memory)
    finally:
        os.close(descriptor)


def _send_pieces(session: ManagerSession, handle: str, size_bytes: int, fill: Fill) -> None:
    content = bytearray(size_bytes)
    if size_bytes:
        fill(content)
    whole = memoryview(content)
    for offset in range(0, max(size_bytes, 1), _SENT_PIECE_BYTES):
        piece = whole[offset : offset + _SENT_PIECE_BYTES]
        last = offset + len(piece) >= size_bytes
        fields = {"handle": handle, "offset": offset, "last": last}
        session.control.ask(FrameKind.PIECE, fields, (piece,))


def _refuse(error: RemoteFailure | WireError) -> NoReturn:
    """Raise what the function is told: of data that is not there one text, whatever the reason."""
    if isinstance(error, RemoteFailure):
        if error.failure not in _REFUSALS:
            raise error
        raise DataUnavailable(error.message) from error
    raise DataUnreachable(f"this node's GPU manager cannot be reached: {error}") from error
