"""CUDA graphs: work recorded once and replayed as one launch; how a failed recording ends."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from gpu_manager.call_errors import CannotRecord, clear_frames
from gpu_manager.cuda.libraries import CudaRuntime, lacks_memory

Result = TypeVar("Result")


class CudaRecorder:
    """Recordings that share one pool of memory: the results of one are read before the next.

    They share a stream, too: torch gives memory of a pool only to the stream that had it before,
    and cuBLAS has a workspace for each stream.
    """

    def __init__(self, cuda: Any, runtime: CudaRuntime) -> None:
        """`cuda` is torch's module."""
        self._cuda = cuda
        self._runtime = runtime
        self._pool: Any = None
        self._stream: Any = None  # a recording's end takes it out of capture, however it ends

    def record(self, work: Callable[[], Result]) -> tuple[Any, Result]:
        cuda = self._cuda
        current = cuda.current_stream()
        if self._stream is None:
            self._stream = cuda.ExternalStream(self._runtime.make_stream())
            # Else torch makes one, and with it all of its own streams: 70 MiB of the GPU.
            cuda.graph.default_capture_stream = self._stream
        self._stream.wait_stream(current)
        try:
            with cuda.stream(self._stream):
                work()
        except RuntimeError as error:
            clear_frames(error)
            raise _reason(error) from error
        finally:
            current.wait_stream(self._stream)
        cuda.synchronize()
        if self._pool is None:
            self._pool = cuda.graph_pool_handle()
        graph = cuda.CUDAGraph()
        where = {"pool": self._pool, "stream": self._stream}
        try:
            with cuda.graph(graph, **where, capture_error_mode="thread_local"):
                result = work()
        except RuntimeError as error:
            clear_frames(error)
            graph.reset()  # it gives up the pool where it can: the rest is done below
            del graph  # the error's traceback would keep it, and what it has of the GPU's memory
            self._undo(current)
            raise _reason(error) from error
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
        _leave_pool(cuda, device, pool)
        generator = cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())  # a copy is in no recording
        cuda.synchronize()


def _leave_pool(cuda: Any, device: int, pool: Any) -> None:
    """Have torch's allocator leave a pool whose recording did not come to its end.

    torch 2.11 does neither of the two then, and the pool's memory would be in use for ever.
    """
    try:
        cuda.memory._cuda_endAllocateToPool(device, pool)  # noqa: SLF001 - it has no public name
    except RuntimeError:
        return  # the recording's end has done both, or its begin none: the count is not ours
    cuda.memory._cuda_releasePool(device, pool)  # noqa: SLF001 - it has no public name


def _reason(error: RuntimeError) -> Exception:
    """A lack of memory may lie behind: the recording's end fails too, and hides what ended it."""
    behind: BaseException | None = error
    while behind is not None:
        if lacks_memory(behind):
            return torch.OutOfMemoryError(str(error))
        behind = behind.__cause__ or behind.__context__
    return CannotRecord(str(error)[:200])
