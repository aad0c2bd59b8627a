"""One of several models on a real GPU: a stream of the process's one context, memory of its own."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from gpu_manager.call_errors import OutOfMemory
from gpu_manager.cuda.context import CudaContext
from gpu_manager.cuda.sm_partitions import SmShare
from gpu_manager.devices.image_file import ImageFile

Result = TypeVar("Result")


class CudaStream(CudaContext):
    """The part of a context that one model has: a stream, the memory of that, a limit.

    torch's allocator never gives one stream the segments of another, so that those of the model's
    stream are its memory, as the driver sees it. Calls of other models run meanwhile. Not a pool
    (`MemPool`) for each: while one thread uses any, torch aborts where another gives memory back.
    """

    def __init__(self, whole: CudaContext, stream: Any, give_back: Callable[[Any], None]) -> None:
        """`give_back` takes the stream when the model has left: libraries keep memory for each."""
        super().__init__(**whole.ingredients())
        # While one model records, torch aborts where another one gives memory back.
        self.recorder = self._usual_recorder = None
        self.total_bytes = whole.total_bytes
        self.accounting = whole.accounting
        self.sms = SmShare(whole.sms.partitions, self._cuda, self.device)
        self._copies.set()  # its context made them possible
        self.idle_memory = whole.idle_memory
        self._stream = self._plain = stream
        self._give_back = give_back

    def use_share(self, share: float) -> None:
        """Have a stream of a green context instead of the usual one."""
        super().use_share(share)
        if self.sms.stream is not None:
            self._give_back(self._plain)
            self._plain, self._stream = None, self.sms.stream

    def serve(self, share: float, threads: int) -> None:  # noqa: ARG002 - none of them computes
        if self.sms.use(share):
            self._stream = self._plain if self.sms.stream is None else self.sms.stream
        self.adopt_thread()

    def adopt_thread(self) -> None:
        self._cuda.set_stream(self._stream)

    def used_bytes(self) -> int:
        """What a call has left on a share's stream is counted to the next model on that stream."""
        own = {each.cuda_stream for each in (self._plain, self._stream) if each is not None}
        segments = self._cuda.memory_snapshot(include_traces=False)
        return sum(int(each["total_size"]) for each in segments if each["stream"] in own)

    def limit(self, limit_bytes: int) -> None:
        """Note the limit, which a measured call is held to; the allocator knows only processes."""
        self._limit_bytes = limit_bytes

    def after_call(self) -> None:
        """Give back what no call of the last second used, for all models of the process."""
        self.idle_memory.ask()

    def clear(self) -> None:
        """Give back everything: the stream goes to the next model."""
        self._wait()
        self._limit_bytes = 0
        self.release()
        if self._plain is not None:
            self._give_back(self._plain)
        self.sms.give_back()

    def load(self, image: ImageFile) -> list[torch.UntypedStorage]:
        with self._mine():
            return super().load(image)

    def run(self, work: Callable[[], Result], *, measure: bool) -> tuple[Result, int]:
        with self._mine(), self._faults_told():
            result = work()
            self._wait()
        return result, self.used_bytes() if measure else 0

    def _mine(self) -> AbstractContextManager[object]:
        stream: AbstractContextManager[object] = self._cuda.stream(self._stream)
        return stream

    def _wait(self) -> None:
        self._stream.synchronize()

    def _need_bytes(self) -> int:
        return self.used_bytes()

    def _short(self, need_bytes: int, detail: str) -> OutOfMemory:
        """The process's limit is reached: by others if the model's own one is not."""
        by_others = need_bytes <= self._limit_bytes
        return OutOfMemory(need_bytes, detail, by_others=by_others)
