"""The process-per-model runtime: hosts each model in a worker from a warm pool, or an empty one.

It has all worker processes of the node: also those that other models may join.
"""

import asyncio
import logging
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from common.gpu_wishes import PROCESS
from common.liveness import LivenessTimes
from gpu_manager.errors import LoadFailure, NoWorker
from gpu_manager.runtimes.fork_client import ForkedWorker, ForkServer
from gpu_manager.runtimes.hosting_worker import HostingWorker, WorkerHostedModel, load_within
from gpu_manager.runtimes.runtime import EmptyHost, LoadOrder, Observer
from gpu_manager.runtimes.worker_pool import Pool, PoolSettings
from gpu_manager.worker import orders
from torch_shim.errors import WireError

log = logging.getLogger(__name__)

# A worker is asked for an answer while it has leases; its calls do not delay the answer.
_LIVENESS = LivenessTimes(ask_s=1.0, blocked_s=5.0)
# Users that workers of different tenants run as: a range that fits a container's 16 bits too.
_FIRST_UID, _UIDS = 62_000, 3_000
# The most files of a worker, and processes and threads of its user.
_DESCRIPTORS, _PROCESSES = 4096, 8192


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """The settings of worker processes, and of their pool.

    On emulated GPUs, workers for several models need `pool_library`.
    """

    pool: PoolSettings = field(default_factory=PoolSettings)
    load_timeout_s: float = 120.0
    change_user: bool = True
    liveness: LivenessTimes = _LIVENESS
    pool_library: Path | None = None


