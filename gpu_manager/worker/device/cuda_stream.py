"""One of several models on a real GPU: a stream of the process's one context, memory of its own."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from gpu_manager.worker.call_errors import OutOfMemory
from gpu_manager.worker.device.cuda_context import CudaContext
from gpu_manager.worker.device.image_file import ImageFile
from gpu_manager.worker.device.shares.sm_share import SmShare
from gpu_manager.worker.lending.lent_storage import Borrowed, LentStorage

Result = TypeVar("Result")

# Free memory of a model stays with it for so long: a pool is as large as its calls of this time.
_WINDOW_S = 1.0


class CudaStream(CudaContext):
    """The part of a context that one model has: a stream, pools of memory, a limit.

    Memory is counted in the allocator's segments, as the driver sees them. Calls of other models
    run on their streams meanwhile, so that nothing here waits for the whole GPU.
    """

    def __init__(self, whole: CudaContext, stream: Any, give_back: Callable[[Any], None]) -> None:
        """`give_back` takes the stream when the model has left: libraries keep memory for each."""
        super().__init__(**whole.ingredients())
        self.link = whole.link
        # A recording's memory must be in no other pool: what is freed there would be given again.
        self.recorder = self._usual_recorder = None
        self.total_bytes = whole.total_bytes
        self.accounting = whole.accounting
        self.sms = SmShare(whole.sms.partitions, self._cuda, self.device)
        self.parts = whole.parts
        self._copies.set()  # its context made them possible
        self._stream = self._plain = stream
        self._give_back = give_back
        self._pool: Any = self._cuda.MemPool()
        self._former: list[Any] = []  # ids of pools that were given up, of which blocks are in use
        self._renewing = threading.Lock()
        self._renewed_s = time.monotonic()
        self._shrinking: threading.Timer | None = None

    def use_share(self, share: float) -> None:
        """Have a stream of a green context instead of the usual one."""
        super().use_share(share)
        if self.sms.stream is not None:
            self._give_back(self._plain)
            self._plain, self._stream = None, self.sms.stream

    def serve(self, share: float, threads: int) -> None:  # noqa: ARG002 - none of them computes
        """Have the calls go to the stream of such a share, which is less than the model's own."""
        if self.sms.use(share):
            self._stream = self._plain if self.sms.stream is None else self.sms.stream
        self.adopt_thread()

    def adopt_thread(self) -> None:
        """Have this thread's work go to the model's stream."""
        self._cuda.set_stream(self._stream)

    def used_bytes(self) -> int:
        """All segments of the model's pools."""
        with self._renewing:
            return self._segments_bytes(self._pool.id) + self._former_bytes()

    def limit(self, limit_bytes: int) -> None:
        """Note the limit, which a measured call is held to; the allocator knows only processes."""
        self._limit_bytes = limit_bytes

    def release(self) -> None:
        """Give free segments back: those of a pool that is given up, and is in no use."""
        with self._renewing:
            former, self._pool = self._pool, self._cuda.MemPool()
            self._former.append(former.id)
            self._renewed_s = time.monotonic()
            del former  # its free segments go back with it
        self._cuda.empty_cache()  # and those of former pools whose blocks were freed since
        with self._renewing:
            self._former_bytes()

    def after_call(self) -> None:
        """Give back what the calls of the last second did not use; later, what is free."""
        if time.monotonic() - self._renewed_s > _WINDOW_S:
            self.release()
        if self._shrinking is None or not self._shrinking.is_alive():
            self._shrinking = threading.Timer(2 * _WINDOW_S, self._shrink)
            self._shrinking.daemon = True
            self._shrinking.start()

    def clear(self) -> None:
        """Give back everything: the stream goes to the next model."""
        self._wait()
        if self._shrinking is not None:
            self._shrinking.cancel()
        self._limit_bytes = 0
        self.release()
        if self._plain is not None:
            self._give_back(self._plain)
        self.sms.give_back()

    def load(self, image: ImageFile) -> list[torch.UntypedStorage]:
        """Copy the whole image on the model's stream, into its pool."""
        with self._mine():
            return super().load(image)

    def receive(self, area: memoryview, offset: int, size_bytes: int) -> torch.UntypedStorage:
        """A copy in the model's pool."""
        with self._mine():
            return super().receive(area, offset, size_bytes)

    def unpark(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A copy in the model's pool."""
        with self._mine():
            return super().unpark(storage)

    def duplicate(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A copy in the model's pool."""
        with self._mine():
            return super().duplicate(storage)

    def open_lent(self, lent: LentStorage, *, same_gpu: bool) -> Borrowed:
        """A copy in the model's pool."""
        with self._mine():
            return super().open_lent(lent, same_gpu=same_gpu)

    def run(self, work: Callable[[], Result], *, measure: bool) -> tuple[Result, int]:
        """Do the work on the model's stream, and wait for that stream alone."""
        with self._mine(), self._faults_told():
            result = work()
            self._wait()
        return result, self.used_bytes() if measure else 0

    @contextlib.contextmanager
    def _mine(self) -> Iterator[None]:
        with self._cuda.stream(self._stream), self._cuda.use_mem_pool(self._pool):
            yield

    def _wait(self) -> None:
        self._stream.synchronize()

    def _need_bytes(self) -> int:
        return self.used_bytes()

    def _short(self, need_bytes: int, detail: str) -> OutOfMemory:
        """The process's limit is reached: by others if the model's own one is not."""
        by_others = need_bytes <= self._limit_bytes
        return OutOfMemory(need_bytes, detail, by_others=by_others)

    def _former_bytes(self) -> int:
        """What pools that were given up have still; those that have nothing are forgotten."""
        former = {pool: self._segments_bytes(pool) for pool in self._former}
        self._former = [pool for pool, size_bytes in former.items() if size_bytes]
        return sum(former.values())

    def _segments_bytes(self, pool: Any) -> int:
        found = self._cuda.memory_snapshot(pool, include_traces=False)
        return sum(int(segment["total_size"]) for segment in found)

    def _shrink(self) -> None:
        """No call has ended for a while; one under way keeps the pool that it began with."""
        if time.monotonic() - self._renewed_s > _WINDOW_S:
            self.release()
