"""A transport that carries nothing: it notes what a protocol does with it."""

import asyncio


class MemoryTransport(asyncio.Transport):
    """`written` is what was written, write by write; `unwritten_bytes` wait in its buffer."""

    def __init__(self, *, half_closes: bool = True) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.unwritten_bytes = 0
        self._reading = True
        self._ended = False
        self.closed = False
        self._aborted = False
        self._half_closes = half_closes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.is_closing()
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.unwritten_bytes

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True

    def is_reading(self) -> bool:
        return self._reading

    def has_ended(self) -> bool:
        """Whether the protocol has said that it writes no more."""
        return self._ended

    def was_aborted(self) -> bool:
        """Whether the protocol closed the connection at once."""
        return self._aborted

    def can_write_eof(self) -> bool:
        return self._half_closes

    def write_eof(self) -> None:
        assert self._half_closes
        self._ended = True

    def is_closing(self) -> bool:
        return self.closed or self._aborted

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self._aborted = True
