"""A real GPU: one CUDA context, used on torch's current stream or on a stream for each model."""

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pynvml  # type: ignore[import-untyped]  # NVIDIA gives it no types
import torch

from gpu_manager.call_errors import (
    CannotBorrow,
    CannotRecord,
    ContextLost,
    OutOfMemory,
    clear_frames,
)
from gpu_manager.cuda.libraries import (
    CudaRuntime,
    lacks_memory,
    loaded_runtime,
    meet_shortage,
    use_libraries,
)
from gpu_manager.cuda.sm_partitions import SmPartitions, SmShare
from gpu_manager.cuda.staged_copy import StagingBuffers
from gpu_manager.devices.image_file import ImageFile
from gpu_manager.devices.lent_memory import Borrowed, IdleTimer, LentStorage, Loan
from gpu_manager.devices.loads import TransferRank
from gpu_manager.devices.paths import DeviceLink
from gpu_manager.devices.worker_device import Unshare, WorkRecorder

Result = TypeVar("Result")

# Areas of functions that one worker pins: a function may share more than the host has.
MOST_PINNED_BYTES = 1 << 30
_ASKED = re.compile(r"allocate ([\d.]+) ([KMGT]?i?B)")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
# Free memory stays with its models for so long: each counts with the largest call of this time.
_KEPT_FREE_S = 1.0
_OF_PROGRAM = "device-side assert"

_FIRST = torch.device("cuda", 0)


# The driver's account of a GPU's memory, which can be read before a process uses the GPU.
#
# CUDA's own answer cannot: the first question makes the context, so that what the context takes is
# gone already from the free memory that it reports.

# A context takes this much at least and at most, on every card and driver that torch supports:
# the whole GPU's use may have changed meanwhile by what others loaded or freed.
LEAST_CONTEXT_BYTES, MOST_CONTEXT_BYTES = 128 << 20, 2 << 30
USUAL_CONTEXT_BYTES = 600 << 20  # where the driver gives no account at all


@dataclass(frozen=True, slots=True)
class DriverAccount:
    """The bytes that all processes use, and those of each; None and nothing if unknown."""

    used_bytes: int | None = None
    by_process: Mapping[int, int] = field(default_factory=dict)


def read_account(uuid: str, nvml: Any = pynvml) -> DriverAccount:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return DriverAccount()
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        return DriverAccount(_used(nvml, handle), _by_process(nvml, handle))
    except nvml.NVMLError:
        return DriverAccount()
    finally:
        nvml.nvmlShutdown()


def context_bytes(before: DriverAccount, after: DriverAccount, pid: int | None = None) -> int:
    """In a container the driver may know the process by another number: then it is the new one."""
    own = after.by_process.get(os.getpid() if pid is None else pid)
    if own is not None:
        return own
    new = after.by_process.keys() - before.by_process.keys()
    if len(new) == 1:
        return after.by_process[new.pop()]
    if before.used_bytes is None or after.used_bytes is None:
        return USUAL_CONTEXT_BYTES
    return min(MOST_CONTEXT_BYTES, max(LEAST_CONTEXT_BYTES, after.used_bytes - before.used_bytes))


def _used(nvml: Any, handle: Any) -> int | None:
    for version in ({"version": nvml.nvmlMemory_v2}, {}):
        try:
            return int(nvml.nvmlDeviceGetMemoryInfo(handle, **version).used)
        except nvml.NVMLError:
            continue  # an old driver knows only the first version
    return None


def _by_process(nvml: Any, handle: Any) -> dict[int, int]:
    try:
        found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return {}
    return {one.pid: one.usedGpuMemory for one in found if one.usedGpuMemory is not None}


Account = Callable[[str], DriverAccount]


def clear_workspaces() -> None:
    """Have torch give up the memory that cuBLAS works in; the next call makes it again."""
    torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 - it has no public name


