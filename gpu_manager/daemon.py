"""The GPU manager's lifecycle: builds its parts in order, starts them, drains and stops them."""

import logging
import resource
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Self

from cache_manager.model.errors import UnknownRule
from cache_manager.model.ids import NodeId
from cache_manager.tier_index import TierIndex
from common.addresses import Address
from common.telemetry import process_metrics
from common.telemetry.metrics import MetricFamily, gauge, page
from gpu_manager import metrics
from gpu_manager.attachment.attachment import Attachment
from gpu_manager.attachment.scheduling import Scheduling
from gpu_manager.credentials import FunctionCredentials, fresh_secret, load_secret
from gpu_manager.data.requests import PassedData
from gpu_manager.devices.gpu_device import GpuDevice
from gpu_manager.devices.host_memory import available_bytes
from gpu_manager.devices.paths import DiskPath, GpuPaths
from gpu_manager.errors import BadSetting
from gpu_manager.node.counts import of_gpus, of_weights
from gpu_manager.node.device_watch import DeviceWatch
from gpu_manager.node.host_gpus import choose_devices, host_gpu
from gpu_manager.node.node import GpuNode
from gpu_manager.node.settings import NodeSettings
from gpu_manager.node.tenant_models import Catalogue
from gpu_manager.runtimes.runtime import Observer, Preparation, Runtime
from gpu_manager.server.connection_limits import ConnectionLimits
from gpu_manager.server.exporter import Exporter
from gpu_manager.server.listening import Certificate, ManagerServer
from gpu_manager.server.requests import ManagerFeature, ManagerSpace, Services
from gpu_manager.sessions.acquiring import Acquiring
from gpu_manager.sessions.administration import NodeAdministration
from gpu_manager.sessions.sessions import ClientSession, ClientSessions
from gpu_manager.sessions.weight_requests import Library
from gpu_manager.transfers import GpuTransfers
from gpu_manager.weights.spill_directory import SpillDirectory
from gpu_manager.weights.store import WeightStore
from scheduler.api import LeaseTokens

log = logging.getLogger(__name__)

MakeRuntime = Callable[[Observer, Sequence[GpuDevice]], Awaitable[Runtime]]

# By default the weight store's budget is this fraction (1/N) of the free memory.
_STORE_SHARE = 4
# Every image in host memory holds a descriptor: this fraction (1/N) of them is for images.
_IMAGES_SHARE, _LEAST_IMAGES = 4, 64

_FEATURES: tuple[type[ManagerFeature], ...] = (PassedData, GpuTransfers)


