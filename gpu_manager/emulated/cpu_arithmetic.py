"""An emulated GPU: torch on the CPU, with the process's own memory as its memory.

Weights are views of the image's pages, which every process of the node shares; they count in
full, as they would on a GPU.
"""

import ctypes
import math
import mmap
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from gpu_manager.call_errors import CallRefused, CannotBorrow, OutOfMemory, clear_frames
from gpu_manager.devices.image_file import ImageFile
from gpu_manager.devices.lent_memory import (
    IDLE_S,
    MAPPED_AHEAD,
    Borrowed,
    IdleTimer,
    LentStorage,
    Loan,
    MappedFile,
    read_file,
)
from gpu_manager.devices.loads import TransferRank
from gpu_manager.devices.paths import DeviceLink
from gpu_manager.devices.worker_device import WorkRecorder
from gpu_manager.emulated.memory_pool import MemoryPool, PooledMemory
from gpu_manager.emulated.process_memory import ProcessMemory

Result = TypeVar("Result")

_ASKED = re.compile(r"allocate (\d+) bytes")
_BESIDE = "beside other models"  # the pool's words


class CpuArithmetic:
    """A GPU for one model, or for all models of a process until they have parts of their own."""

    keeps_memory = False
    borrowers_copy = False  # who maps memory keeps its pages

    def __init__(
        self,
        context_s: float = 0.0,
        context_bytes: int = 0,
        memory: ProcessMemory | PooledMemory | None = None,
        pool: MemoryPool | None = None,
        owner: str = "",
        all_threads: int | None = None,
        link: DeviceLink | None = None,
    ) -> None:
        """Emulate a context that takes this time and memory.

        The memory is by default all that the process takes from now on; parts for several models
        need a pool. The link has a queue for each owner. `all_threads` compute for
        the whole GPU, by default as many as torch uses.
        """
        self.link = link or DeviceLink()
        self._owner = owner
        self._context_s = context_s
        self._context_bytes = context_bytes
        self.device = torch.device("cpu")
        self.recorder: WorkRecorder | None = None
        self._memory = memory or ProcessMemory()
        self._pool = pool
        self._weights_bytes = 0
        self._lent_bytes = 0
        self._lending = threading.Lock()
        self._lent_files = LentFiles()
        self._limit_bytes = 0
        self._all_threads = all_threads or torch.get_num_threads()
        self._share = ThreadShare(1.0, self._all_threads)
        self._served = 1.0, 0
        self._compute_thread = ComputeThread()
        self._length = WorkLength()

    def part(self, model: int) -> "CpuArithmetic":
        assert self._pool is not None, "a worker for several models has a pool"
        self._pool.install()
        return CpuArithmetic(
            memory=PooledMemory(self._pool, model),
            owner=str(model),
            all_threads=self._all_threads,
            link=self.link,
        )

    def warm(self) -> None:
        """Take as long as a context takes; others that are made meanwhile do not delay it."""
        time.sleep(self._context_s)

    def wait_for_copies(self) -> None:
        """Nothing: no context is needed to map an image."""

    def use_share(self, share: float) -> None:
        self._served = share, 0
        self._share = ThreadShare(share, self._all_threads)

    def serve(self, share: float, threads: int) -> None:
        if self._served != (share, threads):
            self._served = share, threads
            self._share = ThreadShare(share, self._all_threads, threads)

    def adopt_thread(self) -> None:
        """What this thread allocates counts as this model's; it has no helpers of its own."""
        self._memory.adopt_thread()
        compute_alone()

    def overhead_bytes(self) -> int:
        return self._context_bytes + self._memory.used_bytes()

    def used_bytes(self) -> int:
        return self._elsewhere_bytes + self._memory.used_bytes()

    def held_bytes(self) -> int:
        return self.used_bytes() if self._memory.gives_back else 0

    def limit_together(self, most_bytes: int) -> None:
        if self._pool is not None and self._pool.is_installed:
            self._pool.limit_together(most_bytes)

    def release_beside(self) -> None:
        """Nothing: a pool counts no free memory."""

    def limit(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._memory.limit(max(0, limit_bytes - self._elsewhere_bytes))

    def release(self) -> None:
        self._memory.release()

    def after_call(self) -> None:
        self._memory.after_call()

    def clear(self) -> None:
        self._weights_bytes = self._limit_bytes = 0
        self._memory.lift()
        self._share = ThreadShare(1.0, self._all_threads)
        self._compute_thread.end()
        self._length = WorkLength()
        self.release()

    def load(self, image: ImageFile) -> list[torch.UntypedStorage]:
        """Storages over the mapping itself: no byte is copied, but all have arrived."""
        image.populate()
        self._weights_bytes += image.total_bytes
        self._memory.note_weights(self._weights_bytes)
        if not image.total_bytes:
            return [torch.empty(0).untyped_storage() for _ in image.table]
        whole = torch.frombuffer(image.memory, dtype=torch.uint8).untyped_storage()
        return [_part(whole, offset, size) for offset, size in image.table]

    def restore(self, image: ImageFile, number: int, storage: torch.UntypedStorage) -> None:
        content = image.read(number)
        ctypes.memmove(storage.data_ptr(), content, len(content))

    def receive(self, area: memoryview, offset: int, size_bytes: int) -> torch.UntypedStorage:
        if not size_bytes:
            return torch.empty(0).untyped_storage()
        found = torch.frombuffer(area, dtype=torch.uint8, offset=offset, count=size_bytes)
        with _ShortageTold(self), self.link.copying_input(size_bytes, owner=self._owner):
            return found.clone().untyped_storage()

    def borrow(self, area: memoryview, offset: int, size_bytes: int) -> torch.UntypedStorage:
        """The area's bytes themselves; they take the time of a copy to a GPU."""
        with self.link.copying_input(size_bytes, owner=self._owner):
            found = torch.frombuffer(area, dtype=torch.uint8, offset=offset, count=size_bytes)
            return found.untyped_storage()

    def refill(
        self, storage: torch.UntypedStorage, area: memoryview, offset: int, size_bytes: int
    ) -> None:
        if size_bytes:
            source = ctypes.addressof(ctypes.c_char.from_buffer(area, offset))
            with self.link.copying_input(size_bytes, owner=self._owner):
                ctypes.memmove(storage.data_ptr(), source, size_bytes)

    def park(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A copy in pages of a file, for only anonymous memory counts as the device's."""
        size = storage.nbytes()
        descriptor = os.memfd_create("gpufaas-parked", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        parked = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        with self.link.copying_output(size, TransferRank.BACKGROUND, self._owner):
            return parked.copy_(storage, non_blocking=False)

    def unpark(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        with self.link.copying_input(storage.nbytes(), owner=self._owner):
            return self.duplicate(storage)

    def duplicate(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        with _ShortageTold(self):
            copied: torch.UntypedStorage = storage.clone()  # type: ignore[no-untyped-call] # torch gives it no types
        return copied

    def lend(self, storage: torch.UntypedStorage) -> Loan | None:
        """Move it to memory of a file, which others map too; it counts as the device's still."""
        size_bytes = storage.nbytes()
        file = self._lent_files.take(size_bytes)
        try:
            moved = file.moved(storage)
        except BaseException:
            file.leave()
            raise
        self._count_lent(size_bytes)
        self.limit(self._limit_bytes)  # the mapping takes addresses
        lent = LentStorage(size_bytes, 0, b"", file.descriptor)
        return Loan(lent, moved, partial(self._end_loan, file, size_bytes))

    def _end_loan(self, file: "LentFile", size_bytes: int, uses: int) -> None:
        self._count_lent(-size_bytes)
        file.end_loan(uses)

    def _count_lent(self, more_bytes: int) -> None:
        with self._lending:
            self._lent_bytes += more_bytes

    def open_lent(self, lent: LentStorage, *, same_gpu: bool) -> Borrowed:
        """The lender's memory itself, if it is of this GPU; from another one a copy."""
        if lent.descriptor < 0 or lent.token:
            raise CannotBorrow("an emulated GPU has no memory that a driver knows")
        try:
            memory, is_mapped = read_file(lent.descriptor, lent.offset, lent.size_bytes)
        except CallRefused as error:
            raise CannotBorrow(error.detail) from error
        if not is_mapped:
            raise CannotBorrow("memory that its lender could shrink")
        self.limit(self._limit_bytes)  # as above
        if not same_gpu:
            return Borrowed(self.receive(memory, lent.offset, lent.size_bytes), in_place=False)
        part = memory[lent.offset :]
        found = torch.frombuffer(part, dtype=torch.uint8, count=lent.size_bytes)
        return Borrowed(found.untyped_storage(), in_place=True)

    def run(self, work: Callable[[], Result], *, measure: bool) -> tuple[Result, int]:
        if measure:
            self.limit(self._limit_bytes)
            self._memory.watch()
        with _ShortageTold(self):
            begun_s = time.perf_counter()
            try:
                with self._memory.computing():
                    result = self._compute(work)
            finally:
                self._share.pause(begun_s)
        peak_bytes = self._elsewhere_bytes + self._memory.peak_bytes() if measure else 0
        return result, peak_bytes

    def _compute(self, work: Callable[[], Result]) -> Result:
        """Do it in this thread alone, or, what is long, in the one that has helpers."""
        helped = self._share.threads > 1 and self._length.is_long
        begun_s = time.perf_counter()
        result = self._compute_thread.run(work, self._adopt_compute_thread) if helped else work()
        self._length.note(time.perf_counter() - begun_s, helped=helped)
        return result

    def _adopt_compute_thread(self) -> None:
        self._memory.adopt_thread()
        self._share.adopt_thread()

    def seed(self, state: bytes) -> None:
        torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def seeded(self, state: bytes) -> bytes:  # noqa: ARG002 - this generator itself has moved on
        return torch.default_generator.get_state().numpy().tobytes()

    def send(
        self,
        parts: list[torch.Tensor],
        places: list[memoryview],
        rank: TransferRank = TransferRank.CALL,
    ) -> None:
        size_bytes = sum(map(len, places))
        with self.link.copying_output(size_bytes, rank, self._owner):
            for part, place in zip(parts, places, strict=True):
                if part.numel():
                    target = ctypes.addressof(ctypes.c_char.from_buffer(place))
                    ctypes.memmove(target, part.data_ptr(), len(place))

    def share(self, area: memoryview) -> None:  # noqa: ARG002 - it is the device's memory already
        """Take the new mapping into account."""
        self.limit(self._limit_bytes)

    @property
    def _elsewhere_bytes(self) -> int:
        return self._weights_bytes + self._lent_bytes + self._context_bytes

    def shortage(self, error: BaseException | None) -> OutOfMemory | None:
        """Return what an error says in each of the ways in which memory can be short."""
        if isinstance(error, MemoryError):
            return OutOfMemory(self._limit_bytes + 1, "the host has no more memory")
        text = str(error)
        if not isinstance(error, RuntimeError) or "allocate memory" not in text:
            return None
        asked = _ASKED.search(text)
        need = self.used_bytes() + (int(asked[1]) if asked else 0)
        if _BESIDE in text:
            return OutOfMemory(need, text, by_others=True)
        return OutOfMemory(max(need, self._limit_bytes + 1), text)


class _ShortageTold:
    """Has a lack of memory inside of the `with` block be OutOfMemory."""

    def __init__(self, device: CpuArithmetic) -> None:
        self._device = device

    def __enter__(self) -> None:
        """Nothing: only an error is of interest."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        short = self._device.shortage(error)
        if short is not None:
            clear_frames(error)
            raise short from error


def _part(whole: torch.UntypedStorage, offset: int, size: int) -> torch.UntypedStorage:
    part: torch.UntypedStorage = whole[offset : offset + size]
    return part


# An emulated GPU's threads: one does the long work of many, and each model has a share of them.
#
# torch computes with several threads by OpenMP, which gives every thread that calls it a team.
# Where the teams of a process have more threads than there are cores, even idle ones, OpenMP has
# each thread sleep between two loops: two cores did 160 runs of mobilenet a second for one thread,
# 47 where another thread had computed once. So all other threads compute alone (`compute_alone`).


class ComputeThread:
    """Does the work of whoever asks, one after the other; one thread asks at a time."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None  # once it runs

    def run(self, work: Callable[[], Result], adopt: Callable[[], None]) -> Result:
        """Do the work there, after `adopt`; here, where the system gives no further thread."""

        def adopted() -> Result:
            adopt()
            return work()

        if self._thread is None:
            # Gradients are a setting of each thread, as in those of channels.
            self._thread = ThreadPoolExecutor(1, "compute", torch.set_grad_enabled, (False,))
        try:
            job = self._thread.submit(adopted)
        except RuntimeError:
            self._thread = None
            return work()
        return job.result()

    def end(self) -> None:
        """Let the thread go; the next work has a new one."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None


def compute_alone() -> None:
    """Have no helpers in calls of this thread.

    torch keeps the number for each thread that calls it. A thread's first call would set the number
    that any thread set last, so that call comes before.
    """
    torch.get_num_threads()
    torch.set_num_threads(1)


class ThreadShare:
    """Some of the threads that a process computes with; a part of one is one that pauses."""

    def __init__(self, share: float, all_threads: int, most_threads: int = 0) -> None:
        """No more than `most_threads` compute, unless that is 0."""
        exact = min(share * all_threads, most_threads or all_threads)
        self.threads = max(1, math.ceil(exact - 1e-9))
        self._pause = self.threads / exact - 1.0  # seconds for each second of computing

    def adopt_thread(self) -> None:
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)

    def pause(self, since_s: float) -> None:
        """Pause for as long as the threads have had more than their share, computing since then."""
        pause_s = self._pause * (time.perf_counter() - since_s)
        if pause_s > 0:
            time.sleep(pause_s)


# Shorter work gains little by helpers, and they look for more of it for some milliseconds, on cores
# that the functions use.
LONG_S = 0.005
_QUICK_BEFORE_TRIAL = 64
_NEWEST = 0.25  # the weight of the newest time


class WorkLength:
    """Knows how long one thread takes lately; long at first, so that a first call is not slow."""

    def __init__(self) -> None:
        self._alone_s = math.inf
        self._quick = _QUICK_BEFORE_TRIAL - 1

    @property
    def is_long(self) -> bool:
        """Whether the next call has helpers; now and then one has none, to learn what it takes."""
        return self._alone_s > LONG_S and self._quick < _QUICK_BEFORE_TRIAL

    def note(self, took_s: float, *, helped: bool) -> None:
        """Learn from a call; what takes long even with helpers needs no trial."""
        if helped:
            self._quick = self._quick + 1 if took_s <= LONG_S else 0
            return
        self._quick = 0
        if math.isinf(self._alone_s):
            self._alone_s = took_s
        else:  # a call that something else held up counts as twice as long at most
            newest_s = min(took_s, 2 * self._alone_s)
            self._alone_s += _NEWEST * (newest_s - self._alone_s)


# Memory into which an emulated GPU moves what it lends, and that is used again afterwards.
#
# To clear new pages takes several times what a copy to used ones does. A file is free when nobody
# has borrowed it any more, and no tensor of this process lies in it.

_MOST_FREE_BYTES = 1 << 28
_ROUNDED_TO = 1 << 21


class LentFile:
    """One file, while it is lent or one of our tensors lies in it."""

    def __init__(self, files: "LentFiles", place: MappedFile) -> None:
        self.descriptor = place.descriptor
        self._place = place
        self._files = files
        self._lock = threading.RLock()  # a finalizer may come at any time
        self._holders = 2  # the loan, and our tensors
        self._is_spoilt = False  # others may map it for ever

    def moved(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        pages = (ctypes.c_char * storage.nbytes()).from_buffer(self._place.memory)
        weakref.finalize(pages, self.leave)
        there = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
        return there.copy_(storage, non_blocking=False)

    def end_loan(self, uses: int) -> None:
        """The loan is over; if others may still read what is there, nothing else ever is."""
        self._is_spoilt = uses > 0
        self.leave()

    def leave(self) -> None:
        """The loan is over, or our tensors are gone."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        if self._is_spoilt:
            self._place.close()
        else:
            self._files.give(self._place)


class LentFiles:
    """The files of one device. Thread-safe, also in a finalizer."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._free: list[MappedFile] = []
        self._trimming = IdleTimer(IDLE_S, self.trim)

    def take(self, size_bytes: int) -> LentFile:
        """Return a file at least as large: one that is free, or a new one."""
        wanted = -(-size_bytes // _ROUNDED_TO) * _ROUNDED_TO
        with self._lock:
            for place in self._free:
                if place.size_bytes == wanted:
                    self._free.remove(place)
                    place.memory[size_bytes:] = bytes(wanted - size_bytes)  # of earlier data
                    return LentFile(self, place)
        return LentFile(self, MappedFile(wanted, MAPPED_AHEAD))

    def give(self, place: MappedFile) -> None:
        """Keep a file for a later loan, unless there are enough."""
        with self._lock:
            free_bytes = sum(free.size_bytes for free in self._free)
            if free_bytes + place.size_bytes <= _MOST_FREE_BYTES:
                place.free_since_s = time.monotonic()
                self._free.append(place)
                self._trimming.ask()
                return
        place.close()

    def trim(self, idle_s: float = IDLE_S) -> None:
        with self._lock:
            before_s = time.monotonic() - idle_s
            for place in [place for place in self._free if place.free_since_s <= before_s]:
                self._free.remove(place)
                place.close()
            if self._free:
                self._trimming.ask()
