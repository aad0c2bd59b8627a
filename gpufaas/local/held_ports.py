"""Loopback ports that are reserved for a server until their release."""

import socket
from types import TracebackType
from typing import Self

LOOPBACK = "127.0.0.1"


class HeldPort:
    """A loopback port, reserved for one server until `release`.

    A socket of ours is bound to the port with address reuse allowed, and never listens. The kernel
    then assigns the port to no program that requests any port, for listening or for connecting.
    A server that binds this number with address reuse, as servers do, can listen on it repeatedly.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((LOOPBACK, 0))
        self.number: int = self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        """The port as HOST:PORT."""
        return f"{LOOPBACK}:{self.number}"

    @property
    def url(self) -> str:
        """The URL of a plain HTTP server on the port."""
        return f"http://{self.address}"

    def keep(self) -> int:
        """Hold it until this process ends; its number."""
        self._socket.detach()
        return self.number

    def release(self) -> None:
        """Make the port available to other programs, after its server has ended."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
