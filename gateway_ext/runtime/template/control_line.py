"""The template's end of its line to the gateway: orders with descriptors come, reports go."""

import array
import json
import os
import socket
from typing import Any, NamedTuple

_MOST_BYTES = 64 << 10
_MOST_DESCRIPTORS = 4


class ForkOrder(NamedTuple):
    """One order: what the new process is to be, its name, its variables and its descriptors.

    `descriptors` are the new process's own line, the pipe for its output, which no worker has,
    and for an instance or a worker the socket that it serves.
    """

    kind: str  # "serve", "warm" or "spare"; of several workers "worker" or "warm at once"
    name: str
    environment: dict[str, str]
    descriptors: list[int]


class ControlLine:
    """A socket that keeps the bounds of messages; whoever made the process has the other end."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._socket = socket.socket(fileno=descriptor)
        os.set_inheritable(descriptor, False)

    def report(self, **fields: str) -> None:
        """Send a report; texts are cut to what the gateway reads."""
        cut = {name: value[:500] for name, value in fields.items()}
        self._socket.sendall(json.dumps(cut).encode())

    def order(self) -> ForkOrder | None:
        """Wait for the next order; None once the gateway has closed the line."""
        room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
        data, ancillary, _, _ = self._socket.recvmsg(_MOST_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return None
        fields: dict[str, Any] = json.loads(data)
        found = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found.frombytes(content)
        return ForkOrder(
            fields["kind"], fields["name"], dict(fields["environment"]), found.tolist()
        )

    def confirmed(self) -> bool:
        """Wait until this process may go on; False if nobody wants it any more."""
        return bool(self._socket.recv(16))

    def give_away(self) -> socket.socket:
        """The socket, for other messages from now on."""
        return self._socket

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
