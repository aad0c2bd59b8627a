"""One path (a disk's, or a direction of a GPU's PCIe) that transfers of many threads share.

The threads move their own blocks, each when `TransferSchedule` and the other processes allow it. On
an emulated path a block takes the time that its bytes need, and nothing else passes meanwhile.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import NamedTuple

from gpu_manager.devices.loads import TransferRank
from gpu_manager.devices.paths import DiskPath, Transfer, TransferAbandoned
from gpu_manager.worker.transfers.process_gate import NoGate, ProcessGate
from gpu_manager.worker.transfers.schedule import Block, QueuedTransfer, TransferSchedule

# Blocks of an emulated path: a newcomer waits for one of them at most. Smaller ones cost more than
# they give (docs/decisions/0031-transfers.md).
_BLOCK_S = 0.002
_LEAST_BLOCK_BYTES, _MOST_BLOCK_BYTES = 64 << 10, 512 << 10
_MOST_READ_BYTES = 4 << 20  # of a disk at a time
# Of a real path, whose speed is not known.
REAL_BLOCK_BYTES = 1 << 20
# A transfer that asks for its next block this much later than it could, loses no time by that.
_LATE_S = 0.05
# Between two looks whether what goes first elsewhere has passed, in parts of a block's time.
_LOOKS, _LEAST_LOOK_S, _MOST_LOOK_S = 4, 0.00005, 0.001

Clock = Callable[[], float]


class PathSpeed(NamedTuple):
    """What a path can do: bytes a second (0: as fast as it is), and its blocks (0: as usual)."""

    bytes_per_s: float = 0.0
    block_bytes: int = 0

    @property
    def block(self) -> int:
        if self.block_bytes:
            return self.block_bytes
        if not self.bytes_per_s:
            return REAL_BLOCK_BYTES
        usual_bytes = int(self.bytes_per_s * _BLOCK_S)
        return min(_MOST_BLOCK_BYTES, max(_LEAST_BLOCK_BYTES, usual_bytes))


def disk_speed(bytes_per_s: float) -> PathSpeed:
    """Return the speed of a disk, from which larger pieces are read."""
    usual_bytes = int(bytes_per_s * _BLOCK_S) or _MOST_READ_BYTES
    return PathSpeed(bytes_per_s, min(_MOST_READ_BYTES, max(_LEAST_BLOCK_BYTES, usual_bytes)))


class PathTimes:
    """The times at which blocks have passed a path of so many bytes a second; pure."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = float("-inf")

    def span_s(self, size_bytes: int, ready_s: float) -> tuple[float, float]:
        """Return when a block passes that was ready at this time, and comes next."""
        begin_s = max(self._free_s, ready_s)
        self._free_s = begin_s + size_bytes / self._bytes_per_s
        return begin_s, self._free_s

    def taken_until(self, now_s: float) -> None:
        self._free_s = max(self._free_s, now_s)


class Moved(NamedTuple):
    """Bytes that have passed, and the seconds for which they waited for their turns."""

    size_bytes: float = 0
    waited_s: float = 0.0


