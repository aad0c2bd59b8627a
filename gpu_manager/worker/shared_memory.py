"""Memory shared with a function: its blocks, and files of results, which are used again.

Making a file costs several times what filling it does: the kernel clears each of its pages. So a
function says when nobody reads a result any more, and the worker writes a later one to the same
pages. A session's files are its own: no other function's data was ever in them.
"""

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from gpu_manager.call_errors import CallRefused
from gpu_manager.devices.lent_memory import MappedFile
from gpu_manager.devices.worker_device import Unshare
from torch_shim.wire.protocol import MOST_BLOCK_BYTES, MOST_BLOCKS, FailureKind

# Smaller results come in a file that is used once.
LEAST_FILE_BYTES = 1 << 20
# How much all files of a worker may take, beside the results that are used once.
MOST_FILE_BYTES = 1 << 30
_ROUNDED_TO = 1 << 21

_numbers = itertools.count(1)

# Prepares memory for transfers from the device.
Prepare = Callable[[memoryview], Unshare | None]


class ResultFile(MappedFile):
    """One file of results, prepared for transfers."""

    def __init__(self, size_bytes: int, prepare: Prepare) -> None:
        super().__init__(size_bytes)
        self.number = next(_numbers)
        try:
            self._unshare = prepare(self.memory)
        except BaseException:
            super().close()
            raise

    def close(self) -> None:
        """Let go of it. A function that still maps it keeps the pages."""
        if self._unshare is not None:
            self._unshare()
        super().close()


@dataclass(slots=True)
class ByteBudget:
    """The bytes that something of all sessions takes in a worker, and may take at most."""

    most_bytes: int
    size_bytes: int = 0


class ResultFiles:
    """One session's files: those that the function reads, and those that are free."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._lent: OrderedDict[int, ResultFile] = OrderedDict()
        self._free: list[ResultFile] = []  # the one that became free last is the last

    def take(self, size_bytes: int, prepare: Prepare) -> ResultFile | None:
        """Return a file of at least this size; None where another one would be too many."""
        fitting = [file for file in self._free if size_bytes <= file.size_bytes <= 2 * size_bytes]
        if fitting:
            found = min(fitting, key=lambda file: file.size_bytes)
            self._free.remove(found)
        else:
            wanted = -(-size_bytes // _ROUNDED_TO) * _ROUNDED_TO
            if not self._make_room(wanted):
                return None
            found = ResultFile(wanted, prepare)
            self._budget.size_bytes += wanted
        self._lent[found.number] = found
        return found

    def give(self, number: int) -> None:
        """The function reads this one no more; of a number that is unknown, nothing is said."""
        file = self._lent.pop(number, None)
        if file is not None:
            file.free_since_s = time.monotonic()
            self._free.append(file)

    def trim(self, before_s: float) -> None:
        for file in [file for file in self._free if file.free_since_s <= before_s]:
            self._free.remove(file)
            self._close(file)

    def clear(self) -> None:
        for file in [*self._free, *self._lent.values()]:
            self._close(file)
        self._free.clear()
        self._lent.clear()

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    def _make_room(self, size_bytes: int) -> bool:
        """Give up files of this session until another one is within the budget.

        Those that the function reads go too, the oldest first: they become its own.
        """
        while self._budget.size_bytes + size_bytes > self._budget.most_bytes:
            if self._free:
                self._close(self._free.pop(0))
            elif self._lent and size_bytes <= self._budget.most_bytes:
                self._close(self._lent.popitem(last=False)[1])
            else:
                return False
        return True

    def _close(self, file: ResultFile) -> None:
        self._budget.size_bytes -= file.size_bytes
        file.close()


# Blocks of a function's memory that a worker maps, since the function's large inputs lie there.


class FunctionBlock(NamedTuple):
    """One block: its bytes, which the function can write to at any time."""

    memory: memoryview
    unshare: Unshare | None


class FunctionBlocks:
    """The blocks of one session, by the keys that the function gave them."""

    def __init__(self) -> None:
        self._blocks: dict[int, FunctionBlock] = {}

    def add(self, key: int, memory: memoryview, prepare: Prepare) -> None:
        """Take one more block; refused beyond what a function of ours shares."""
        taken_bytes = sum(len(block.memory) for block in self._blocks.values())
        if key <= 0 or key in self._blocks:
            raise CallRefused(FailureKind.BAD_FRAME, f"block {key}")
        if len(self._blocks) >= 2 * MOST_BLOCKS or taken_bytes + len(memory) > 2 * MOST_BLOCK_BYTES:
            detail = f"{len(self._blocks)} blocks of {taken_bytes} bytes are enough"
            raise CallRefused(FailureKind.BAD_FRAME, detail)
        self._blocks[key] = FunctionBlock(memory, prepare(memory))

    def get(self, key: int) -> FunctionBlock | None:
        return self._blocks.get(key)

    def drop(self, key: int) -> None:
        """Let a block go, if there is one of this key; its pages are the function's."""
        block = self._blocks.pop(key, None)
        if block is not None and block.unshare is not None:
            block.unshare()

    def clear(self) -> None:
        for key in list(self._blocks):
            self.drop(key)
