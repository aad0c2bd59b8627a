"""Memory that a function and workers share: arenas, lent pages, blocks; how tensors lie in it."""

import ctypes
import fcntl
import itertools
import mmap
import operator
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

import torch

from torch_shim.errors import BadFrame
from torch_shim.patching import original_of
from torch_shim.wire.protocol import MOST_BLOCK_BYTES, MOST_BLOCKS

FIRST_BYTES = 1 << 20
# PyTorch's original functions: moving bytes needs no handles.
_empty = original_of(torch.empty)
_frombuffer = original_of(torch.frombuffer)
_new_storage = original_of(torch.UntypedStorage.__new__)
_base = torch._C.TensorBase  # noqa: SLF001 - has the originals of the methods too
_set, _size, _stride = _base.set_, _base.size, _base.stride
_offset: Callable[[torch.Tensor], int] = _base.storage_offset  # type: ignore[assignment] # no symbol outside of a trace
_is_conj, _is_neg = _base.is_conj, _base.is_neg
_dtype: Callable[[torch.Tensor], torch.dtype] = _base.dtype.__get__  # type: ignore[attr-defined] # a descriptor of C there
_NoTorchFunction = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 - documented, kept there

# So few bytes Python copies in less time than torch takes to begin.
_FEW_BYTES = 16 << 10

Buffer = mmap.mmap | memoryview | bytearray

_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_NO_ACCESS = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_arena(wanted_bytes: int) -> tuple[int, mmap.mmap]:
    """Return the descriptor of a file of fixed size, for the peer, and the file's mapping."""
    size_bytes = FIRST_BYTES
    while size_bytes < wanted_bytes:
        size_bytes *= 2
    descriptor = _sealed_file("gpufaas-arena", size_bytes)
    try:
        return descriptor, mmap.mmap(descriptor, size_bytes)
    except BaseException:
        os.close(descriptor)
        raise