class MovedSums:
    """Sums of one direction of a GPU's PCIe, by rank; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: list[float] = [0.0] * len(TransferRank)
        self._waited_s = [0.0] * len(TransferRank)

    def add(self, rank: int, size_bytes: float, waited_s: float = 0.0) -> None:
        with self._lock:
            self._bytes[rank] += size_bytes
            self._waited_s[rank] += waited_s

    def of(self, rank: TransferRank) -> Moved:
        with self._lock:
            return Moved(self._bytes[rank], self._waited_s[rank])

    def take(self) -> list[Moved]:
        """Return the sums of all ranks since the last call; empty if nothing has moved."""
        with self._lock:
            if not any(self._bytes):
                return []
            moved = [Moved(*sums) for sums in zip(self._bytes, self._waited_s, strict=True)]
            self._bytes = [0.0] * len(TransferRank)
            self._waited_s = [0.0] * len(TransferRank)
            return moved


class TransferPath(DiskPath):
    """One path. Without a speed and a gate bytes pass at once."""

    def __init__(
        self,
        speed: PathSpeed = PathSpeed(),  # noqa: B008 - it never changes
        gate: ProcessGate | None = None,
        now_s: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`gate` is the way to the same path in other processes."""
        self.is_limited = speed.bytes_per_s > 0.0
        self.has_turns = self.is_limited or gate is not None
        self.block_bytes = speed.block
        self.now_s = now_s
        self._gate: ProcessGate | NoGate = NoGate() if gate is None else gate
        self._sleep = sleep
        self._schedule = TransferSchedule(self.block_bytes)
        self._times = PathTimes(speed.bytes_per_s)
        self.block_s = self.block_bytes / speed.bytes_per_s if self.is_limited else _LEAST_LOOK_S
        self._changed = threading.Condition()
        self._present = dict.fromkeys(TransferRank, 0)
        self._is_passing = False  # a block
        self._is_inside = False  # of the gate; for the thread whose block passes
        self._made_way = False  # for other processes, since the last block
        self._held_back_s: float | None = None
        self._is_closed = False

    def transfer(
        self,
        owner: str,
        rank: TransferRank = TransferRank.AWAITED,
        sums: MovedSums | None = None,
    ) -> "PathTransfer":
        """Begin a transfer, whose owner has one queue; what it moves is added to the sums."""
        return PathTransfer(self, owner, rank, sums)

    @contextmanager
    def present(self, rank: TransferRank) -> Iterator[None]:
        """Have lower ranks wait, here and elsewhere, for something that needs no turns itself."""
        with self._changed:
            self._present[rank] += 1
            self._gate.announce(rank)
        try:
            yield
        finally:
            with self._changed:
                self._present[rank] -= 1
                self._gate.retract(rank)

    def is_queued(self, owner: str) -> bool:
        with self._changed:
            return self._schedule.is_queued(owner)

    def close(self, within_s: float = 1.0) -> bool:
        """Let no further block pass, and do without the gate; False if one does not end in time."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            is_over = self._changed.wait_for(lambda: not self._is_passing, within_s)
            if is_over:
                self._gate, self._is_inside = NoGate(), False
            return is_over

    # -- for transfers --------------------------------------------------------------------------

    def queue(self, owner: str, rank: TransferRank, size_bytes: int) -> QueuedTransfer:
        with self._changed:
            self._gate.announce(rank)
            return self._schedule.add(owner, rank, size_bytes)

    def unqueue(self, queued: QueuedTransfer) -> None:
        with self._changed:
            self._schedule.withdraw(queued)
            self._gate.retract(queued.rank)
            if not self._is_passing:
                self._leave_gate(only_if_wanted=True)
            self._changed.notify_all()

    def promote(self, queued: QueuedTransfer, rank: TransferRank) -> None:
        with self._changed:
            self._gate.announce(rank)
            self._gate.retract(queued.rank)
            self._schedule.promote(queued, rank)
            self._changed.notify_all()

    def wait_for_turn(self, queued: QueuedTransfer) -> Block:
        """Wait until the transfer's next block may pass; nothing else does until `end_turn`.

        TransferAbandoned is raised if the path is closed.
        """
        with self._changed:
            while True:
                if self._is_closed:
                    raise TransferAbandoned(queued.owner)
                if self._is_passing:
                    self._changed.wait()
                    continue
                block = self._schedule.choose(self._elsewhere())
                if block is not None and block.of is queued:
                    self._is_passing, self._held_back_s = True, None
                    return block
                self._hold_back(block)

    def carry(self, block: Block, ready_s: float) -> tuple[float, float]:
        """Let the block pass an emulated path; return when it began and ended."""
        if not self._is_inside:
            had_to_wait = self._gate.enter()
            self._is_inside = True
            if had_to_wait or self._made_way:
                self._times.taken_until(self.now_s())
                self._made_way = False
        begun_s, passed_s = self._times.span_s(block.size_bytes, ready_s)
        left_s = passed_s - self.now_s()
        if left_s > 0.0:  # sleep(0) would give the core away
            self._sleep(left_s)
        return begun_s, passed_s

    def end_turn(self, block: Block, *, passed: bool) -> None:
        with self._changed:
            if passed:
                self._schedule.passed(block)
            else:
                self._schedule.withdraw(block.of)
            self._leave_gate(only_if_wanted=True)
            self._is_passing = False
            self._changed.notify_all()

    def _elsewhere(self) -> TransferRank | None:
        """The highest rank above what waits here, of what has no turn here."""
        here = self._schedule.highest()
        if here is None:
            return None
        present = next((rank for rank in TransferRank if self._present[rank]), here)
        announced = self._gate.elsewhere(min(here, present))
        return announced if announced is not None else present if present < here else None

    def _hold_back(self, chosen: Block | None) -> None:
        """Wait a moment: the next block is another thread's, or another process's."""
        now_s = self.now_s()
        if chosen is not None or self._held_back_s is None:
            self._held_back_s = None if chosen is not None else now_s
        elif now_s - self._held_back_s >= self.block_s:
            self._held_back_s = now_s
            self._schedule.passed_elsewhere(self._elsewhere() or TransferRank.CALL)
        if chosen is None:
            self._leave_gate(only_if_wanted=False)
            self._made_way = True
        look_s = min(_MOST_LOOK_S, max(_LEAST_LOOK_S, self.block_s / _LOOKS))
        self._changed.wait(look_s)

    def _leave_gate(self, *, only_if_wanted: bool) -> None:
        """Let other processes have the path: those that want it, if something is queued here."""
        if self._is_inside and not (
            only_if_wanted and self._schedule.highest() is not None and not self._gate.is_wanted()
        ):
            self._is_inside = False
            self._made_way = self._schedule.highest() is not None
            self._gate.leave()


class PathTransfer(Transfer):
    """One owner's bytes on a path; moved by one thread, and promoted by any."""

    def __init__(
        self, path: TransferPath, owner: str, rank: TransferRank, sums: MovedSums | None
    ) -> None:
        self._path = path
        self._owner = owner
        self._rank = rank
        self._sums = sums
        self._ready_s = path.now_s()
        self._queued: QueuedTransfer | None = None
        self._changing = threading.Lock()

    def promote(self, rank: TransferRank) -> None:
        """Be of another rank from the next block on."""
        with self._changing:
            self._rank = rank
            if self._queued is not None:
                self._path.promote(self._queued, rank)

    def resume(self) -> None:
        self._ready_s = max(self._ready_s, self._path.now_s())

    def move(
        self,
        size_bytes: int,
        moved: Callable[[int], object] = lambda _: None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        with closing(self.blocks(size_bytes, is_wanted)) as blocks:
            for count in blocks:
                moved(count)

    def blocks(
        self, size_bytes: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> Generator[int, None, None]:
        """Yield the size of each block: an emulated one has passed, of a real one it is the turn.

        The generator must be closed, so that a turn ends at once.
        """
        if size_bytes <= 0:
            return
        if not self._path.has_turns:
            self._note(size_bytes, 0.0)
            yield size_bytes
            return
        with self._changing:
            queued = self._queued = self._path.queue(self._owner, self._rank, size_bytes)
        try:
            while queued.left_bytes:
                yield from self._pass_block(queued, is_wanted)
        finally:
            with self._changing:
                self._queued = None
                self._path.unqueue(queued)

    def _pass_block(
        self, queued: QueuedTransfer, is_wanted: Callable[[], bool]
    ) -> Generator[int, None, None]:
        asked_s = self._path.now_s()
        block = self._path.wait_for_turn(queued)
        begun_s, done = self._path.now_s(), False
        try:
            if not is_wanted():
                raise TransferAbandoned(self._owner)
            if self._path.is_limited:
                self._ready_s = max(self._ready_s, self._path.now_s() - _LATE_S)
                begun_s, self._ready_s = self._path.carry(block, self._ready_s)
            else:
                yield block.size_bytes
            done = True
        finally:
            self._path.end_turn(block, passed=done)
        self._note(block.size_bytes, max(0.0, begun_s - asked_s))
        if self._path.is_limited:
            yield block.size_bytes

    def _note(self, size_bytes: int, waited_s: float) -> None:
        if self._sums is not None:
            self._sums.add(self._rank, size_bytes, waited_s)