class GpuManager:
    """One node's GPU manager, between `start` and `stop`; `async with` does both."""

    def __init__(
        self,
        settings: NodeSettings,
        scheduling: Scheduling,
        make_runtime: MakeRuntime,
        neighbours: Attachment | None = None,
    ) -> None:
        """`neighbours` attaches the node to its cluster, if it belongs to one."""
        self._settings = settings
        self._scheduling = scheduling
        self._neighbours = neighbours
        secret = _secret(settings)
        self.credentials, tokens = FunctionCredentials(secret), LeaseTokens(secret)
        name, limit = NodeId(settings.node), settings.gpu_memory_bytes
        self.devices = choose_devices(settings.devices, name, limit, settings.visible_devices)
        descriptors = raise_open_files_limit()
        space = ManagerSpace(settings, descriptors, scheduling.locate)
        self.features = [feature(space) for feature in _FEATURES]
        disk = next(filter(None, [feature.disk() for feature in self.features]), DiskPath())
        self._store = _store(settings, max(_LEAST_IMAGES, descriptors // _IMAGES_SHARE), disk)
        catalogue = Catalogue()
        gpus = [
            host_gpu(device, name, settings, self._paths(device), len(self.devices))
            for device in self.devices
        ]
        sessions = self.sessions = ClientSessions(self._end_session)
        node = self.node = GpuNode(
            settings, gpus, self._store, catalogue, scheduling, self.features, sessions.lease_ended
        )
        self._make_runtime = make_runtime
        self._runtime: Runtime | None = None
        self._preparation = Preparation(at_start=settings.prepare_at_start)
        overhead_bytes = max(gpu.ledger.context_bytes for gpu in gpus)
        self.library = Library(node.weights, self._store, catalogue, scheduling, overhead_bytes)
        self._acquiring = Acquiring(node, scheduling, self.library, tokens, neighbours)
        self.limits = ConnectionLimits(descriptors)
        self._server = ManagerServer(
            Services(
                node=node,
                credentials=self.credentials,
                sessions=sessions,
                library=self.library,
                acquiring=self._acquiring,
                administration=NodeAdministration(node, scheduling),
                limits=self.limits,
                preparation=self._preparation,
                features=self.features,
                hello_s=settings.hello_s,
            ),
            _certificate(settings),
        )
        self._watch = DeviceWatch(node)
        self._exporter = Exporter(self.metrics, self._not_ready_reason)

    @property
    def addresses(self) -> tuple[Address, ...]:
        return self._server.addresses

    async def start(self) -> None:
        try:
            self._server.listen(self._settings.listen)
            addresses = self._settings.advertise or self._server.addresses
            if self._neighbours is not None:
                self._neighbours.set_addresses(
                    *(str(self._server.advertised(address)) for address in addresses)
                )
            self._runtime = await self._make_runtime(self.node, self.devices)
            self._preparation.start(self._runtime)
            self._scheduling.attach(self.node.name, self.node)
            self.node.start(self._runtime)
            self._watch.start()
            if self._settings.metrics is not None:
                await self._exporter.start(*self._settings.metrics)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop accepting clients and requests, wait for calls in flight, and release everything."""
        await self._exporter.stop()
        self._acquiring.stop()
        self._server.stop_listening()
        self._watch.stop()
        if self._runtime is not None:
            await self.node.drain(self._settings.drain_s)
        await self._server.close()
        for feature in self.features:
            await feature.close()
        if self._runtime is not None:
            self._scheduling.detach(self.node.name)
            await self._runtime.close()
        self._store.close()
        for gpu in self.node.gpus.values():
            gpu.close()

    def metrics(self) -> bytes:
        return page(self._families()) + process_metrics.page()

    def _paths(self, device: GpuDevice) -> GpuPaths:
        paths = [feature.paths(device) for feature in self.features]
        return next(filter(None, paths), GpuPaths())

    def _end_session(self, session: ClientSession) -> None:
        self._acquiring.end_session(session)
        for feature in self.features:
            feature.end_session(session)

    def _families(self) -> Iterator[MetricFamily]:
        yield gauge(metrics.ATTACHED, [((), float(self._scheduling.connected))])
        yield gauge(metrics.SESSIONS, [((), len(self.sessions))])
        yield gauge(metrics.LEASES, [((), len(self.node.leases))])
        yield from self.node.meters.families()
        yield from of_gpus(self.node.gpus.values())
        yield from of_weights(self._store.status())
        for feature in self.features:
            yield from feature.families()

    def _not_ready_reason(self) -> str:
        """Return why no call can be served now; empty if calls can be served."""
        if not self._scheduling.connected:
            return "no scheduler is reached"
        if all(gpu.lost for gpu in self.node.gpus.values()):
            return "every GPU is lost"
        return self.node.stuck_reason()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def _secret(settings: NodeSettings) -> bytes:
    return fresh_secret() if settings.secret_file is None else load_secret(settings.secret_file)


def _certificate(settings: NodeSettings) -> Certificate | None:
    if settings.certificate is None or settings.key is None:
        if settings.certificate is not settings.key:
            detail = "a certificate and its key must be given together"
            raise BadSetting("certificate", str(settings.certificate), detail)
        return None
    return Certificate(settings.certificate, settings.key)


def _store(settings: NodeSettings, most_images: int, disk: DiskPath) -> WeightStore:
    budget_bytes = settings.store_memory_bytes or available_bytes() // _STORE_SHARE
    try:
        index = TierIndex(settings.host_eviction, budget_bytes, most_images)
    except UnknownRule as error:
        raise BadSetting("host eviction", settings.host_eviction, str(error)) from error
    if settings.spill is None:
        return WeightStore(index)
    spill = SpillDirectory(settings.spill, settings.spill_bytes)
    return WeightStore(index, spill, disk=disk)


# More is of no use to one manager, and some systems allow a thousand million.
_MOST_OPEN_FILES = 1 << 16


def raise_open_files_limit() -> int:
    """Raise the soft limit as far as the hard limit allows, and return the limit now in force.

    Connections and images in memory hold descriptors; the usual soft limit of 1024 is for programs
    that use `select`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = _MOST_OPEN_FILES if hard == unlimited else min(hard, _MOST_OPEN_FILES)
    if soft == unlimited or soft >= wanted:
        return wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of open files stays at %d: %s", soft, error)
        return soft
    return wanted