class CudaContext:
    """The only GPU that this process sees, by the UUID under which the driver knows it."""

    refill = None  # inputs leave the GPU with their call
    keeps_memory = True
    borrowers_copy = True

    def __init__(
        self,
        uuid: str,
        device: torch.device = _FIRST,
        cuda: Any = torch.cuda,
        runtime: CudaRuntime | None = None,
        account: Account = read_account,
        clear_workspaces: Callable[[], None] = clear_workspaces,
        link: DeviceLink | None = None,
    ) -> None:
        """All but the UUID and `link` stand in for a GPU in tests."""
        self.link = link or DeviceLink()
        self.device = device
        self._uuid = uuid
        self._cuda = cuda
        self._runtime = runtime or loaded_runtime()
        self._account = account
        self._clear_workspaces = clear_workspaces
        self.sms = SmShare(SmPartitions(), cuda, self.device)
        self._free_streams: list[Any] = []  # of models that have left
        self.idle_memory = IdleTimer(_KEPT_FREE_S, self.release)  # gives back what calls have left
        self._staging: StagingBuffers | None = None
        self._overhead_bytes = self._limit_bytes = self._pinned_bytes = 0
        self.total_bytes = 1  # of the GPU
        self._usual_recorder: WorkRecorder | None = CudaRecorder(cuda, self._runtime)
        self.recorder: WorkRecorder | None = self._usual_recorder
        self._copies = threading.Event()  # set when weights can be copied, or never can
        self.accounting = threading.Lock()  # no image is allocated while it is held

    def warm(self) -> None:
        """Make the context, the libraries' handles, and the buffers that weights come through.

        Weights can be copied as soon as the context and the buffers are there.
        """
        try:
            before = self._account(self._uuid)  # the first call to CUDA makes the context
            self._cuda.set_device(self.device)
            _, self.total_bytes = self._cuda.mem_get_info(self.device)
            self._staging = StagingBuffers(self._cuda, self._runtime)
        finally:
            self._copies.set()
        use_libraries(self.device)
        self._cuda.synchronize()
        self._cuda.empty_cache()
        with self.accounting:
            meet_shortage(self._cuda, self.device, self.total_bytes)
            taken_bytes = context_bytes(before, self._account(self._uuid))
            self._overhead_bytes = max(0, taken_bytes - self._cuda.memory_reserved(self.device))

    def wait_for_copies(self) -> None:
        self._copies.wait()

    def part(self, model: int) -> "CudaContext":  # noqa: ARG002 - the driver knows no models
        """A stream for one of several models, which another one may have had before."""
        stream = self._free_streams.pop() if self._free_streams else self._own_stream()
        return CudaStream(self, stream, self._free_streams.append)

    def ingredients(self) -> dict[str, Any]:
        return {
            "uuid": self._uuid,
            "device": self.device,
            "cuda": self._cuda,
            "runtime": self._runtime,
            "account": self._account,
            "clear_workspaces": self._clear_workspaces,
            "link": self.link,
        }

    def use_share(self, share: float) -> None:
        """Have the work go to a stream of a green context; nothing is recorded then.

        A recording would have a stream of its own, and be replayed on all multiprocessors.
        """
        if self.sms.use(share):
            self.recorder = self._usual_recorder if self.sms.stream is None else None

    def serve(self, share: float, threads: int) -> None:  # noqa: ARG002 - none of them computes
        self.use_share(share)
        self.adopt_thread()

    def adopt_thread(self) -> None:
        """Nothing, but where the model has had a share: other threads use the usual stream."""
        self.sms.adopt_thread()

    def after_call(self) -> None:
        """Nothing: what stays allocated is counted, and the limit is looked at."""

    def overhead_bytes(self) -> int:
        return self._overhead_bytes

    def used_bytes(self) -> int:
        return int(self._overhead_bytes + self._cuda.memory_reserved(self.device))

    def held_bytes(self) -> int:
        """0: memory that a call took stays with the allocator for a while."""
        return 0

    def limit_together(self, most_bytes: int) -> None:
        share = most_bytes / self.total_bytes
        self._cuda.set_per_process_memory_fraction(min(1.0, share), self.device)

    def release_beside(self) -> None:
        self.release()

    def limit(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        share = max(0, limit_bytes - self._overhead_bytes) / self.total_bytes
        self._cuda.set_per_process_memory_fraction(min(1.0, share), self.device)

    def release(self) -> None:
        self._cuda.empty_cache()

    def clear(self) -> None:
        """Give back everything but the context: also the workspaces of cuBLAS."""
        self._cuda.synchronize()
        self.sms.give_back()
        self.recorder = self._usual_recorder
        self._limit_bytes = 0
        self._cuda.set_per_process_memory_fraction(1.0, self.device)
        self._clear_workspaces()
        self._cuda.empty_cache()

    def load(self, image: ImageFile) -> list[torch.UntypedStorage]:
        """Copy the whole image; its storages are parts of one allocation."""
        with self.accounting, _shortage_told():
            whole = torch.empty(max(image.total_bytes, 1), dtype=torch.uint8, device=self.device)
        staging = self._staging or StagingBuffers(self._cuda, self._runtime)
        try:
            in_turn = partial(self.link.load_blocks, image.digest, urgency=image.urgency)
            arrived = image.arrival.wait_for
            staging.copy(image.descriptor, image.total_bytes, whole, arrived, in_turn)
        finally:
            self._staging = None
            staging.close()  # pinned memory is scarce: the next image has buffers of its own
        storage = whole.untyped_storage()
        return [storage[offset : offset + size] for offset, size in image.table]

    def restore(self, image: ImageFile, number: int, storage: torch.UntypedStorage) -> None:
        content = image.read(number)
        if content:
            target = torch.empty(0, dtype=torch.uint8, device=self.device)
            target.set_(storage, 0, (len(content),), (1,))
            target.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def receive(self, area: memoryview, offset: int, size_bytes: int) -> torch.UntypedStorage:
        if not size_bytes:
            return torch.empty(0, device=self.device).untyped_storage()
        found = torch.frombuffer(area, dtype=torch.uint8, offset=offset, count=size_bytes)
        with self._copying_input(size_bytes):
            there = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
            return there.copy_(found, non_blocking=True).untyped_storage()

    def borrow(self, area: memoryview, offset: int, size_bytes: int) -> torch.UntypedStorage:
        """A copy on the GPU, which does not work on the host's memory."""
        return self.receive(area, offset, size_bytes)

    def park(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A copy in pageable memory: pinned memory is scarce."""
        moved = self.link.copying_output(storage.nbytes(), TransferRank.BACKGROUND)
        with self._faults_told(), moved:
            copied: torch.UntypedStorage = storage.cpu()  # type: ignore[no-untyped-call] # torch gives it no types
            return copied

    def unpark(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        size = storage.nbytes()
        with self._copying_input(size):
            there = torch.empty(size, dtype=torch.uint8, device=self.device).untyped_storage()
            return there.copy_(storage, non_blocking=False)

    def duplicate(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        with self._mine(), self._faults_told():
            size = storage.nbytes()
            there = torch.empty(size, dtype=torch.uint8, device=self.device).untyped_storage()
            return there.copy_(storage, non_blocking=False)

    def lend(self, storage: torch.UntypedStorage) -> Loan | None:
        return lend_on_gpu(self._runtime, storage)

    def open_lent(self, lent: LentStorage, *, same_gpu: bool) -> Borrowed:
        size = lent.size_bytes
        with self._copying_input(0 if same_gpu else size):
            there = torch.empty(size, dtype=torch.uint8, device=self.device).untyped_storage()
            stream = self._cuda.current_stream(self.device).cuda_stream
            begin = begin_copy(self._runtime, lent, there, stream)
            try:
                self._wait()
            finally:
                self._runtime.close_lent(begin)
            return Borrowed(there, in_place=False)

    def run(self, work: Callable[[], Result], *, measure: bool) -> tuple[Result, int]:
        if measure:
            self._cuda.reset_peak_memory_stats(self.device)
        with self._faults_told():
            result = work()
            self._wait()
        if not measure:
            return result, 0
        return result, self._need_bytes()

    def seed(self, state: bytes) -> None:
        """Seed the GPU's generator with what the CPU's would draw next."""
        generator = _generator(state)
        number = torch.randint(1 << 62, (), generator=generator)
        self._cuda.default_generators[self.device.index or 0].manual_seed(int(number))

    def seeded(self, state: bytes) -> bytes:
        generator = _generator(state)
        torch.randint(1 << 62, (), generator=generator)
        return generator.get_state().numpy().tobytes()

    def send(
        self,
        parts: list[torch.Tensor],
        places: list[memoryview],
        rank: TransferRank = TransferRank.CALL,
    ) -> None:
        size_bytes = sum(map(len, places))
        with self._faults_told(), self.link.copying_output(size_bytes, rank):
            for part, place in zip(parts, places, strict=True):
                if part.numel():
                    target = torch.frombuffer(place, dtype=torch.uint8).view(part.dtype)
                    target = target.as_strided(part.size(), part.stride())
                    target.copy_(part, non_blocking=True)
            self._wait()

    def share(self, area: memoryview) -> Unshare | None:
        """Pin the area, so that copies need no detour; not where the worker has pinned much."""
        if self._pinned_bytes + len(area) > MOST_PINNED_BYTES:
            return None
        view = torch.frombuffer(area, dtype=torch.uint8)
        if not self._runtime.pin(view.data_ptr(), view.numel()):
            return None
        self._pinned_bytes += view.numel()
        return partial(self._unpin, view)

    def _unpin(self, view: torch.Tensor) -> None:
        # After a lasting fault of the GPU the pages are given back with the process, which ends.
        with suppress(RuntimeError):
            self._cuda.synchronize()  # a call that failed may have left a copy under way
            self._runtime.unpin(view.data_ptr())
            self._pinned_bytes -= view.numel()

    @contextmanager
    def _copying_input(self, size_bytes: int) -> Iterator[None]:
        with self._mine(), self._faults_told(), self.link.copying_input(size_bytes, self._wait):
            yield

    def _mine(self) -> AbstractContextManager[object]:
        """Where work goes to the model's own stream: here it goes to the thread's."""
        return nullcontext()

    @contextmanager
    def _faults_told(self) -> Iterator[None]:
        """Turn a lack of memory into OutOfMemory, and a fault that lasts into ContextLost."""
        try:
            yield
        except RuntimeError as error:
            if lacks_memory(error):
                need_bytes = self._need_bytes() + _asked_bytes(str(error))
                clear_frames(error)
                raise self._short(need_bytes, str(error)) from error
            lasting = self._lasting_fault()
            if lasting:
                detail = f"{error} ({lasting})"[:500]
                raise ContextLost(detail, of_program=_OF_PROGRAM in detail) from error
            raise

    def _short(self, need_bytes: int, detail: str) -> OutOfMemory:
        return OutOfMemory(max(need_bytes, self._limit_bytes + 1), detail)

    def _wait(self) -> None:
        self._cuda.synchronize()

    def _need_bytes(self) -> int:
        return int(self._overhead_bytes + self._cuda.max_memory_allocated(self.device))

    def _own_stream(self) -> Any:
        """A stream that nothing else in the process has: torch's own are 32, given in turn."""
        return self._cuda.ExternalStream(self._runtime.make_stream(), self.device)

    def _lasting_fault(self) -> str:
        """What the driver says of every call from now on; empty if the context is sound."""
        try:
            self._cuda.synchronize()
        except RuntimeError as error:
            return str(error) or type(error).__name__
        return ""


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


@contextmanager
def _shortage_told() -> Iterator[None]:
    """Have a lack of memory be torch's error of that name, whatever torch made of it."""
    try:
        yield
    except RuntimeError as error:
        if lacks_memory(error):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


def _generator(state: bytes) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


def _asked_bytes(message: str) -> int:
    found = _ASKED.search(message)
    return int(float(found[1]) * _UNITS.get(found[2], 1)) if found else 0


# Memory of a real GPU from process to process, by CUDA's own calls: lent, and copied from there.
#
# A borrower copies and closes at once: what it had open would be undefined when its lender ends.
# An H200 has run it, copies between two GPUs aside.


def lend_on_gpu(runtime: CudaRuntime, storage: torch.UntypedStorage) -> Loan | None:
    """Return a storage's allocation by name; None where the driver gives it none."""
    address = storage.data_ptr()
    allocation = runtime.allocation_of(address)
    token = None if allocation is None else runtime.lend(allocation[0])
    if allocation is None or token is None:
        return None
    lent = LentStorage(storage.nbytes(), address - allocation[0], token, -1)
    return Loan(lent, storage, _nothing)


def begin_copy(
    runtime: CudaRuntime, lent: LentStorage, target: torch.UntypedStorage, stream: int
) -> int:
    """Begin to copy what is lent; return what `close_lent` is to close when the copy is over."""
    begin = runtime.open_lent(lent.token)
    if begin is None:
        raise CannotBorrow("the driver opens no such memory")
    opened = runtime.allocation_of(begin)
    fits = opened is not None and lent.offset + lent.size_bytes <= opened[1]
    source = begin + lent.offset
    if fits and runtime.copy(target.data_ptr(), source, lent.size_bytes, stream):
        return begin
    runtime.close_lent(begin)
    raise CannotBorrow("the driver copies nothing from there" if fits else "it is not as large")


def _nothing(_uses: int) -> None:
    """A name is not taken back: the lender keeps the memory until it is copied."""


# CUDA graphs: work recorded once and replayed as one launch; how a failed recording ends.


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
