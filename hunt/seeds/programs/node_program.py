"""A GPU manager of a simulation: node, sessions and attachment, and a runtime in memory."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

from cache_manager.model.ids import MIB, GpuId, NodeId
from cache_manager.tier_index import TierIndex
from gpu_manager.attachment.attachment import Attachment
from gpu_manager.credentials import FunctionIdentity
from gpu_manager.emulated.gpu import EmulatedGpu
from gpu_manager.errors import LeaseOver, NoWorker
from gpu_manager.node.leases import SessionKey
from gpu_manager.node.ledger import Ledger
from gpu_manager.node.node import GpuNode
from gpu_manager.node.residents import HostGpu
from gpu_manager.node.settings import NodeSettings
from gpu_manager.node.tenant_models import Catalogue
from gpu_manager.runtimes.runtime import HostedId, LoadOrder
from gpu_manager.sessions.acquiring import Acquiring
from gpu_manager.sessions.sessions import ClientSession, ClientSessions
from gpu_manager.sessions.weight_requests import Library
from gpu_manager.weights.sealed_images import ImageWriter
from gpu_manager.weights.store import WeightStore
from hunt.seeds.scenarios.planned_functions import CONTEXT_MIB, PlannedFunction
from hunt.seeds.scenarios.scenario import GpuShape
from hunt.seeds.surroundings import SECRET, Surroundings
from scheduler.api import Dispatch, GpuSpec, LeaseId, LeaseTokens, SlotId, SlotSpec
from tests.kit.nodes.in_memory_runtime import InMemoryHosted, InMemoryRuntime
from tests.kit.virtual_time import InlineExecutor
from torch_shim.wire.image_digests import ImageTable, image_digest, lay_out
from torch_shim.wire.messages import Acquire, Release

_CONTEXT_BYTES = CONTEXT_MIB * MIB
_STORE_BYTES = 64 << 30
_IMAGE_BYTES = 64
_TERM_BITS = 32  # of a lease's id, above which its leader's term is
MANAGER_PORT = 9000
# Their leases join those whose runs they loaded beside, and their calls take turns.
_OVERLAPPING = {"beside", "gain"}


def content_of(model: int) -> bytes:
    """The weights of a function's model: few bytes, whatever it takes on a GPU."""
    return b"%d" % model * _IMAGE_BYTES


@cache
def image_of(model: int) -> tuple[ImageTable, str]:
    """The table and the digest of the weights."""
    content = content_of(model)
    return lay_out([len(content)]), image_digest([memoryview(content)])


class SeededRuntime(InMemoryRuntime):
    """Loads take as long as chance says; too many leases' calls on one slot are a violation."""

    def __init__(self, node: GpuNode, around: Surroundings, most: int) -> None:
        super().__init__(node)
        self._most = most
        self._around = around
        self._node = node
        self._running: dict[int, tuple[InMemoryHosted, set[SlotId]]] = {}
        self._turns: dict[HostedId, asyncio.Lock] = {}
        self.calls: Counter[str] = Counter()
        self.context_bytes = _CONTEXT_BYTES
        self.overhead_bytes = _CONTEXT_BYTES

    async def load(self, order: LoadOrder) -> InMemoryHosted:
        chance = self._around.chance
        self.load_s = chance.uniform(*self._around.scenario.model_load_s)
        self.reload_s = self.load_s / 3
        return await super().load(order)

    async def call(self, worker: str, lease: int, session: str, run_s: float) -> None:
        """One call in this worker; LeaseOver or NoWorker where it cannot be made."""
        hosted = self._node.hosted(HostedId(worker))
        assert isinstance(hosted, InMemoryHosted), "this runtime hosts all"
        async with self._turns.setdefault(hosted.id, asyncio.Lock()):
            if hosted.closed.done():
                raise NoWorker(hosted.order.model, "its process has ended")
            if lease not in hosted.admitted:
                raise LeaseOver("the lease has ended")
            mine = session if lease in hosted.parts else ""
            if mine and mine not in hosted.parts[lease]:
                raise LeaseOver("the session's part of the lease has ended")
            runs = self._running[lease] = hosted, self._slots_of(lease)
            self._check_room(lease, runs[1])
            self.calls[hosted.order.model] += 1
            try:
                await hosted.call(lease, run_s, session=mine)
            finally:
                if self._running.get(lease) is runs:
                    del self._running[lease]
        if hosted.closed.done():
            raise NoWorker(hosted.order.model, "its process has ended")

    def kill_one(self) -> str | None:
        """End the process of a model; which one."""
        alive = [hosted for hosted in self.hosted if not hosted.closed.done()]
        if not alive:
            return None
        hosted = self._around.chance.choice(alive)
        hosted.die()
        return hosted.order.model

    def _slots_of(self, lease: int) -> set[SlotId]:
        held = self._node.leases.get(LeaseId(lease))
        assert held is not None, "its worker admits it"
        return {held.live.slot, *held.live.more_slots}

    def _check_room(self, lease: int, slots: set[SlotId]) -> None:
        for slot in sorted(slots):
            others = [
                other
                for other, (by, taken) in self._running.items()
                if other != lease and slot in taken and not by.closed.done()
            ]
            if len(others) >= self._most:
                self._around.journal.violated(f"leases {others} and {lease} compute on {slot}")


