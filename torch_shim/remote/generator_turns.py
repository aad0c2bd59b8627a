"""The state of torch's generator, which a worker draws from for one call at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch


class GeneratorTurns:
    """Calls that draw random numbers, one after the other.

    Two that sent the same state at once would draw the same numbers. A call waits for its turn with
    its lease, and without a channel: another one's turn may need that.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        os.register_at_fork(after_in_child=self._renew)

    @contextmanager
    def state(self, *, drawn_from: bool) -> Iterator[bytes | None]:
        """The state to send; None for a call that draws nothing."""
        if not drawn_from:
            yield None
            return
        with self._lock:
            yield _state()

    def drawn(self, sent: bytes | None, after: bytes) -> None:
        """Go on from where the worker came to.

        A thread that has drawn here meanwhile keeps its numbers: they would be drawn once more.
        """
        if sent == _state():
            state = torch.frombuffer(bytearray(after), dtype=torch.uint8)
            torch.default_generator.set_state(state)

    def _renew(self) -> None:
        self._lock = RLock()


def _state() -> bytes:
    found: bytes = torch.default_generator.get_state().numpy().tobytes()
    return found
