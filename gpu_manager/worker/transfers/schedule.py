"""Decides whose block passes a path next. Pure: no clock, no thread, no other process.

Each owner (a function's model) has a queue for each rank, and keeps its transfers in order. A block
of the highest rank that waits is next, and inside of a rank the owners take turns. So a newcomer of
a higher rank waits for the block under way, and for no other one. A lower rank that was passed over
for `PATIENCE` blocks has one block, but never before a rank that has just come has had its own.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

from gpu_manager.devices.loads import TransferRank

# Blocks of higher ranks that may pass before one of a lower rank that waits.
PATIENCE = 8


@dataclass(slots=True, eq=False)
class QueuedTransfer:
    """Bytes of one owner that wait, or of which a block is passing."""

    owner: str
    rank: TransferRank
    left_bytes: int


class Block(NamedTuple):
    """The block that passes next."""

    of: QueuedTransfer
    size_bytes: int


class TransferSchedule:
    """The transfers that wait for one path, and the order in which their blocks pass.

    Whoever carries it out asks `choose` at a block's end only, and says `passed` after each block.
    """

    def __init__(self, block_bytes: int) -> None:
        assert block_bytes > 0, "a block has bytes"
        self.block_bytes = block_bytes
        self._queues: dict[TransferRank, OrderedDict[str, deque[QueuedTransfer]]] = {
            rank: OrderedDict() for rank in TransferRank
        }
        self._passed_over = dict.fromkeys(TransferRank, 0)
        self._last: TransferRank | None = None

    def add(self, owner: str, rank: TransferRank, size_bytes: int) -> QueuedTransfer:
        """Queue a transfer behind the others of its owner and rank."""
        transfer = QueuedTransfer(owner, rank, size_bytes)
        if size_bytes > 0:
            self._queues[rank].setdefault(owner, deque()).append(transfer)
        return transfer

    def promote(self, transfer: QueuedTransfer, rank: TransferRank) -> None:
        self.withdraw(transfer)
        transfer.rank = rank
        if transfer.left_bytes:
            self._queues[rank].setdefault(transfer.owner, deque()).append(transfer)

    def withdraw(self, transfer: QueuedTransfer) -> None:
        """Let what is left of a transfer go; without effect if nothing is queued."""
        queue = self._queues[transfer.rank].get(transfer.owner)
        if queue is None or transfer not in queue:
            return
        queue.remove(transfer)
        if not queue:
            del self._queues[transfer.rank][transfer.owner]
            self._forget_patience(transfer.rank)

    def is_queued(self, owner: str) -> bool:
        return any(owner in queues for queues in self._queues.values())

    def highest(self) -> TransferRank | None:
        return next((rank for rank in TransferRank if self._queues[rank]), None)

    def choose(self, elsewhere: TransferRank | None = None) -> Block | None:
        """Return the block that passes next; it stays the same until something changes.

        `elsewhere` is the highest rank that waits in other processes; None is returned where that
        one comes first, or where nothing waits.
        """
        here = self.highest()
        if here is None:
            return None
        first = here if elsewhere is None else min(here, elsewhere)
        rank = self._impatient(first)
        if rank is None and first < here:
            return None
        queues = self._queues[here if rank is None else rank]
        transfer = next(iter(queues.values()))[0]
        return Block(transfer, min(self.block_bytes, transfer.left_bytes))

    def passed(self, block: Block) -> None:
        """A block has passed: its owner goes behind the others of its rank."""
        transfer = block.of
        transfer.left_bytes -= block.size_bytes
        self._note_passed(transfer.rank)
        if not transfer.left_bytes:
            self.withdraw(transfer)
        queues = self._queues[transfer.rank]
        if transfer.owner in queues:
            queues.move_to_end(transfer.owner)

    def passed_elsewhere(self, rank: TransferRank) -> None:
        """The time of one block was another process's, for something of this rank."""
        self._note_passed(rank)

    def _impatient(self, first: TransferRank) -> TransferRank | None:
        """Return the rank below the first that has waited for its share."""
        if self._last is not first:
            return None  # who has just come goes first
        for rank in TransferRank:
            if rank > first and self._queues[rank] and self._passed_over[rank] >= PATIENCE:
                return rank
        return None

    def _note_passed(self, passed: TransferRank) -> None:
        self._last = passed
        self._passed_over[passed] = 0
        for rank in TransferRank:
            if rank > passed and self._queues[rank]:
                self._passed_over[rank] += 1

    def _forget_patience(self, rank: TransferRank) -> None:
        if not self._queues[rank]:
            self._passed_over[rank] = 0
