"""A transport that carries nothing: it notes what a protocol does with it."""

import asyncio


class MemoryTransport(asyncio.Transport):
    """`written` is what was written, write by write; `unwritten_bytes` wait in its buffer."""

    def __init__(self, *, half_closes: bool = True) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.unwritten_bytes = 0
        self.reading = True
        self.ended = False
        self.closed = False
        self.aborted = False
        self._half_closes = half_closes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.is_closing()
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.unwritten_bytes

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def can_write_eof(self) -> bool:
        return self._half_closes

    def write_eof(self) -> None:
        assert self._half_closes
        self.ended = True

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True
