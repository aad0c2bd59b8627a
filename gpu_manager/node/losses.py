"""What follows when a model, an empty process or a whole GPU is lost."""

import logging
from collections.abc import Callable, Mapping

from gpu_manager.node.lease_endings import LeaseEndings
from gpu_manager.node.leases_in_force import EndReason, LeasesInForce
from gpu_manager.node.loading import Loader
from gpu_manager.node.node_counts import NodeMeters
from gpu_manager.node.residents import HostGpu
from gpu_manager.runtimes.runtime import EmptyHost, HostedModel
from scheduler.api import GpuId, NodeReports, RunFailed

log = logging.getLogger(__name__)


class Losses:
    """Ends the leases of what was lost, and reports it."""

    def __init__(
        self,
        gpus: Mapping[GpuId, HostGpu],
        leases: LeasesInForce,
        loader: Loader,
        endings: LeaseEndings,
        meters: NodeMeters,
        reports: NodeReports,
        resync: Callable[[], None],
    ) -> None:
        """`resync` reports the whole state."""
        self._gpus = gpus
        self._leases = leases
        self._loader = loader
        self._endings = endings
        self._meters = meters
        self._reports = reports
        self._resync = resync

    def model_died(self, hosted: HostedModel, cause: str) -> None:
        """End every lease that may call a model that has ended unexpectedly."""
        gpu = self._gpus[GpuId(hosted.order.gpu)]
        resident = gpu.resident_of(hosted)
        if resident is None:
            return
        del gpu.residents[resident.model]
        self._meters.died(gpu.id)
        self._loader.report_lost(gpu, resident, cause)
        for lease in self._leases.using(gpu.id, resident.model):
            if lease.ending is None:
                self._reports.report(RunFailed(lease.id, f"{resident.model}: {cause}"))
            self._endings.end(lease, EndReason.WORKER_LOST)

    def context_lost(self, host: EmptyHost, cause: str) -> None:
        """Count the unexpected end of a process that a model had left."""
        for gpu in self._gpus.values():
            if self._loader.processes.lost(gpu, host, cause):
                self._meters.died(gpu.id)

    def gpu_lost(self, gpu: HostGpu, cause: str) -> None:
        """Mark a GPU as unusable, and end its leases and residents."""
        gpu.lost = True
        for lease in self._leases:
            if lease.gpu == gpu.id:
                self._endings.end(lease, EndReason.GPU_LOST)
        for resident in gpu.by_use():
            log.error("%s is lost with %s: %s", resident.model, gpu.id, cause)
            self._loader.unload(gpu, resident.model)
        for model in list(gpu.contexts):
            self._loader.processes.end(gpu, model)
        self._resync()