class ProcessRuntime:
    """Hosts every model in a separate process, unless it is told that others may join the model."""

    def __init__(
        self,
        observer: Observer,
        devices: Iterable[str],
        settings: ProcessSettings = ProcessSettings(),
    ) -> None:
        self._observer = observer
        self._settings = settings
        kinds = tuple(dict.fromkeys(devices))
        emulated = all(kind == "cpu" for kind in kinds)
        self.can_share = not emulated or settings.pool_library is not None
        self._server = ForkServer(
            emulated=emulated, pool=settings.pool_library, liveness=settings.liveness
        )
        self._pool = Pool(self._server, kinds, settings.pool)
        self._users = WorkerUsers(_FIRST_UID, _UIDS)
        self._hosting: set[HostingWorker] = set()

    def prepare(self) -> None:
        """Start the fork server, which imports torch, and fill the pool, in the background."""
        self._pool.start()

    def hosting(self, wish: str, model: str) -> str:  # noqa: ARG002 - it has no choice
        """This runtime, whatever is wished."""
        return PROCESS

    @property
    def spares(self) -> dict[str, int]:
        return self._pool.ready

    @property
    def forked(self) -> int:
        return self._pool.forked

    @property
    def hosted(self) -> Sequence[WorkerHostedModel]:
        return tuple(model for worker in self._hosting for model in worker.models)

    @property
    def empty(self) -> Sequence[EmptyHost]:
        """The processes that models have left, and that no other model has taken."""
        return tuple(host.left for host in self._hosting if host.left is not None)

    def spare_workers(self, device: str) -> Sequence[ForkedWorker]:
        return self._pool.spares(device)

    async def load_in(self, host: HostingWorker, order: LoadOrder) -> WorkerHostedModel:
        """Load a model in a worker that has others; raise a WireError if the worker is lost."""
        model = host.add(order, asyncio.get_running_loop().time())
        await self._load(model)
        return model

    async def load(self, order: LoadOrder, *, shared: bool = False) -> WorkerHostedModel:
        """Load a model in its emptied worker, else one from the pool; if that is lost, in another.

        A worker of the pool becomes its tenant's; an emptied one is that already. Further models
        may follow in a `shared` one.
        """
        now_s = asyncio.get_running_loop().time
        emptied = await self._take_emptied(order, shared=shared)
        if emptied is not None:
            try:
                return await self.load_in(emptied, order)
            except WireError as error:
                log.warning("an empty worker was lost while it loaded %s: %s", order.model, error)
        with self._assign(order) as assign:
            begin_s = now_s()
            try:
                worker = await self._take(order)
                return await self._load_first(order, worker, assign, begin_s, shared=shared)
            except WireError as error:
                log.warning("a worker was lost while it loaded %s: %s", order.model, error)
            begin_s = now_s()
            try:
                worker = await self._take(order, fresh=True)
                return await self._load_first(order, worker, assign, begin_s, shared=shared)
            except WireError as error:
                raise NoWorker(order.model, f"lost twice while loading: {error}") from error

    async def close(self) -> None:
        await self._pool.close()
        for host in list(self._hosting):
            host.end()
        await asyncio.gather(*(host.over for host in list(self._hosting)))
        await self._server.close()

    async def _take_emptied(self, order: LoadOrder, *, shared: bool) -> HostingWorker | None:
        if order.emptied is None:
            return None
        host = next((host for host in self._hosting if host.left is order.emptied), None)
        if host is not None and (host.tenant, host.gpu) != (order.tenant, order.gpu):
            log.error("%s is another tenant's or GPU's than an empty process: it ends", order.model)
            await order.emptied.end()
            return None
        if host is None or not host.take(order.model, shared=shared):
            log.warning("the empty process for %s has ended: another one takes it", order.model)
            return None
        return host

    async def _take(self, order: LoadOrder, *, fresh: bool = False) -> ForkedWorker:
        """A worker of the pool; the fork server may have to be started for it."""
        with order.progress.bounded_wait():
            return await self._pool.take(order.device, order.model, fresh=fresh)

    async def _load_first(
        self,
        order: LoadOrder,
        worker: ForkedWorker,
        assign: orders.Assign,
        begin_s: float,
        *,
        shared: bool,
    ) -> WorkerHostedModel:
        if assign.uid:
            self._users.take(order.tenant)
            worker.exited.add_done_callback(lambda _: self._users.give_back(order.tenant))
        host = HostingWorker(order, worker, self._observer, shared=shared)
        self._hosting.add(host)
        host.over.add_done_callback(lambda _: self._hosting.discard(host))
        worker.watch(self._settings.liveness, host.answers)
        model = host.add(order, begin_s)
        await self._load(model, assign)
        return model

    async def _load(self, model: WorkerHostedModel, assign: orders.Assign | None = None) -> None:
        loaded = False
        try:
            await load_within(self._settings.load_timeout_s, model.order, model.load(assign))
            loaded = True
        except TimeoutError as error:
            detail = f"no answer in {self._settings.load_timeout_s:g} s"
            raise LoadFailure(model.order.model, detail) from error
        finally:
            if not loaded:
                model.abandon()

    @contextmanager
    def _assign(self, order: LoadOrder) -> Iterator[orders.Assign]:
        """Makes a worker the tenant's; meanwhile the tenant's user stays the same.

        NoWorker if other tenants have all users: a worker shares its user with none of them.
        """
        settings, tenant = self._settings, order.tenant
        limits = _DESCRIPTORS, _PROCESSES
        if not (settings.change_user and os.geteuid() == 0):
            yield orders.Assign(0, *limits, [], slots=1)
            return
        uid = self._users.take(tenant)
        if uid is None:
            raise NoWorker(order.model, f"workers of {_UIDS} other tenants have all users")
        try:
            yield orders.Assign(uid, *limits, [], slots=1)
        finally:
            self._users.give_back(tenant)


class WorkerUsers:
    """Gives each tenant a user of its own for as long as it has a worker, or is about to.

    A user that no tenant has any more becomes another's: the one that has been free for longest.
    """

    def __init__(self, first_uid: int, count: int) -> None:
        self._fresh_uid = first_uid
        self._end_uid = first_uid + count
        self._free: deque[int] = deque()
        self._uids: dict[str, int] = {}
        self._counts: Counter[str] = Counter()

    def take(self, tenant: str) -> int | None:
        """The tenant's user, until one more `give_back`; None if others have all that there are."""
        uid = self._uids.get(tenant)
        if uid is None:
            uid = self._unused()
            if uid is None:
                return None
            self._uids[tenant] = uid
        self._counts[tenant] += 1
        return uid

    def give_back(self, tenant: str) -> None:
        """One worker of the tenant has ended, or will not come."""
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]
            self._free.append(self._uids.pop(tenant))

    def _unused(self) -> int | None:
        if self._fresh_uid < self._end_uid:
            self._fresh_uid += 1
            return self._fresh_uid - 1
        return self._free.popleft() if self._free else None
