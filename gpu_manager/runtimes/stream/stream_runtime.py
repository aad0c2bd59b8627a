"""The runtime of streams: a process for each tenant on a GPU hosts all models of that tenant."""

import asyncio
import logging

from gpu_manager.runtimes.process.process_runtime import ProcessRuntime
from gpu_manager.runtimes.runtime import HostedModel, LoadOrder
from gpu_manager.runtimes.stream.process_breaks import ProcessBreaks
from gpu_manager.runtimes.workers.hosting_worker import HostingWorker
from torch_shim.errors import WireError

log = logging.getLogger(__name__)

# A model that has broken so many processes of others gets one of its own.
_MOST_BREAKS = 2


class StreamRuntime:
    """Hosts the models of a tenant in one process on each GPU; never those of two tenants."""

    def __init__(self, workers: ProcessRuntime, breaks: ProcessBreaks | None = None) -> None:
        """`workers` has the processes, and hosts the models that break those of others."""
        self._workers = workers
        self._hosts: dict[tuple[str, str], HostingWorker] = {}
        self._opening: dict[tuple[str, str], asyncio.Lock] = {}
        self._breaks = breaks or ProcessBreaks()

    def prepare(self) -> None:
        """Have workers ready for a first load."""
        self._workers.prepare()

    def hosts_alone(self, model: str) -> bool:
        """Whether the model gets a process of its own, since it broke those of others."""
        return self._breaks[model] >= _MOST_BREAKS

    def process_of(self, tenant: str, gpu: str) -> HostingWorker | None:
        """The tenant's process on this GPU, if further models may come there."""
        host = self._hosts.get((tenant, gpu))
        return host if host is not None and host.is_open else None

    async def load(self, order: LoadOrder) -> HostedModel:
        """Load a model in its tenant's process on the GPU, which the first model makes."""
        if self.hosts_alone(order.model):
            return await self._workers.load(order)
        place = order.tenant, order.gpu
        async with self._opening.setdefault(place, asyncio.Lock()):
            host = self.process_of(*place)
            if host is None:
                return await self._open(order)
        if order.emptied is not None:
            await order.emptied.end()  # the tenant has a process already
        try:
            return await self._workers.load_in(host, order)
        except WireError as error:
            log.warning("the process of %s was lost while it loaded %s: %s", *place, error)
        async with self._opening[place]:
            host = self.process_of(*place)
            return await (self._open(order) if host is None else self._workers.load_in(host, order))

    async def close(self) -> None:
        """Nothing: the workers are ended with those of the other runtime."""

    async def _open(self, order: LoadOrder) -> HostedModel:
        """Make the tenant's process, with this model as its first one."""
        model = await self._workers.load(order, shared=True)
        host = self._workers.host_of(model)
        if host is not None:
            self._hosts[order.tenant, order.gpu] = host
            host.over.add_done_callback(lambda _: self._ended(host))
        return model

    def _ended(self, host: HostingWorker) -> None:
        place = host.tenant, host.gpu
        if self._hosts.get(place) is host:
            del self._hosts[place]
        for model in host.broken_by:
            name = model.order.model
            self._breaks.add(name)
            if self.hosts_alone(name):
                log.warning("%s broke its process again: it gets one of its own", name)
