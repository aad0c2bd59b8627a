"""A worker's life: warm, assigned to a tenant, loaded with models, serving their calls, emptied.

An empty worker waits for the tenant's next model, or for its end. The main thread obeys the
manager and never computes, so that it answers whatever a call does.
"""

import gc
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from gpu_manager.call_errors import ShareRefused
from gpu_manager.cuda.context import CudaContext
from gpu_manager.devices.gpu_turns import GpuTurns, SlotTurns
from gpu_manager.devices.image_file import Arrival, ImageFile
from gpu_manager.devices.paths import DeviceLink
from gpu_manager.devices.worker_device import DeviceImage, WorkerDevice
from gpu_manager.emulated.cpu_arithmetic import CpuArithmetic
from gpu_manager.emulated.memory_pool import MemoryPool
from gpu_manager.worker import orders
from gpu_manager.worker.calls.calls_together import CallsTogether
from gpu_manager.worker.data import PassedData
from gpu_manager.worker.features import TellManager, WorkerFeature, WorkerSpace
from gpu_manager.worker.hosted_model import HostedModel
from gpu_manager.worker.merging.merged_calls import Merging
from gpu_manager.worker.program.allowed_operators import OperatorTable
from gpu_manager.worker.recorded_calls import RecordedCalls
from gpu_manager.worker.sandbox import give_up_rights
from gpu_manager.worker.transfers.device_link import WorkerTransfers
from torch_shim.errors import WireError
from torch_shim.wire.protocol import Frame, FrameKind, FrameSocket


