"""A worker's way to its first call: its device made ready, and models' weights brought there.

Both take place at the same time, in threads: the main thread goes on with orders.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from gpu_manager.worker import worker_orders
from gpu_manager.worker.call_errors import ShareRefused
from gpu_manager.worker.call_reports import Tell
from gpu_manager.worker.device.arrival import Arrival
from gpu_manager.worker.device.cpu_arithmetic import CpuArithmetic
from gpu_manager.worker.device.cuda_context import CudaContext
from gpu_manager.worker.device.cuda_stream import CudaStream
from gpu_manager.worker.device.device_image import DeviceImage
from gpu_manager.worker.device.image_file import ImageFile
from gpu_manager.worker.device.pool.memory_pool import MemoryPool
from gpu_manager.worker.device.worker_device import WorkerDevice
from gpu_manager.worker.program.allowed_operators import OperatorTable
from gpu_manager.worker.served_model import ServedModel

# CUDA's libraries are opened on such a thread, with the stack that they have on a main thread.
_STACK_BYTES = 16 << 20


class WorkerSetup:
    """What a worker has of its device, and the loads of its models."""

    def __init__(self, tell: Tell, pool: MemoryPool | None = None) -> None:
        """`pool` is the memory of several models on an emulated GPU, where it could be built."""
        self._tell = tell
        self._pool = pool
        self._device: WorkerDevice | None = None
        self._table: OperatorTable | None = None
        self._context = [0.0, 0.0]  # when it began to be made, and when it was there
        self._is_usable = False  # the device, once it is warmed
        self._warmed = threading.Event()
        self._assigned = threading.Event()

    def warm(self, order: worker_orders.Warm) -> None:
        """Make the device ready, in the background."""
        device = self._device = _device(order, self._pool)
        self.background(partial(self._warm, device))
        self._table = OperatorTable(device.device)

    @property
    def device(self) -> WorkerDevice:
        """The worker's device, ready or not."""
        assert self._device is not None, "a worker is warmed before all else"
        return self._device

    @property
    def table(self) -> OperatorTable:
        """The operators of all models: one of each model's own took 160 KiB."""
        assert self._table is not None, "a worker is warmed before all else"
        return self._table

    def overhead_bytes(self) -> int:
        """Wait until the device is ready; return what it takes of its memory without a model."""
        self._warmed.wait()
        return self.device.overhead_bytes()

    def note_assigned(self) -> None:
        """The worker belongs to a tenant now, and has given up its rights."""
        self._assigned.set()

    def load(
        self, model: ServedModel, order: worker_orders.LoadImage, descriptors: Sequence[int]
    ) -> None:
        """Bring an image to the device, in the background; its bytes are copied, not looked at.

        It is reported when the worker has been assigned, too.
        """
        self.background(partial(self._load, model, order, descriptors))

    def background(self, work: Callable[[], None]) -> None:
        """Work in a thread; a fault of ours ends the process, as on the main thread."""
        usual_bytes = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=_whole, args=(work,), name="setup", daemon=True).start()
        finally:
            threading.stack_size(usual_bytes)

    def _warm(self, device: WorkerDevice) -> None:
        begin_s = time.monotonic()
        try:
            device.warm()
            self._is_usable = True
        except (RuntimeError, OSError, AssertionError) as error:  # as torch says it
            # The manager reads it when it wants to use this worker: until then the pool has one
            # worker that waits, and does not make another and another.
            text = f"the GPU cannot be used: {type(error).__name__}: {error}"
            # Not for want of memory, even where it was: there may be more by then, for another one.
            self._tell(worker_orders.ImageLoadFailed(0, False, text[:500]))
        self._context = [begin_s, time.monotonic()]
        self._warmed.set()

    def _load(
        self, model: ServedModel, order: worker_orders.LoadImage, descriptors: Sequence[int]
    ) -> None:
        self.device.wait_for_copies()
        begin_s = time.monotonic()
        image, *others = descriptors
        arrival = Arrival(order.total_bytes, others.pop(0) if order.arriving else None)
        executor, device = model.executor, model.device
        placed: DeviceImage | None = None
        try:
            if order.together_bytes:
                self.device.limit_together(order.together_bytes)
            device.use_share(order.gpu_share)
            device.adopt_thread()
            placed = _placed(order, image, arrival, model)
            time.sleep(max(0.0, begin_s + order.load_s - time.monotonic()))
            end_s = time.monotonic()
            arrival.wait_verified()
            self._assigned.wait()
            if not self._is_usable:
                return  # the manager knows it
            executor.images[order.digest] = placed
            executor.memory.set_limit(order.limit_bytes)
        except (OSError, ValueError, RuntimeError, MemoryError, ShareRefused) as error:
            short = isinstance(error, (MemoryError, torch.OutOfMemoryError))
            text = f"{type(error).__name__}: {error}"[:500]
            self._tell(worker_orders.ImageLoadFailed(order.model, short, text))
            return
        finally:
            arrival.close()
            if placed is not None and order.digest not in executor.images:
                placed.close()
            model.note_settled()
        executor.single.share = order.gpu_share
        executor.single.run_s = order.run_s / order.gpu_share  # as if all of it were parallel
        if order.merged:
            executor.merged.most = order.merged
        executor.memory.peak_bytes = device.used_bytes()
        transfer = [begin_s, end_s]
        self._tell(
            worker_orders.ImageLoaded(
                order.model, end_s - begin_s, executor.memory.peak_bytes, self._context, transfer
            )
        )


def _placed(
    order: worker_orders.LoadImage, image: int, arrival: Arrival, model: ServedModel
) -> DeviceImage:
    """The image on the device; its descriptor is closed if that fails."""
    try:
        file = ImageFile(
            order.digest, order.table, order.total_bytes, image, arrival, model.urgency
        )
    except BaseException:
        os.close(image)
        raise
    try:
        return DeviceImage(file, model.device)
    except BaseException:
        file.close()
        raise


def _device(order: worker_orders.Warm, pool: MemoryPool | None) -> WorkerDevice:
    if order.device == "cpu":
        return CpuArithmetic(order.context_s, order.context_bytes, library=pool)
    # CUDA reads the variable when it is first touched, by `warm`.
    uuid = order.device.removeprefix("cuda:")
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid  # noqa: TID251 - this process's own
    # Without it cuBLAS refuses a function that asks for deterministic algorithms. It is
    # read once, and is what torch uses on newer cards anyway.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # noqa: TID251 - as above
    return CudaContext(uuid, make_part=CudaStream)


def _whole(work: Callable[[], None]) -> None:
    done = False
    try:
        work()
        done = True
    finally:
        if not done:
            os._exit(1)
