"""Memory in which large tensors of the function lie, and which workers map: nothing is copied.

A tensor that is moved to the GPU is copied once, into a block. A call names the block, and the
worker reads it there. When the tensor is gone the block is used again: clearing new pages costs
several times what a copy to old ones does.
"""

import fcntl
import itertools
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Self

import torch

from torch_shim.wire.arena import flat, map_privately_at
from torch_shim.wire.protocol import MOST_BLOCK_BYTES, MOST_BLOCKS

LEAST_BYTES = 1 << 20
_IDLE_S = 10.0
_ROUNDED_TO = 1 << 21
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_BLOCK = "_gpufaas_block"

_keys = itertools.count(1 << 56)  # no storage has any of them


class SharedBlock(mmap.mmap):
    """One block. It lies in a file that workers map too, until this process forks."""

    key: int
    size_bytes: int
    descriptor: int
    free_since_s: float
    shared: bool
    forget: list[Callable[[int], None]]  # tell the workers that map it that it is gone

    @classmethod
    def make(cls, size_bytes: int) -> Self:
        """Make a block of this size."""
        descriptor = os.memfd_create("gpufaas-block", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            block = cls(descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(block, os.close, descriptor).atexit = False
        block.key, block.size_bytes, block.descriptor = next(_keys), size_bytes, descriptor
        block.free_since_s, block.shared, block.forget = 0.0, True, []
        return block

    def unshare(self) -> None:
        """Go on with private pages: a child's writes must not be seen here, nor ours there."""
        if self.shared:
            self.shared = False
            address = flat(self, torch.uint8, 0, 1).data_ptr()
            map_privately_at(address, self.size_bytes, self.descriptor)


class SharedBlocks:
    """Every block of this process. Thread-safe."""

    def __init__(self, most_bytes: int = MOST_BLOCK_BYTES) -> None:
        self.most_bytes = most_bytes
        self._lock = threading.RLock()
        self._used: dict[int, SharedBlock] = {}
        self._free: list[SharedBlock] = []  # the one that became free last is the last
        self._left: deque[int] = deque()  # filled by finalizers, which may run anywhere

    def storage(self, size_bytes: int) -> torch.UntypedStorage | None:
        """Return a storage of this size in a block; None where there should be no further one."""
        if not LEAST_BYTES <= size_bytes <= self.most_bytes:
            return None
        with self._lock:
            block = self._take(size_bytes)
            if block is None:
                return None
            self._used[block.key] = block
        content = memoryview(block)
        weakref.finalize(content, self._left.append, block.key).atexit = False
        storage = flat(content, torch.uint8, 0, size_bytes).untyped_storage()
        storage.__dict__[_BLOCK] = block
        return storage

    def trim(self, idle_s: float = _IDLE_S) -> None:
        """Give up the blocks that were not used for so long."""
        if not self._free and not self._left:  # as in most functions, at each of their requests
            return
        before_s = time.monotonic() - idle_s
        with self._lock:
            self._note_left()
            gone = [block for block in self._free if block.free_since_s <= before_s]
            self._free = [block for block in self._free if block.free_since_s > before_s]
        for block in gone:
            _tell_gone(block)

    def size_bytes(self) -> int:
        """Return how much all blocks take."""
        with self._lock:
            return self._size_bytes()

    def before_fork(self) -> None:
        """Leave every block to the tensors that lie in it; no thread gets one until the fork."""
        self._lock.acquire()
        self._note_left()
        blocks = [*self._used.values(), *self._free]
        for block in self._used.values():
            block.unshare()
        self._used.clear()
        self._free.clear()
        for block in blocks:
            _tell_gone(block)

    def after_fork(self) -> None:
        """Go on in the parent."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Go on in the child, where the thread that holds the lock may have another name."""
        self._lock = threading.RLock()

    def _take(self, size_bytes: int) -> SharedBlock | None:
        self._note_left()
        fitting = [
            block for block in self._free if size_bytes <= block.size_bytes <= 2 * size_bytes
        ]
        if fitting:
            found = min(fitting, key=lambda block: block.size_bytes)
            self._free.remove(found)
            return found
        wanted = -(-size_bytes // _ROUNDED_TO) * _ROUNDED_TO
        while self._free and self._is_too_much(wanted):
            _tell_gone(self._free.pop(0))
        return None if self._is_too_much(wanted) else SharedBlock.make(wanted)

    def _is_too_much(self, more_bytes: int) -> bool:
        count = len(self._used) + len(self._free)
        return self._size_bytes() + more_bytes > self.most_bytes or count >= MOST_BLOCKS

    def _size_bytes(self) -> int:
        return sum(block.size_bytes for block in [*self._used.values(), *self._free])

    def _note_left(self) -> None:
        """Make the blocks free whose tensors are gone."""
        while self._left:
            block = self._used.pop(self._left.popleft(), None)
            if block is not None:
                block.free_since_s = time.monotonic()
                self._free.append(block)


def block_of(storage: torch.UntypedStorage) -> SharedBlock | None:
    """Return the block that a storage lies in, if workers may map it."""
    found: SharedBlock | None = storage.__dict__.get(_BLOCK)
    return found if found is not None and found.shared else None


def _tell_gone(block: SharedBlock) -> None:
    for forget in block.forget:
        forget(block.key)
    block.forget.clear()


shared_blocks = SharedBlocks()
os.register_at_fork(
    before=shared_blocks.before_fork,
    after_in_parent=shared_blocks.after_fork,
    after_in_child=shared_blocks.after_fork_in_child,
)