def live(
    connection: socket.socket, parent: int, missing: list[str], pool: MemoryPool | None
) -> NoReturn:
    """Run a worker that takes its orders from this socket; the process ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the manager says when
    try:
        _WorkerLife(connection, parent, missing, pool).obey()
    except BaseException:
        traceback.print_exc()  # which only GPUFAAS_WORKER_STDERR has anybody hear
        raise
    finally:
        os._exit(0)


FEATURES: tuple[type[WorkerFeature], ...] = (
    Merging,
    PassedData,
    WorkerTransfers,
    RecordedCalls,
)

# Of a channel's thread. An emulated GPU's memory is bounded by address space, which stacks take.
_CHANNEL_STACK_BYTES = 2 << 20


class _WorkerLife:
    """The process, as its orders see it."""

    def __init__(
        self, connection: socket.socket, parent: int, missing: list[str], pool: MemoryPool | None
    ) -> None:
        self._wire = FrameSocket(connection)
        self._sending = threading.Lock()
        self._parent = parent
        self._missing = missing
        self._setup = WorkerSetup(self._tell, pool)
        self._together = CallsTogether()
        self._garbage = SharedCollection()
        self._models: dict[int, HostedModel] = {}
        space = WorkerSpace(self._tell, self._setup.background)
        self._features = [feature(space) for feature in FEATURES]
        links = [feature.link for feature in self._features if feature.link is not None]
        self._link = links[0] if links else DeviceLink()
        threading.excepthook = self._broke
        threading.stack_size(_CHANNEL_STACK_BYTES)

    def obey(self) -> None:
        """Carry out orders until the manager hangs up."""
        handlers: dict[type[orders.WorkerOrder], Callable[[Any, Frame], object]] = {
            orders.Warm: lambda order, _: self._setup.warm(order, self._link),
            orders.Assign: self._assign,
            orders.LoadImage: self._load,
            orders.SetLimit: self._limit,
            orders.DropModel: lambda order, _: self._drop(order),
        }
        while True:
            try:
                frame = self._wire.receive()
                order: Any = orders.read(frame)
            except WireError:
                break
            if isinstance(order, orders.StopWorker):
                break
            handlers.get(type(order), self._tell_model)(order, frame)
        for model in self._models.values():
            model.leave()

    # -- orders ---------------------------------------------------------------------------------

    def _tell_model(self, order: Any, frame: Frame) -> None:
        """Have the order's model carry it out, unless that has left; nothing refers to it then."""
        model = self._models.get(order.model)
        carry_out = None if model is None else model.orders.get(type(order))
        if carry_out is not None:
            carry_out(order, frame)
            return
        frame.close_descriptors()
        if model is not None:
            text = f"nothing here carries out {type(order).__name__}"
            self._tell(orders.Note(text, ""))
            return
        if isinstance(order, orders.EndCalls):
            self._tell(orders.CallsEnded(order.model, order.lease, 0.0))
        for feature in self._features:
            feature.answer_for_left(order)

    def _assign(self, order: orders.Assign, frame: Frame) -> None:
        for each in self._link.connect(order.link, frame.descriptors):
            if order.slots > 1:
                self._together.slots = SlotTurns(each)
            else:
                self._together.turns = GpuTurns(each)
        overhead_bytes = self._setup.overhead_bytes()
        missing = give_up_rights(order.uid, order.descriptors, order.processes, self._parent)
        self._tell(orders.Ready(self._missing + missing, overhead_bytes))
        self._setup.assigned.set()

    def _load(self, order: orders.LoadImage, frame: Frame) -> None:
        device = self._setup.device.part(order.model) if order.shared else self._setup.device
        shared = self._setup.table, self._together, self._tell, lambda: os._exit(1)
        model = HostedModel(order, device, *shared, self._features)
        self._models[order.model] = model
        self._setup.load(model, order, frame.descriptors)

    def _limit(self, order: orders.SetLimit, frame: Frame) -> None:
        if order.together_bytes and order.model in self._models:
            self._setup.device.limit_together(order.together_bytes)
        self._tell_model(order, frame)

    def _drop(self, order: orders.DropModel) -> None:
        """Let a model go in a thread of its own, while the others work."""
        model = self._models.pop(order.model, None)
        if model is None:
            self._dropped(order.model)
            return
        self._setup.background(partial(self._leave, model))

    # -- parts ----------------------------------------------------------------------------------

    def _leave(self, model: HostedModel) -> None:
        """Let a model go and keep the GPU's context; end the worker where that is impossible."""
        why = "" if model.leave() else "a call goes on for too long"
        if not why:
            try:
                why = model.let_go(self._garbage.collect)
            except (OSError, RuntimeError) as error:
                why = f"{type(error).__name__}: {error}"
        if why:
            self._tell(orders.Note(f"a model cannot leave the worker: {why}"[:500], ""))
            os._exit(0)
        self._dropped(model.number)

    def _dropped(self, number: int) -> None:
        self._tell(orders.ModelDropped(number, self._setup.device.used_bytes()))

    def _tell(self, order: orders.WorkerOrder, descriptors: Sequence[int] = ()) -> None:
        """Say something to the manager; when it cannot hear any more, the worker is over."""
        try:
            with self._sending:
                self._wire.send(FrameKind.REPORT, orders.bounded(order), (), descriptors)
        except WireError:
            os._exit(0)

    def _broke(self, arguments: threading.ExceptHookArgs) -> None:
        """A channel's thread hit a fault of ours: the channel is gone, the worker goes on."""
        kind, error = arguments.exc_type.__name__, arguments.exc_value
        self._tell(orders.Note(f"a channel ended by {kind}: {error}"[:500], ""))


# Collections of garbage that threads share: one serves all that wait for it to begin.


class SharedCollection:
    """A collection takes as long as all models of the process have objects.

    So a hundred models that left at once, each with a collection of its own, took seconds.
    """

    def __init__(self) -> None:
        self._running = threading.Lock()
        self._begun = 0

    def collect(self) -> None:
        """Return once all that was garbage before this call has been collected."""
        wanted = self._begun + 1  # the one under way may have passed by some of it
        with self._running:
            if self._begun < wanted:
                self._begun += 1
                gc.collect()


# A worker's way to its first call: its device made ready, and models' weights brought there.
#
# Both take place at the same time, in threads: the main thread goes on with orders.

# CUDA's libraries are opened on such a thread, with the stack that they have on a main thread.
_MAIN_STACK_BYTES = 16 << 20


