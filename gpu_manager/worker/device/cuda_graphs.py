"""CUDA graphs: work recorded once and replayed as one launch; how a failed recording ends."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from gpu_manager.worker.call_errors import CannotRecord
from gpu_manager.worker.device.cuda_runtime import CudaRuntime

Result = TypeVar("Result")

EndAllocation = Callable[[int, Any], None]


class CudaRecorder:
    """Recordings that share one pool of memory: the results of one are read before the next."""

    def __init__(self, cuda: Any, runtime: CudaRuntime, end_allocation: EndAllocation) -> None:
        self._cuda = cuda
        self._runtime = runtime
        self._end_allocation = end_allocation
        self._pool: Any = None

    def record(self, work: Callable[[], Result]) -> tuple[Any, Result]:
        """Run the work once on a stream of its own, then record it there."""
        cuda = self._cuda
        current = cuda.current_stream()
        stream = cuda.Stream()
        stream.wait_stream(current)
        try:
            with cuda.stream(stream):
                work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CannotRecord(str(error)[:200]) from error
        current.wait_stream(stream)
        cuda.synchronize()
        if self._pool is None:
            self._pool = cuda.graph_pool_handle()
        try:
            return self._capture(work, stream)
        except RuntimeError as error:
            self._undo(current)
            if _lacked_memory(error):
                raise torch.OutOfMemoryError(str(error)) from error
            raise CannotRecord(str(error)[:200]) from error

    def _capture(self, work: Callable[[], Result], stream: Any) -> tuple[Any, Result]:
        cuda = self._cuda
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            result = work()
        return graph, result

    def _undo(self, current: Any) -> None:
        """Have everything be as before a recording that ended in the middle.

        torch leaves the thread on the recording's stream, the allocator at the recording's pool
        and the generator in recording: the next call that draws a number would fail.
        """
        cuda = self._cuda
        cuda.set_stream(current)
        self._runtime.clear_error()
        device = cuda.current_device()
        pool, self._pool = self._pool, None  # recordings that were made keep theirs
        self._end_allocation(device, pool)
        generator = cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())  # a copy is in no recording
        cuda.synchronize()


def end_allocation(device: int, pool: Any) -> None:
    """Have torch's allocator leave a pool whose recording did not come to its end."""
    try:
        torch._C._cuda_endAllocateToPool(device, pool)  # noqa: SLF001 - it has no public name
    except RuntimeError:
        return  # the recording's end has done it


def _lacked_memory(error: BaseException | None) -> bool:
    """Whether the error, or the one before it, is that memory was short: the recording's end fails
    too, and hides what ended it."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
