"""How much of an image a worker may copy: the manager tells it through a pipe, piece by piece.

Each message is the number of bytes that are there, from the image's beginning; the last one says
that the image's content has the right digest. A pipe that closes before means that it never will.
"""

import os
import struct

VERIFIED = (1 << 64) - 1
_NUMBER = struct.Struct("<Q")
_MOST_READ_BYTES = 512 * _NUMBER.size


def packed(number: int) -> bytes:
    """Return a message; one write passes it whole."""
    return _NUMBER.pack(number)


class Arrival:
    """What is there of one image; without a pipe, everything."""

    def __init__(self, total_bytes: int, pipe: int | None = None) -> None:
        """Takes ownership of the pipe."""
        self._total_bytes = total_bytes
        self._pipe = pipe
        self._present = 0 if pipe is not None else VERIFIED

    def wait_for(self, end: int) -> int:
        """Wait until the bytes before this offset are there; return where those there end.

        OSError if they will never be.
        """
        while self._present < end:
            self._receive()
        return min(self._present, self._total_bytes)

    def wait_verified(self) -> None:
        """Wait until the image's content is known to be right; OSError if it is not."""
        while self._present != VERIFIED:
            self._receive()

    def close(self) -> None:
        """Close the pipe."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def _receive(self) -> None:
        assert self._pipe is not None, "without a pipe everything is there"
        told = os.read(self._pipe, _MOST_READ_BYTES)
        if not told:
            raise OSError("the weights did not arrive")
        (self._present,) = _NUMBER.unpack(told[-_NUMBER.size :])
