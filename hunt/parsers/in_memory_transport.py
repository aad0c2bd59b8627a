"""A transport without a socket: what a protocol writes goes nowhere, what it closes is closed."""

import asyncio
from typing import Any


class InMemoryTransport(asyncio.Transport):
    """Ends the protocol's connection in the next step of the loop, as a socket's would."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._protocol = protocol
        self._is_closing = False
        protocol.connection_made(self)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """A peer of this machine, and no socket."""
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Another protocol from now on."""
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Whose connection it is."""
        return self._protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Drop the data."""

    def write_eof(self) -> None:
        """Nothing follows."""

    def can_write_eof(self) -> bool:
        """Yes."""
        return True

    def get_write_buffer_size(self) -> int:
        """Nothing waits."""
        return 0

    def pause_reading(self) -> None:
        """Nothing is read by itself."""

    def resume_reading(self) -> None:
        """As above."""

    def is_closing(self) -> bool:
        """Whether it is closed, or will be in the next step."""
        return self._is_closing

    def close(self) -> None:
        """End the connection."""
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        """End the connection."""
        self.close()

    def receive(self, data: bytes) -> None:
        """Let the protocol have data from its peer, unless it has closed."""
        if not self._is_closing:
            self._protocol.data_received(data)