class WatchedNode(GpuNode):
    """The node, which notes grants; one of an earlier leader, or too many on a slot, is wrong."""

    def __init__(
        self,
        settings: NodeSettings,
        gpus: list[HostGpu],
        store: WeightStore,
        catalogue: Catalogue,
        attachment: Attachment,
        lease_ended: Callable[[SessionKey, LeaseId], None],
        around: Surroundings,
        most: int,
    ) -> None:
        """`most` leases may be in force on a slot."""
        super().__init__(settings, gpus, store, catalogue, attachment, (), lease_ended)
        self._around = around
        self._journal = around.journal
        self._most = most
        self._latest_term = 0

    def grant(self, order: Dispatch) -> None:
        """See `GpuNode`."""
        term = order.lease >> _TERM_BITS
        if term < self._latest_term:  # its leader may have been elected again since it gave it
            offices = self._around.offices()
            terms = [each.term for each in offices if order.lease in each.core.leases]
            term = max(terms, default=term)
        if term < self._latest_term:
            self._journal.violated(f"{self.name} obeys term {term} after {self._latest_term}")
        self._latest_term = max(self._latest_term, term)
        others = [
            lease.id
            for lease in self.leases
            if order.slot in (lease.live.slot, *lease.live.more_slots)
            and lease.id != order.lease
            and lease.granted_s < math.inf
        ]
        if len(others) >= self._most:
            self._journal.violated(f"{order.slot} has leases {others} and is given {order.lease}")
        self._journal.note(f"{self.name} grants {order.lease:x} to {order.requests}")
        super().grant(order)


class NodeProgram:
    """One GPU manager, through all its lives; a life's parts are in the attributes."""

    node: GpuNode
    runtime: SeededRuntime
    sessions: ClientSessions
    acquiring: Acquiring
    library: Library
    attachment: Attachment

    def __init__(self, around: Surroundings, name: str, gpus: int) -> None:
        self.name = name
        self.serves = False
        self._around = around
        self._gpus = gpus
        joined = bool(_OVERLAPPING & around.scenario.policies)
        self._most = around.scenario.shape.leases + joined
        self.store: WeightStore | None = None

    async def run(self) -> None:
        """Serve until cancelled, then leave in order."""
        urls, name = self._around.scheduler_urls, NodeId(self.name)
        tokens = LeaseTokens(SECRET)
        store = self.store = WeightStore(
            TierIndex("lru", _STORE_BYTES), now_s=self._around.loop.time, readers=InlineExecutor()
        )
        catalogue = Catalogue()
        settings = NodeSettings(self.name, ())
        async with Attachment(urls, name, SECRET) as attachment:
            gpus, around = self._host_gpus(name), self._around
            self.attachment = attachment
            self.sessions = ClientSessions(self._end_session)
            ended = self.sessions.lease_ended
            node = self.node = WatchedNode(
                settings, gpus, store, catalogue, attachment, ended, around, self._most
            )
            self.library = Library(node.weights, store, catalogue, attachment, _CONTEXT_BYTES)
            self.acquiring = Acquiring(node, attachment, self.library, tokens, attachment)
            attachment.set_addresses(f"tcp:{self.name}:{MANAGER_PORT}")
            self.runtime = SeededRuntime(node, self._around, self._most)
            attachment.attach(name, node)
            node.start(self.runtime)
            self.serves = True
            try:
                await asyncio.Event().wait()
            finally:
                self.serves = False
                attachment.drain(gpu.id for gpu in node.gpus.values())
                self.acquiring.stop()
                await node.drain(settings.drain_s)
                attachment.detach(name)
                await self.runtime.close()

    def _end_session(self, session: ClientSession) -> None:
        self.acquiring.end_session(session)

    def died(self) -> None:
        """Free what the kernel frees with a process."""
        self.serves = False
        if self.store is not None:
            self.store.close()
            self.store = None

    def upload(self, session: ClientSession, model: int, memory_bytes: int) -> None:
        """Take the weights of a function that has a session."""
        table, _ = image_of(model)
        writer = ImageWriter(table)
        writer.write(content_of(model))
        digest = self.library.store.adopt(writer.seal(), table, str(session.identity))
        found = self.library.add(session, digest, table)
        self.runtime.memory_bytes[found.id] = memory_bytes

    async def call(
        self, session: ClientSession, fields: dict[str, Any], run_s: float, *, gives_back: bool
    ) -> dict[str, Any] | None:
        """Acquire, or take up a lease, and compute; where to go if the lease is elsewhere."""
        asked = msgspec.convert(fields, Acquire)
        answer, _ = await self.acquiring.acquire(session, asked, local=False)
        if "elsewhere" in answer:
            elsewhere: dict[str, Any] = answer["elsewhere"] | {"lease": answer["lease"]}
            return elsewhere
        (worker,) = answer["workers"].values()
        await self.runtime.call(worker, answer["lease"], session.key, run_s)
        if gives_back:
            self.acquiring.release(session, Release(answer["lease"]))
        return None

    def _host_gpus(self, node: NodeId) -> list[HostGpu]:
        scenario, found = self._around.scenario, []
        for number in range(self._gpus):
            device = EmulatedGpu(GpuId(f"{node}/cpu:{number}"), scenario.gpu_mib * MIB)
            ledger = Ledger(device.memory_bytes, _CONTEXT_BYTES)
            spec = GpuSpec(
                device.id,
                node,
                device.memory_bytes,
                slots=_slots(device.id, scenario.shape),
                vcpus=scenario.shape.vcpus,
            )
            found.append(HostGpu(device, spec, ledger))
        return found


def _slots(gpu: GpuId, shape: GpuShape) -> tuple[SlotSpec, ...]:
    if shape.parts > 1:
        return tuple(SlotSpec(SlotId(f"{gpu}/{part}")) for part in range(shape.parts))
    return (SlotSpec(SlotId(gpu), shape.leases, shape.at_once),) if shape.leases > 1 else ()


def identity_of(function: PlannedFunction) -> FunctionIdentity:
    """Who it is for a GPU manager."""
    return FunctionIdentity(function.tenant, function.name)
