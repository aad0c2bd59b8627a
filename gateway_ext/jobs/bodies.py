"""Bodies of jobs, read piece by piece: a large one is never held whole."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol


class Body(Protocol):
    """A body that is kept; it may be read as often as one likes."""

    @property
    def size_bytes(self) -> int:
        """How much it is."""
        ...

    def pieces(self) -> AsyncIterator[bytes]:
        """All of it, in its order; QueueFailed where it cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """One that is small enough to be held."""

    content: bytes

    @property
    def size_bytes(self) -> int:
        """How much it is."""
        return len(self.content)

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of it at once."""
        if self.content:
            yield self.content


async def whole(body: Body) -> bytes:
    """All of a body, for whoever needs it so."""
    if isinstance(body, Held):
        return body.content
    return b"".join([piece async for piece in body.pieces()])
