"""The line to a template: orders with descriptors go one way, reports come back.

Whoever orders forks trusts nothing that comes over it: every report has a bound, must be one of
those expected, and comes with the sender's process id, which the kernel adds.
"""

import array
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

# The variable that names a template's descriptor of its line.
VARIABLE = "GPUFAAS_TEMPLATE"
_MOST_REPORT_BYTES, _MOST_ORDER_BYTES = 8 << 10, 64 << 10
_MOST_TEXT = 500
_MOST_DESCRIPTORS = 4
_CREDENTIALS = struct.Struct("=iII")
# Not in Python's module before 3.13.
_PASS_CREDENTIALS, _SENT_CREDENTIALS = 16, 2


class TemplateBroken(ConnectionError):
    """The template cannot be used any more: it has ended, hangs, or breaks the rules."""


class ForkOrder(NamedTuple):
    """One order: what the new process is to be, its name, its variables and its descriptors.

    `descriptors` are the new process's own line, the pipe for its output, which no worker has,
    and for an instance or a worker the socket that it serves.
    """

    kind: str  # "serve", "warm" or "spare"; of several workers "worker" or "warm at once"
    name: str
    environment: dict[str, str]
    descriptors: list[int]


class ForkReport(NamedTuple):
    """A report, with the id of the process that sent it."""

    state: str
    why: str
    pid: int


class OrderLine:
    """A socket pair: `socket` is of whoever orders; `theirs` goes to a process at its start."""

    def __init__(self) -> None:
        self.socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.SOL_SOCKET, _PASS_CREDENTIALS, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def order(
        self, kind: str, name: str, environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> "OrderLine":
        """Order a process; the line to it. TemplateBroken if the order is not taken at once."""
        message = {"kind": kind, "name": name, "environment": dict(environment)}
        line = OrderLine()
        with line.theirs as theirs:
            rights = array.array("i", [theirs.fileno(), *descriptors])
            try:
                self.socket.sendmsg(
                    [json.dumps(message).encode()],
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)],
                )
            except OSError as error:
                line.close()
                raise TemplateBroken(f"took no order: {error}") from error
        return line

    def received(self, *expected: str) -> ForkReport:
        """The report that has come; TemplateBroken unless its state is one of those expected."""
        room = socket.CMSG_SPACE(_CREDENTIALS.size)
        try:
            data, ancillary, flags, _ = self.socket.recvmsg(_MOST_REPORT_BYTES, room)
        except OSError as error:
            raise TemplateBroken(f"broke off: {error}") from error
        for descriptor in _rights(ancillary):  # a report has none
            os.close(descriptor)
        if not data:
            raise TemplateBroken("ended")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise TemplateBroken("sent too much")
        sent = [content for _, kind, content in ancillary if kind == _SENT_CREDENTIALS]
        try:
            fields = json.loads(data)
            state, why = str(fields["state"]), str(fields["why"])[:_MOST_TEXT]
            pid, _, _ = _CREDENTIALS.unpack(sent[0])
        except (ValueError, LookupError, TypeError, RecursionError, struct.error) as error:
            raise TemplateBroken("sent what is no report") from error
        if state not in expected:
            raise TemplateBroken("sent a report that nobody expects")
        return ForkReport(state, why, pid)

    def confirm(self) -> None:
        """Let a new process go on: one that is not confirmed ends."""
        with suppress(OSError):  # it has ended, which its parent notices
            self.socket.send(b"go")

    def close(self) -> None:
        self.socket.close()
        self.theirs.close()


class ControlLine:
    """The template's end; whoever made the process has the other one."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._socket = socket.socket(fileno=descriptor)
        os.set_inheritable(descriptor, False)

    def report(self, **fields: str) -> None:
        """Send a report; texts are cut to what is read of them."""
        cut = {name: value[:_MOST_TEXT] for name, value in fields.items()}
        self._socket.sendall(json.dumps(cut).encode())

    def order(self) -> ForkOrder | None:
        """Wait for the next order; None once the other end is closed."""
        room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
        data, ancillary, _, _ = self._socket.recvmsg(
            _MOST_ORDER_BYTES, room, socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            return None
        fields: dict[str, Any] = json.loads(data)
        return ForkOrder(
            fields["kind"], fields["name"], dict(fields["environment"]), _rights(ancillary)
        )

    def confirmed(self) -> bool:
        """Wait until this process may go on; False if nobody wants it any more."""
        return bool(self._socket.recv(16))

    def give_away(self) -> socket.socket:
        """The socket, for other messages from now on."""
        return self._socket

    def close(self) -> None:
        self._socket.close()


def _rights(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return descriptors.tolist()
