"""The gateway's end of the line to a template: what comes over it is not trusted.

Every message has a bound, must be one of those expected, and comes with the sender's process id,
which the kernel adds.
"""

import array
import asyncio
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Self

_MOST_BYTES = 8 << 10
_MOST_TEXT = 500
_CREDENTIALS = struct.Struct("=iII")
_ROOM = socket.CMSG_SPACE(_CREDENTIALS.size)
# Not in Python's module before 3.13.
_PASS_CREDENTIALS, _SENT_CREDENTIALS = 16, 2


class TemplateLineBroken(Exception):
    """The other end has closed its line, or sent what it must not."""


class TemplateReport(NamedTuple):
    """A report, with the id of the process that sent it."""

    state: str
    why: str
    pid: int


class TemplateLine:
    """A socket pair; the other end goes to a process with an order, or at its start."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._ours.setsockopt(socket.SOL_SOCKET, _PASS_CREDENTIALS, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def order(
        self, kind: str, name: str, environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> None:
        """Send an order; TemplateLineBroken if the template does not take it at once."""
        message = {"kind": kind, "name": name, "environment": dict(environment)}
        rights = array.array("i", descriptors)
        try:
            self._ours.sendmsg(
                [json.dumps(message).encode()],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)],
            )
        except OSError as error:
            raise TemplateLineBroken(f"took no order: {error}") from error

    def confirm(self) -> None:
        """Let a new process go on: one that is not confirmed ends."""
        with suppress(OSError):  # it has ended, which its keeper reports
            self._ours.send(b"go")

    async def report(self, within_s: float) -> TemplateReport:
        """Wait for the next report; TemplateLineBroken, or TimeoutError."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._ours, readable.set)
        try:
            await asyncio.wait_for(readable.wait(), within_s)
        finally:
            loop.remove_reader(self._ours)
        return self._received()

    async def closed(self) -> None:
        """Return when anything comes, the end of the line included: nothing is expected now."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._ours, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._ours)

    def close(self) -> None:
        """Close both ends."""
        self._ours.close()
        self.theirs.close()

    def _received(self) -> TemplateReport:
        try:
            data, ancillary, flags, _ = self._ours.recvmsg(_MOST_BYTES, _ROOM)
        except OSError as error:
            raise TemplateLineBroken(f"broke off: {error}") from error
        _close_rights(ancillary)
        if not data:
            raise TemplateLineBroken("ended")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise TemplateLineBroken("sent too much")
        sent = [content for level, kind, content in ancillary if kind == _SENT_CREDENTIALS]
        try:
            fields = json.loads(data)
            state, why = str(fields["state"]), str(fields["why"])[:_MOST_TEXT]
            pid, _, _ = _CREDENTIALS.unpack(sent[0])
        except (ValueError, LookupError, TypeError, RecursionError, struct.error) as error:
            raise TemplateLineBroken("sent what is no report") from error
        return TemplateReport(state, why, pid)


def _close_rights(ancillary: Sequence[tuple[int, int, bytes]]) -> None:
    """Close descriptors that were sent: a report has none."""
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found = array.array("i")
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
            for descriptor in found:
                os.close(descriptor)