def _sealed_file(name: str, size_bytes: int) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class ProtectedMemory(mmap.mmap):
    """Memory without content: who reads it before it is filled is killed, and reads no garbage.

    It has addresses for `size_bytes` at least; what was never filled is used again.
    """

    address: int
    size_bytes: int
    is_protected: bool
    lent: "LentPages | None" = None  # held as long as the memory

    @classmethod
    def make(cls, size_bytes: int) -> "ProtectedMemory":
        """Reserve addresses for this many bytes; they take no memory yet."""
        room_bytes = 1 << (size_bytes - 1).bit_length()
        spare = _spare_memory.get(room_bytes, [])
        try:
            memory = spare.pop()
        except IndexError:
            room_bytes = size_bytes if room_bytes > _MOST_SPARE_BYTES else room_bytes
            memory = cls(-1, room_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            memory.is_protected = False
            memory.protect()
        memory.size_bytes = size_bytes
        return memory

    def protect(self) -> None:
        """Forget the content, and give the pages back."""
        if not self.is_protected:
            _map_at(self.address, len(self), _NO_ACCESS, mmap.MAP_ANONYMOUS, -1)
            self.is_protected, self.lent = True, None

    def fill(self, content: memoryview) -> None:
        """Make the memory usable, with this content; BadFrame for one of another size."""
        if len(content) != self.size_bytes:
            raise BadFrame(f"{len(content)} bytes came for a storage of {self.size_bytes}")
        self.is_protected = False
        _map_at(self.address, self.size_bytes, _READ_WRITE, mmap.MAP_ANONYMOUS, -1)
        self[: self.size_bytes] = content

    def fill_from(self, descriptor: int, lent: "LentPages | None" = None) -> None:
        """Make the memory usable, with the pages of a file at least as large; close the file."""
        try:
            check_file(descriptor, self.size_bytes, sealed=lent is not None)
            self.is_protected = False
            map_privately_at(self.address, self.size_bytes, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        _keep(descriptor, lent)
        self.lent = lent

    def use_again(self) -> None:
        """No storage lies in the memory any more; safe in a finalizer."""
        room_bytes = len(self)
        if self.is_protected and room_bytes <= _MOST_SPARE_BYTES:
            spare = _spare_memory.setdefault(room_bytes, [])
            if len(spare) < _MOST_SPARE:
                spare.append(self)


# Addresses without memory, by how many: a token of a language model needs some for each layer.
_MOST_SPARE, _MOST_SPARE_BYTES = 256, 64 << 20
_spare_memory: dict[int, list["ProtectedMemory"]] = {}


class LentPages:
    """Pages of a worker's file, which the worker may write to again when nobody maps them here.

    Whoever maps them holds this object. A forked child has them too, so what was mapped at the time
    of a fork is never given back.
    """

    def __init__(self, give_back: Callable[[], None]) -> None:
        self.descriptor = -1  # of the file, once it is mapped
        self._give_back = give_back
        self._forks = _forks

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        if self._forks == _forks:
            self._give_back()


class LentMemory(mmap.mmap):
    """A private mapping of a worker's file."""

    lent: LentPages | None = None  # held as long as the memory


_forks = 0  # that this process was part of


def _note_fork() -> None:
    global _forks  # noqa: PLW0603 - one number for the whole process
    _forks += 1


os.register_at_fork(before=_note_fork, after_in_parent=_note_fork)  # also what came in between


def check_file(descriptor: int, size_bytes: int, *, sealed: bool) -> None:
    """Raise BadFrame if a file that a worker sent is smaller, or (`sealed`) could become so.

    Who reads a mapping behind its file's end is killed.
    """
    try:
        found_bytes = os.fstat(descriptor).st_size
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) if sealed else fcntl.F_SEAL_SHRINK
    except OSError as error:
        raise BadFrame(f"the file of a result: {error}") from error
    if found_bytes < size_bytes or not seals & fcntl.F_SEAL_SHRINK:
        state = "sealed" if seals & fcntl.F_SEAL_SHRINK else "not sealed"
        raise BadFrame(f"a result of {size_bytes} bytes in a file of {found_bytes}, {state}")


def map_privately_at(address: int, size_bytes: int, descriptor: int) -> None:
    """Replace a mapping in place by a private one of a file; concurrent readers go on."""
    _map_at(address, size_bytes, _READ_WRITE, 0, descriptor)


def _map_at(address: int, size_bytes: int, access: int, kind: int, descriptor: int) -> None:
    kind |= mmap.MAP_PRIVATE | _MAP_FIXED
    mapped = _libc.mmap(address, size_bytes, access, kind, descriptor, 0)
    if mapped in (None, _FAILED):
        number = ctypes.get_errno()
        raise OSError(number, f"mapping memory anew: {os.strerror(number)}")


def flat(buffer: Buffer, dtype: torch.dtype, offset: int, count: int) -> torch.Tensor:
    """Return `count` elements of a buffer as a one-dimensional tensor over the same memory."""
    tensor: torch.Tensor = (
        _frombuffer(buffer, dtype=dtype, count=count, offset=offset)
        if count
        else _empty(0, dtype=dtype)
    )
    return tensor


def tensor_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """Return a plain CPU tensor over a storage, even if the storage belongs to a handle."""
    tensor: torch.Tensor = _set(_empty(0, dtype=dtype), storage, offset, shape, strides)
    return tensor


def write_bytes(
    buffer: Buffer, offset: int, storage: torch.UntypedStorage, start: int, count: int
) -> None:
    address = storage.data_ptr()
    if count <= _FEW_BYTES and address and start + count <= storage.nbytes():
        buffer[offset : offset + count] = ctypes.string_at(address + start, count)
    else:
        source = tensor_over(storage, torch.uint8, start, (count,), (1,))
        flat(buffer, torch.uint8, offset, count).copy_(source)


def copy_of_bytes(buffer: Buffer, offset: int, count: int) -> torch.UntypedStorage:
    """Return a new storage with bytes of a buffer, which has as many."""
    if count > _FEW_BYTES:
        return flat(buffer, torch.uint8, offset, count).clone().untyped_storage()
    content = bytes(buffer[offset : offset + count])
    storage: torch.UntypedStorage = _new_storage(torch.UntypedStorage, len(content))
    ctypes.memmove(storage.data_ptr(), content, len(content))
    return storage


def map_privately(descriptor: int, size_bytes: int, lent: LentPages | None = None) -> LentMemory:
    """Map a file's first bytes copy-on-write, and close the descriptor."""
    try:
        check_file(descriptor, size_bytes, sealed=lent is not None)
        memory = LentMemory(descriptor, size_bytes, flags=mmap.MAP_PRIVATE)
    except BaseException:
        os.close(descriptor)
        raise
    _keep(descriptor, lent)
    memory.lent = lent
    return memory


def _keep(descriptor: int, lent: LentPages | None) -> None:
    """Keep a file open as long as its pages are lent; else its mapping is enough."""
    if lent is None or lent.descriptor >= 0:
        os.close(descriptor)
    else:
        lent.descriptor = descriptor


Layout = tuple[torch.dtype, list[int], list[int], int]


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return a tensor's dtype, shape, strides and offset in its storage, the last in elements."""
    with _NoTorchFunction():
        return _dtype(tensor), list(_size(tensor)), list(_stride(tensor)), _offset(tensor)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor is conjugated or negated when it is read: its memory has other values."""
    with _NoTorchFunction():
        return _is_conj(tensor) or _is_neg(tensor)


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last one that such a tensor uses."""
    if 0 in shape:
        return 0
    reached: int = sum(map(operator.mul, shape, strides)) - sum(strides)
    return 1 + reached


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie side by side, in whichever order, each in a place of its own."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return 0 in shape
            expected *= size
    return True


# A tensor that is moved to the GPU is copied once, into a block. A call names the block, and the
# worker reads it there. When the tensor is gone the block is used again: clearing new pages costs
# several times what a copy to old ones does.

LEAST_BLOCK_BYTES = 1 << 20
_IDLE_S = 10.0
_ROUNDED_TO = 1 << 21
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
        descriptor = _sealed_file("gpufaas-block", size_bytes)
        try:
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
        if not LEAST_BLOCK_BYTES <= size_bytes <= self.most_bytes:
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
            smallest = min(fitting, key=lambda block: block.size_bytes)
            self._free.remove(smallest)
            return smallest
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
        while self._left:
            block = self._used.pop(self._left.popleft(), None)
            if block is not None:
                block.free_since_s = time.monotonic()
                self._free.append(block)


def block_of(storage: torch.UntypedStorage) -> SharedBlock | None:
    """Return the block that a storage lies in, if workers may map it."""
    block: SharedBlock | None = storage.__dict__.get(_BLOCK)
    return block if block is not None and block.shared else None


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
