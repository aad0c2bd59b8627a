"""Ways to bring weights to the GPU: staged as workers do it, pinned in place, and plainly."""

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch

from bench.gpu.gpu_bench import PartOptions, Say
from bench.gpu.results_file import Row
from bench.measure.report import MeasurementFailed
from gpu_manager.cuda.libraries import PORTABLE, READ_ONLY, CudaRuntime, loaded_runtime
from gpu_manager.cuda.staged_copy import PIECE_BYTES, InTurn, StagingBuffers
from gpu_manager.worker.transfers.path import PathSpeed, TransferPath
from gpu_manager.worker.transfers.process_gate import ProcessGate, make_gate

_BYTES, _EMULATED_BYTES = 2 << 30, 64 << 20
_TIMES = 3
_RANDOM_BYTES = 64 << 20
_PIECE_BYTES = 64 << 20
_PIECES = tuple(mib << 20 for mib in (8, 16, 32, 64))
_BLOCKS = tuple(mib << 20 for mib in (1, 2, 4))
_MORE_THREADS = (4, 16)
# Filling a buffer alone, which a copy cannot be faster than: by so many threads, each so much.
_FILLERS, _FILLED_BYTES = (1, 8, 16), 4 << 20
_POPULATE_READ = 22  # MADV_POPULATE_READ
_libc = ctypes.CDLL(None)
# Aimed at: the share of the link that the copy alone reaches.
_OF_LINK = 0.8


def measure(asked: PartOptions, say: Say) -> None:
    """One row a way, each with its share of the link; the link is a copy from pinned memory."""
    device = torch.device("cpu" if asked.emulated else "cuda")
    size = _EMULATED_BYTES if asked.emulated else _BYTES
    target = torch.empty(size, dtype=torch.uint8, device=device)
    link = link_bytes_s(target)
    say({"way": "from pinned memory, the link", "gb_s": link / 1e9, "of_link": 1.0, "note": ""})
    with _image(size) as (descriptor, source):

        def row(way: str, copy: Callable[[], None], note: str = "") -> Row:
            seconds = size / _best_s(copy)
            return {"way": way, "gb_s": seconds / 1e9, "of_link": seconds / link, "note": note}

        say(row("plainly", lambda: _synchronized(lambda: target.copy_(source))))
        if asked.emulated:
            return
        runtime = loaded_runtime()
        for way, flags in (("pinned in pieces", PORTABLE), ("pinned read-only", READ_ONLY)):
            if runtime.pin(source.data_ptr(), mmap.PAGESIZE, flags):
                runtime.unpin(source.data_ptr())
                say(row(way, lambda: _registered(runtime, source, target)))
            else:
                say({"way": way, "gb_s": None, "of_link": None, "note": "refused"})
        best = 0.0
        for piece_bytes in _PIECES:
            began_s = time.perf_counter()
            staging = StagingBuffers(torch.cuda, runtime, piece_bytes)
            made_ms = 1e3 * (time.perf_counter() - began_s)
            found = row(
                f"staged, {piece_bytes >> 20} MiB",
                partial(staging.copy, descriptor, size, target),
                f"buffers made in {made_ms:.1f} ms, pinned: {staging.pinned}",
            )
            say(found)
            best = max(best, found["of_link"])
            if piece_bytes == PIECE_BYTES:
                for block_bytes in _BLOCKS:
                    copy = partial(
                        staging.copy, descriptor, size, target, in_turn=_blocks(block_bytes)
                    )
                    say(row(f"staged, given in blocks of {block_bytes >> 20} MiB", copy))
            staging.close()
        for threads in _MORE_THREADS:
            staging = StagingBuffers(torch.cuda, runtime, most_threads=threads)
            copy = partial(staging.copy, descriptor, size, target)
            say(row(f"staged, {PIECE_BYTES >> 20} MiB by {threads} threads", copy))
            staging.close()
        for threads in _FILLERS:
            for way, fill in (("reading", _read), ("copying from a mapping", _copied)):
                filled = partial(_filled, descriptor, size, threads, fill)
                say(row(f"a buffer filled alone, {way}, by {threads} threads", filled))
    if best < _OF_LINK:
        raise MeasurementFailed(f"staged copies reach {best:.0%} of the link, not {_OF_LINK:.0%}")


def _blocks(block_bytes: int) -> InTurn:
    """Blocks that wait for nobody, as those of a load that is alone."""

    def in_turn(size_bytes: int) -> Generator[int, None, None]:
        path = TransferPath(PathSpeed(block_bytes=block_bytes), ProcessGate(gate))
        yield from path.transfer("load").blocks(size_bytes)

    gate = make_gate()
    return in_turn


def link_bytes_s(target: torch.Tensor) -> float:
    """The bytes a second of a copy from memory that torch pinned."""
    size = min(target.numel(), 256 << 20)
    source = torch.ones(size, dtype=torch.uint8)
    pinned = source.pin_memory() if target.is_cuda else source
    return size / _best_s(
        lambda: _synchronized(lambda: target[:size].copy_(pinned, non_blocking=True))
    )


def _registered(runtime: CudaRuntime, source: torch.Tensor, target: torch.Tensor) -> None:
    """Each piece pinned where it is while the one before is copied."""
    pinned = []
    for start in range(0, source.numel(), _PIECE_BYTES):
        piece = source[start : start + _PIECE_BYTES]
        if runtime.pin(piece.data_ptr(), piece.numel()):
            pinned.append(piece.data_ptr())
        target[start : start + piece.numel()].copy_(piece, non_blocking=True)
    torch.cuda.synchronize()
    for address in pinned:
        runtime.unpin(address)


Fill = Callable[[int, int, int, int, int], None]  # file, its mapping, offset, place, size


def _filled(descriptor: int, size: int, threads: int, fill: Fill) -> None:
    """Bring the file through one buffer, without a GPU."""
    buffer = mmap.mmap(-1, PIECE_BYTES)
    place = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    memory = mmap.mmap(descriptor, size)
    mapped = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, size, PIECE_BYTES):
            parts = range(0, min(PIECE_BYTES, size - start), _FILLED_BYTES)
            orders = [
                pool.submit(fill, descriptor, mapped, start + at, place + at, _FILLED_BYTES)
                for at in parts
            ]
            for order in orders:
                order.result()


def _read(descriptor: int, _mapped: int, offset: int, place: int, size: int) -> None:
    os.preadv(descriptor, [(ctypes.c_char * size).from_address(place)], offset)


def _copied(_descriptor: int, mapped: int, offset: int, place: int, size: int) -> None:
    _libc.madvise(
        ctypes.c_void_p(mapped + offset), ctypes.c_size_t(size), ctypes.c_int(_POPULATE_READ)
    )
    ctypes.memmove(place, mapped + offset, size)


def _synchronized(copy: Callable[[], object]) -> None:
    copy()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _best_s(copy: Callable[[], None]) -> float:
    times = []
    for _ in range(_TIMES):
        began_s = time.perf_counter()
        copy()
        times.append(time.perf_counter() - began_s)
    return min(times)


@contextmanager
def _image(size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """A file in memory, as the store has weights, and its pages."""
    descriptor = os.memfd_create("bench-image", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        source = torch.frombuffer(memory, dtype=torch.uint8)
        some = min(size, _RANDOM_BYTES)  # a number at a time takes seconds
        source[:some].random_(0, 255, generator=torch.Generator().manual_seed(0))
        for start in range(some, size, some):
            rest = source[start : start + some]
            rest.copy_(source[: len(rest)])
        yield descriptor, source
    finally:
        os.close(descriptor)
