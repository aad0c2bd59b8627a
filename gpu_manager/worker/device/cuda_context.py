"""A real GPU: one CUDA context, used on torch's current stream."""

import mmap
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from gpu_manager.worker.call_errors import CannotRecord, OutOfMemory
from gpu_manager.worker.device.image_file import ImageFile
from gpu_manager.worker.device.worker_device import WorkRecorder

Result = TypeVar("Result")

# Pinned and copied at a time, so that the copy of one piece overlaps the pinning of the next.
_PIECE_BYTES = 64 << 20
_PIN_READ_ONLY, _PIN_SHARED = 8, 1
_ASKED = re.compile(r"allocate ([\d.]+) ([KMGT]?i?B)")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class CudaContext:
    """One GPU by torch's name for it (`cuda:0`)."""

    reads_areas = False

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.recorder: WorkRecorder | None = CudaRecorder()
        self._overhead_bytes = 0
        self._limit_bytes = 0

    def warm(self) -> None:
        """Make the context, the allocator's first block and the libraries' handles."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        torch.cuda.set_device(self.device)
        small = torch.ones(16, 16, device=self.device)
        torch.nn.functional.conv2d(small.view(1, 1, 16, 16), small[:3, :3].reshape(1, 1, 3, 3))
        (small @ small).sum().item()
        torch.cuda.synchronize(self.device)
        reserved_bytes = torch.cuda.memory_reserved(self.device)
        now_bytes, _ = torch.cuda.mem_get_info(self.device)
        # Others may allocate at the same moment; a context never takes less than nothing.
        self._overhead_bytes = max(0, min(free_bytes, total_bytes) - now_bytes - reserved_bytes)

    def overhead_bytes(self) -> int:
        """What the context takes beside torch's allocator."""
        return self._overhead_bytes

    def used_bytes(self) -> int:
        """The context and what torch has allocated."""
        return self._overhead_bytes + torch.cuda.memory_allocated(self.device)

    def limit(self, limit_bytes: int) -> None:
        """Have torch's allocator refuse more than the limit leaves beside the context."""
        self._limit_bytes = limit_bytes
        _, total_bytes = torch.cuda.mem_get_info(self.device)
        share = max(0, limit_bytes - self._overhead_bytes) / total_bytes
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), self.device)

    def release(self) -> None:
        """Give the allocator's free blocks back."""
        torch.cuda.empty_cache()

    def load(self, image: ImageFile) -> list[torch.UntypedStorage]:
        """Copy the whole image at once; its storages are parts of one allocation."""
        whole = torch.empty(max(image.total_bytes, 1), dtype=torch.uint8, device=self.device)
        memory = _shared_mapping(image)
        source = torch.frombuffer(memory, dtype=torch.uint8) if image.total_bytes else None
        pinned: list[int] = []
        try:
            for start in range(0, image.total_bytes, _PIECE_BYTES):
                assert source is not None
                piece = source[start : start + _PIECE_BYTES]
                if _pin(piece.data_ptr(), piece.numel(), _PIN_READ_ONLY):
                    pinned.append(piece.data_ptr())
                whole[start : start + piece.numel()].copy_(piece, non_blocking=True)
            torch.cuda.synchronize(self.device)
        finally:
            for address in pinned:
                _runtime().cudaHostUnregister(address)
        storage = whole.untyped_storage()
        return [storage[offset : offset + size] for offset, size in image.table]

    def restore(self, image: ImageFile, number: int, storage: torch.UntypedStorage) -> None:
        """Copy the image's bytes over what a program wrote."""
        content = image.read(number)
        if content:
            target = torch.empty(0, dtype=torch.uint8, device=self.device)
            target.set_(storage, 0, (len(content),), (1,))
            target.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def receive(
        self, area: memoryview, offset: int, size_bytes: int, *, keep: bool
    ) -> torch.UntypedStorage:
        """A copy on the GPU, kept or not."""
        del keep
        if not size_bytes:
            return torch.empty(0, device=self.device).untyped_storage()
        found = torch.frombuffer(area, dtype=torch.uint8, offset=offset, count=size_bytes)
        return found.to(self.device, non_blocking=True).untyped_storage()

    def run(self, work: Callable[[], Result], *, measure: bool) -> tuple[Result, int]:
        """Do the work and wait for the GPU."""
        if measure:
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            result = work()
            torch.cuda.synchronize(self.device)
        except torch.OutOfMemoryError as error:
            peak_bytes = torch.cuda.max_memory_allocated(self.device)
            need_bytes = self._overhead_bytes + peak_bytes + _asked_bytes(str(error))
            raise OutOfMemory(max(need_bytes, self._limit_bytes + 1), str(error)) from error
        if not measure:
            return result, 0
        return result, self._overhead_bytes + torch.cuda.max_memory_allocated(self.device)

    def seed(self, state: bytes) -> None:
        """Seed the GPU's generator with what the CPU's would draw next."""
        generator = _generator(state)
        number = torch.randint(1 << 62, (), generator=generator)
        torch.cuda.default_generators[self.device.index or 0].manual_seed(int(number))

    def seeded(self, state: bytes) -> bytes:
        """The CPU generator's state after that one number."""
        generator = _generator(state)
        torch.randint(1 << 62, (), generator=generator)
        return generator.get_state().numpy().tobytes()

    def send(self, parts: list[torch.Tensor], places: list[memoryview]) -> None:
        """Copy to the host, all at once, and wait."""
        for part, place in zip(parts, places, strict=True):
            if part.numel():
                target = torch.frombuffer(place, dtype=torch.uint8)
                target.copy_(part, non_blocking=True)
        torch.cuda.synchronize(self.device)

    def share(self, area: memoryview) -> "_Pinned | None":
        """Pin the area, so that copies need no detour."""
        view = torch.frombuffer(area, dtype=torch.uint8)
        if not _pin(view.data_ptr(), view.numel(), _PIN_SHARED):
            return None
        return _Pinned(view)


class CudaRecorder:
    """CUDA graphs, which share one pool of memory: the results of one are read before the next."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Run the work once on a stream of its own, then record it there."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch gives it no types
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                work()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            with torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            ):
                result = work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.synchronize()
            raise CannotRecord(str(error)[:200]) from error
        return graph, result


class _Pinned:
    """Host memory that stays pinned until this is dropped."""

    def __init__(self, view: torch.Tensor) -> None:
        self._view = view

    def __del__(self) -> None:
        _runtime().cudaHostUnregister(self._view.data_ptr())


def _shared_mapping(image: ImageFile) -> mmap.mmap:
    """The image's own pages: pinning a private mapping would copy every one of them."""
    size = max(image.total_bytes, 1)
    descriptor = os.open(f"/proc/self/fd/{image.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


def _pin(address: int, size: int, flags: int) -> bool:
    """Whether the driver has pinned these pages."""
    return int(_runtime().cudaHostRegister(address, size, flags)) == 0


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch gives it no types


def _generator(state: bytes) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


def _asked_bytes(message: str) -> int:
    found = _ASKED.search(message)
    return int(float(found[1]) * _UNITS.get(found[2], 1)) if found else 0
