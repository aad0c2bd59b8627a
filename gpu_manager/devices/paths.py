"""The ways that bytes pass: from disk, to a GPU and back. Here each passes at once, uncounted.

The feature `transfers` has paths on which they take turns, also between processes.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from gpu_manager.devices.loads import LoadUrgency, TransferRank

_PIECE_BYTES = 4 << 20  # of a disk at a time
_NOTHING = nullcontext()


class TransferAbandoned(Exception):
    """Nobody wants the rest of a transfer."""


class Transfer:
    """One owner's bytes on their way; one thread moves them."""

    def resume(self) -> None:
        """Go on after a wait for something else: what comes next was not ready before."""

    def move(
        self,
        size_bytes: int,
        moved: Callable[[int], object] = lambda _: None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Return when this many bytes more have passed; `moved` is told of each block.

        `moved` must not block: others wait for the thread whose turn it is. TransferAbandoned is
        raised before the next block of what is not wanted any more.
        """
        if not is_wanted():
            raise TransferAbandoned
        moved(size_bytes)


class DiskPath:
    """The way from a disk, which is read in pieces of `block_bytes`."""

    block_bytes = _PIECE_BYTES

    def transfer(self, owner: str) -> Transfer:  # noqa: ARG002 - nobody waits for another one
        """Begin a transfer, whose owner has one queue."""
        return Transfer()


def _at_once() -> None:
    """Wait for nothing."""


class PassedBytes(NamedTuple):
    """What has passed in one direction: of which class, and for how long it waited for turns."""

    direction: str
    kind: str
    size_bytes: float
    waited_s: float


class GpuPaths:
    """Both directions of one GPU, for the manager."""

    is_limited = False  # bytes take the time of an emulated path: the manager lets loads pass it
    # What workers are told of them, for `DeviceLink.connect`.
    numbers: Sequence[float] = ()
    descriptors: Sequence[int] = ()

    def load(self, owner: str, urgency: LoadUrgency) -> Transfer:  # noqa: ARG002 - as above
        """Begin the transfer of a model to the GPU."""
        return Transfer()

    def note_moved(self, *by_direction: Sequence[Sequence[float]]) -> None:
        """Add what a worker has moved to the GPU and from it."""

    def passed(self) -> Iterable[PassedBytes]:
        return ()

    def close(self) -> None:
        """Let nothing pass any more."""


class DeviceLink:
    """Both directions between a process and its GPU; all its models share them. Thread-safe."""

    def connect(self, numbers: Sequence[float], descriptors: Sequence[int]) -> Sequence[int]:
        """Use these paths from now on, if they are any; return the other descriptors."""
        del numbers
        return descriptors

    def copying_input(
        self, size_bytes: int, wait: Callable[[], None] = _at_once, owner: str = ""
    ) -> AbstractContextManager[None]:
        """A call's input is copied meanwhile; `wait` waits for what a real GPU has been given."""
        del size_bytes, wait, owner
        return _NOTHING

    def copying_output(
        self, size_bytes: int, rank: TransferRank = TransferRank.CALL, owner: str = ""
    ) -> AbstractContextManager[None]:
        """So many bytes are copied to the host meanwhile, and are there at the end."""
        del size_bytes, rank, owner
        return _NOTHING

    def load_blocks(
        self, owner: str, size_bytes: int, urgency: LoadUrgency
    ) -> Generator[int, None, None]:
        """Yield the size of each block of a part of a model, when it may be copied."""
        del owner, urgency
        yield size_bytes
