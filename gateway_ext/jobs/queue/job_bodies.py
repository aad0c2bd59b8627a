"""Bodies of stored jobs, read piece by piece, so that a large one never fills the memory."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol


class StoredBody(Protocol):
    """A body that a queue stores; it can be read repeatedly."""

    @property
    def size_bytes(self) -> int:
        """The length of the body."""
        ...

    def pieces(self) -> AsyncIterator[bytes]:
        """The whole body in order; QueueFailed where it cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryBody:
    """A small body, completely in memory."""

    content: bytes

    @property
    def size_bytes(self) -> int:
        """The length of the body."""
        return len(self.content)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The whole body in one piece."""
        if self.content:
            yield self.content


async def whole(body: StoredBody) -> bytes:
    """The complete body in memory."""
    if isinstance(body, MemoryBody):
        return body.content
    return b"".join([piece async for piece in body.pieces()])
