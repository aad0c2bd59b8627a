"""The node's state of one GPU: its residents, the models being unloaded, and its memory."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from cache_manager.model.ids import GpuId, ModelId
from common.gpu_wishes import AS_MEASURED, PROCESS, WHOLE
from gpu_manager.devices.gpu_device import GpuDevice
from gpu_manager.devices.loads import LoadProgress, LoadUrgency
from gpu_manager.devices.paths import GpuPaths
from gpu_manager.errors import GpuManagerError
from gpu_manager.node.change_signal import ChangeSignal
from gpu_manager.node.ledger import Account, Ledger, ProcessUse, SharedContext
from gpu_manager.runtimes.runtime import EmptyHost, HostedModel, HostProcess, LoadSpan, MergedSums
from gpu_manager.weights.host_images import ImageHold
from scheduler.api import GpuSpec, LeaseId, MemoryPressure, NodeReports, SlotId

_NOTABLE_SHARE = 256  # smaller changes than 1/N of the memory are no news


@dataclass(slots=True, eq=False)
class ContextOnGpu:
    """The process that a model leaves on a GPU, from the order to empty it on.

    `host` is None until it is empty, and when it has ended; `process` is known all the time.
    """

    model: ModelId
    process: HostProcess | None
    emptying: asyncio.Task[None] | None = None
    host: EmptyHost | None = None
    memory: Account = field(default_factory=Account)


@dataclass(eq=False)
class ModelOnGpu:
    """One model on one GPU, from the order to load it until the order to unload it."""

    model: ModelId
    reserved_bytes: int  # the scheduler's estimate
    lease: LeaseId  # for which the load was ordered
    since_s: float
    used_s: float
    ahead: bool  # no request waits for the load
    urgency: LoadUrgency
    memory: Account = field(default_factory=Account)
    uses: int = 0
    runtime: str = PROCESS
    gpu_share: float = WHOLE  # of the GPU's multiprocessors
    merged: int = AS_MEASURED  # the most calls that run as one
    merges: MergedSums = field(default_factory=MergedSums)  # since it was loaded
    hosted: HostedModel | None = None  # while it is loaded
    hold: ImageHold | None = None
    loading: asyncio.Task[None] | None = None
    takes: ContextOnGpu | None = None  # the empty process in which it will be loaded, until then
    shares: SharedContext | None = None  # its tenant's process, once that has memory
    load_spans: tuple[LoadSpan, ...] = ()  # of the load, once it has ended
    progress: LoadProgress = field(default_factory=LoadProgress)

    def __post_init__(self) -> None:
        self._lost: GpuManagerError | None = None
        self._decided = asyncio.Event()

    def mark_loaded(self, hosted: HostedModel, now_s: float) -> None:
        self.hosted = hosted
        self.since_s = self.used_s = now_s
        self._decided.set()

    def mark_lost(self, cause: GpuManagerError) -> None:
        self._lost = cause
        self._decided.set()

    async def ready(self) -> HostedModel:
        """Wait until the model is loaded; raise the cause if loading fails."""
        await self._decided.wait()
        if self._lost is not None:
            raise self._lost
        assert self.hosted is not None, f"{self.model} is neither loaded nor lost"
        return self.hosted

    async def stop_loading(self) -> None:
        if self.loading is not None and not self.loading.done():
            self.loading.cancel()
            await asyncio.wait({self.loading})

    def release(self) -> None:
        if self.hold is not None:
            self.hold.release()
            self.hold = None


@dataclass(slots=True)
class HostGpu:
    """One GPU of the node; `foreign_bytes` of its memory are used by other programs.

    `contexts` are the processes that models left, by these models, until others take them, `shared`
    those in which a tenant's models are, by the tenant. `turns` is the lock file by which the GPU's
    workers take turns: its slot may have several leases; None where their calls run at once.
    `paths` are the directions of its PCIe. `uses` is what its processes took at the last look; None
    if that is not known.
    """

    device: GpuDevice
    spec: GpuSpec
    ledger: Ledger
    residents: dict[ModelId, ModelOnGpu] = field(default_factory=dict)
    contexts: dict[ModelId, ContextOnGpu] = field(default_factory=dict)
    shared: dict[str, SharedContext] = field(default_factory=dict)
    leaving: set[asyncio.Task[None]] = field(default_factory=set)
    change: ChangeSignal = field(default_factory=ChangeSignal)
    foreign_bytes: int = 0
    uses: tuple[ProcessUse, ...] | None = None
    lost: bool = False
    turns: int | None = None
    paths: GpuPaths = field(default_factory=GpuPaths)

    @property
    def id(self) -> GpuId:
        return self.spec.id

    def close(self) -> None:
        self.device.close()
        self.paths.close()
        if self.turns is not None:
            os.close(self.turns)
            self.turns = None

    @property
    def slot(self) -> SlotId:
        return self.spec.slot_specs()[0].id

    def hosted(self, model: ModelId) -> HostedModel | None:
        resident = self.residents.get(model)
        return None if resident is None else resident.hosted

    def loaded(self) -> list[HostedModel]:
        found = [resident.hosted for resident in self.residents.values()]
        return [hosted for hosted in found if hosted is not None]

    def resident_of(self, hosted: HostedModel) -> ModelOnGpu | None:
        """Return the resident of this hosted model; None after an order to unload it."""
        resident = self.residents.get(ModelId(hosted.order.model))
        return resident if resident is not None and resident.hosted is hosted else None

    def contexts_now(self) -> list[ContextOnGpu]:
        """Return the processes without a model, those included that models are about to take."""
        taken = [model.takes for model in self.residents.values() if model.takes is not None]
        return [*self.contexts.values(), *taken]

    def processes(self) -> set[HostProcess | None]:
        """Return the processes on this GPU; None among them if the runtime names none."""
        empty = {context.process for context in self.contexts_now()}
        return empty | {hosted.host for hosted in self.loaded()}

    def leave(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start this work, which frees memory: later loads wait for it."""
        task = asyncio.get_running_loop().create_task(work)
        self.leaving.add(task)
        task.add_done_callback(self.leaving.discard)
        return task

    def share(self, resident: ModelOnGpu, tenant: str) -> int:
        """Count a model of the tenant's process; return the bytes lacking, if that is a new one."""
        context = self.shared.get(tenant)
        if context is None:
            context_bytes = self.ledger.context_bytes
            short_bytes = max(0, context_bytes - self.ledger.free_bytes)
            if short_bytes:
                return short_bytes
            context = self.shared[tenant] = SharedContext(tenant, context_bytes)
            self._set_aside()
        context.models += 1
        resident.shares = context
        return 0

    def sharing(self, context: SharedContext) -> list[ModelOnGpu]:
        """Return the residents that share a tenant's process, those included that are loading."""
        return [resident for resident in self.residents.values() if resident.shares is context]

    def stuck_loads(self) -> dict[ModelId, float]:
        """Return the models whose loads make no progress, and since when."""
        return {
            resident.model: resident.progress.stuck_since_s
            for resident in self.residents.values()
            if resident.hosted is None and resident.progress.stuck_since_s is not None
        }

    def process_models(self, resident: ModelOnGpu) -> int:
        """Return how many models the resident's process has, those included that are loading."""
        return 1 if resident.shares is None else resident.shares.models

    def measured_shared(self, context: SharedContext, context_bytes: int) -> bool:
        """Note what a tenant's process takes without its models; return whether that was news."""
        if not context_bytes or context.context_bytes == context_bytes:
            return False
        context.context_bytes = context_bytes
        self._set_aside()
        return True

    def unshare(self, resident: ModelOnGpu) -> bool:
        """Count a model of a tenant's process no more; return whether the process is over."""
        context, resident.shares = resident.shares, None
        if context is None:
            return False
        context.leave(resident.model)
        if not context.models:
            del self.shared[context.tenant]
        self._set_aside()
        return not context.models

    def measured_run(
        self, resident: ModelOnGpu, peak_bytes: int, held_bytes: int
    ) -> tuple[int, bool]:
        """Grant what a model was measured to need; return that, and whether more is set aside.

        All models' limits are told anew where either has changed.

        A model that shares its process is granted what it holds between calls. What a call takes
        beyond that is set aside once for all models of the process, as often as calls may overlap.
        """
        before_bytes = resident.memory.measured_bytes
        needed_bytes, news = self._measured(resident, peak_bytes, held_bytes)
        if news or resident.memory.measured_bytes != before_bytes:
            self.update_limits()
        return needed_bytes, news

    def _measured(self, resident: ModelOnGpu, peak_bytes: int, held_bytes: int) -> tuple[int, bool]:
        shared = resident.shares
        if shared is None or not held_bytes:
            self.ledger.note_ran(resident.memory, peak_bytes)
            return peak_bytes, False
        before_bytes = self.shared_bytes
        self.ledger.note_ran(resident.memory, held_bytes)
        kept_bytes = resident.memory.measured_bytes
        shared.ran(resident.model, peak_bytes - kept_bytes)
        self._set_aside()
        return kept_bytes, self.shared_bytes > before_bytes

    def note_merged(self, hosted: HostedModel, added: MergedSums) -> None:
        resident = self.resident_of(hosted)
        if resident is not None:
            resident.merges = resident.merges.plus(added)

    @property
    def shared_bytes(self) -> int:
        """What processes of several models should have beside what their models hold."""
        return sum(context.bytes(self.calls_at_once) for context in self.shared.values())

    def limit_bytes(self, resident: ModelOnGpu) -> int:
        """Return the bytes that a model may use while it runs; this falls when others load."""
        own_bytes = resident.memory.granted_bytes + self.ledger.free_bytes
        return own_bytes + self.for_calls_bytes(resident)

    def together_bytes(self, resident: ModelOnGpu) -> int:
        """Return what the models of its process may use together; 0 if it has the process alone."""
        if resident.shares is None:
            return 0
        held_bytes = sum(other.memory.granted_bytes for other in self.sharing(resident.shares))
        return held_bytes + self.ledger.free_bytes + self.for_calls_bytes(resident)

    def for_calls_bytes(self, resident: ModelOnGpu) -> int:
        """Return what is set aside for calls of the model's process, if others share it."""
        if resident.shares is None:
            return 0
        lacking_bytes = self.shared_bytes - self.ledger.set_aside_bytes
        return max(0, resident.shares.for_calls_bytes(self.calls_at_once) - lacking_bytes)

    @property
    def calls_at_once(self) -> int:
        """The calls that may overlap: one for each lease that a slot has room for."""
        return sum(slot.leases for slot in self.spec.slot_specs())

    def _set_aside(self) -> None:
        """Set aside what shared processes take beside their models, as far as there is room."""
        most_bytes = self.ledger.set_aside_bytes + max(0, self.ledger.free_bytes)
        self.ledger.set_aside(min(self.shared_bytes, most_bytes))

    def forget(self, resident: ModelOnGpu) -> None:
        self.unshare(resident)
        self.ledger.release(resident.memory)
        resident.release()
        self.update_limits()

    def learn_context(self, measured_bytes: int) -> bool:
        """Note what a process takes here without a model; return whether that was news.

        An emulated GPU's is a setting.
        """
        if self.device.kind != "cuda" or not measured_bytes:
            return False
        before_bytes, self.ledger.context_bytes = self.ledger.context_bytes, measured_bytes
        return abs(measured_bytes - before_bytes) >= self.spec.memory_bytes // _NOTABLE_SHARE

    def by_use(self) -> list[ModelOnGpu]:
        """Return the residents from the least to the most recently used; loading ones last."""
        return sorted(
            self.residents.values(), key=lambda resident: (resident.hosted is None, resident.used_s)
        )

    def size_bytes(self, resident: ModelOnGpu) -> int:
        """Return the bytes that the model was granted, or will be granted."""
        return resident.memory.granted_bytes or resident.reserved_bytes

    def context_bytes(self, context: ContextOnGpu) -> int:
        """Return a context's bytes; before they are measured, those of any context here."""
        return context.memory.granted_bytes or self.ledger.context_bytes

    async def obtain(self, grant: Callable[[], int], reports: NodeReports, within_s: float) -> int:
        """Wait for memory that the scheduler frees; return the bytes lacking.

        `grant` does so as well, and nothing if some are lacking.
        """
        short_bytes = grant()
        if short_bytes:
            reports.report(MemoryPressure(self.id, short_bytes))
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + within_s
        while short_bytes and await self.change.wait(deadline_s - loop.time()):
            short_bytes = grant()
        return short_bytes

    def update_limits(self) -> None:
        """Grant measured bytes and send new limits, after memory was granted or freed."""
        loaded = [model for model in self.residents.values() if model.hosted is not None]
        for resident in loaded:
            self.ledger.grow(resident.memory, resident.memory.measured_bytes)
        self._set_aside()
        together = {resident.shares: resident for resident in loaded}
        bytes_of = {shared: self.together_bytes(resident) for shared, resident in together.items()}
        for resident in loaded:
            if resident.hosted is not None:
                resident.hosted.limit(self.limit_bytes(resident), bytes_of[resident.shares])
        self.change.notify()