class WorkerSetup:
    """What a worker has of its device, and the loads of its models.

    A worker is warmed before all else: then it has a `device`, ready or not, and the `table` of the
    operators of all models (one of each model's own took 160 KiB).
    """

    device: WorkerDevice
    table: OperatorTable

    def __init__(self, tell: TellManager, pool: MemoryPool | None = None) -> None:
        """`pool` is the memory of several models on an emulated GPU, where it could be built."""
        self._tell = tell
        self._pool = pool
        self._context = [0.0, 0.0]  # when it began to be made, and when it was there
        self._is_usable = False  # the device, once it is warmed
        self._warmed = threading.Event()
        self.assigned = threading.Event()  # to a tenant; its rights are given up

    def warm(self, order: orders.Warm, link: DeviceLink) -> None:
        """Make the device ready, in the background; `link` is its process's to it."""
        self.device = _device(order, self._pool, link)
        self.background(self._warm)
        self.table = OperatorTable(self.device.device)

    def overhead_bytes(self) -> int:
        """Wait until the device is ready; return what it takes of its memory without a model."""
        self._warmed.wait()
        return self.device.overhead_bytes()

    def load(self, model: HostedModel, order: orders.LoadImage, descriptors: Sequence[int]) -> None:
        """Bring an image to the device, in the background; its bytes are copied, not looked at.

        It is reported when the worker has been assigned, too.
        """
        self.background(partial(self._load, model, order, descriptors))

    def background(self, work: Callable[[], None]) -> None:
        """Work in a thread; a fault of ours ends the process, as on the main thread."""
        usual_bytes = threading.stack_size(_MAIN_STACK_BYTES)
        try:
            threading.Thread(target=_whole, args=(work,), name="setup", daemon=True).start()
        finally:
            threading.stack_size(usual_bytes)

    def _warm(self) -> None:
        begin_s = time.monotonic()
        try:
            self.device.warm()
            self._is_usable = True
        except (RuntimeError, OSError, AssertionError) as error:  # as torch says it
            # The manager reads it when it wants to use this worker: until then the pool has one
            # worker that waits, and does not make another and another.
            text = f"the GPU cannot be used: {type(error).__name__}: {error}"
            # Not for want of memory, even where it was: there may be more by then, for another one.
            self._tell(orders.ImageLoadFailed(0, False, text[:500]))
        self._context = [begin_s, time.monotonic()]
        self._warmed.set()

    def _load(
        self, model: HostedModel, order: orders.LoadImage, descriptors: Sequence[int]
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
            self.assigned.wait()
            if not self._is_usable:
                return  # the manager knows it
            executor.images[order.digest] = placed
            executor.memory.set_limit(order.limit_bytes)
        except (OSError, ValueError, RuntimeError, MemoryError, ShareRefused) as error:
            short = isinstance(error, (MemoryError, torch.OutOfMemoryError))
            text = f"{type(error).__name__}: {error}"[:500]
            self._tell(orders.ImageLoadFailed(order.model, short, text))
            return
        finally:
            arrival.close()
            if placed is not None and order.digest not in executor.images:
                placed.close()
            model.settled.set()
        executor.share = order.gpu_share
        executor.run_s = order.run_s / order.gpu_share  # as if all of it were parallel
        for part in model.parts:
            part.loaded(order)
        executor.memory.peak_bytes = device.used_bytes()
        transfer = [begin_s, end_s]
        self._tell(
            orders.ImageLoaded(
                order.model, end_s - begin_s, executor.memory.peak_bytes, self._context, transfer
            )
        )


def _placed(
    order: orders.LoadImage, image: int, arrival: Arrival, model: HostedModel
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


def _device(order: orders.Warm, pool: MemoryPool | None, link: DeviceLink) -> WorkerDevice:
    if order.device == "cpu":
        return CpuArithmetic(order.context_s, order.context_bytes, pool=pool, link=link)
    # CUDA reads the variable when it is first touched, by `warm`.
    uuid = order.device.removeprefix("cuda:")
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid  # noqa: TID251 - this process's own
    # Without it cuBLAS refuses a function that asks for deterministic algorithms. It is
    # read once, and is what torch uses on newer cards anyway.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # noqa: TID251 - as above
    return CudaContext(uuid, link=link)


def _whole(work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException:  # noqa: BLE001 - the process ends
        os._exit(1)
