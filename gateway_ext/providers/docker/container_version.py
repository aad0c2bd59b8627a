"""One release of a function: its containers, as many as are wanted."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from gateway_ext.errors import BadDeployment
from gateway_ext.model import Deployment
from gateway_ext.openfaas import function_options
from gateway_ext.ports import Injection
from gateway_ext.providers.docker import container_spec
from gateway_ext.providers.docker.container_fleet import ContainerFleet
from gateway_ext.providers.docker.container_instance import ContainerInstance, ContainerPlace
from gateway_ext.providers.docker.docker_settings import DockerSettings
from gateway_ext.providers.docker.engine.engine_client import EngineClient, EngineImage
from gateway_ext.providers.docker.engine.engine_transport import EngineRefused
from gateway_ext.providers.docker.image_pulls import ImagePulls
from gateway_ext.providers.docker.release_store import Release
from gateway_ext.providers.docker.secret_volumes import SecretVolumes
from gateway_ext.providers.function_environment import gpu_environment
from gateway_ext.providers.managed.logs.function_log import FunctionLog
from gateway_ext.providers.managed.replica import ReplicaContext
from gateway_ext.providers.managed.replica_set import ReplicaSet

_NO_IMAGE = "no such image"


@dataclass(frozen=True, slots=True)
class DockerParts:
    """What all functions of a docker provider share."""

    settings: DockerSettings
    engine: EngineClient
    fleet: ContainerFleet
    images: ImagePulls
    volumes: SecretVolumes
    injection: Injection | None

    def injected(self, deployment: Deployment) -> Mapping[str, str]:
        """Variables that activate the shim; none unless the function uses a GPU."""
        return gpu_environment(self.injection, deployment)

    def check(self, deployment: Deployment, image: EngineImage) -> None:
        """BadDeployment if the function uses a GPU and its image has no shim."""
        wants_gpu = self.injection is not None and function_options.of(deployment).gpu
        if wants_gpu and not image.has_our_template:
            name = deployment.image
            raise BadDeployment(f"image {name} is not built on a template of ours: it has no shim")


_STARTS = "its container takes no calls yet"


class ContainerVersion(ReplicaSet[ContainerInstance]):
    """Replicas of one release, whose image is on the Engine."""

    def __init__(
        self,
        release: Release,
        parts: DockerParts,
        log: FunctionLog,
        changed: Callable[[], None],
        running: Iterable[ContainerInstance] = (),
    ) -> None:
        super().__init__(ReplicaContext(changed, log, parts.settings, _STARTS), running)
        self.release = release
        self._parts = parts
        self._log = log

    @property
    def deployment(self) -> Deployment:
        """The deployment that they run."""
        return self.release.deployment

    async def _make(self) -> ContainerInstance:
        try:
            return await self._start()
        except EngineRefused as refused:
            if _NO_IMAGE not in refused.message.lower() or self.release.image is None:
                raise
        # The image was deleted while no container of it existed.
        image = await self._parts.images.same_or_pulled(self.release.image, self.deployment.image)
        self.release = replace(self.release, image=image)
        return await self._start()

    async def _start(self) -> ContainerInstance:
        parts = self._parts
        volume = await parts.volumes.ready(self.release)
        injected = parts.injected(self.deployment)
        limits = self.deployment.limits
        cores = await parts.engine.cores() if limits and limits.cpu else 1
        body = container_spec.container(
            self.release, parts.settings, parts.engine.labels, injected, volume, cores
        )
        return await parts.fleet.start(body, place_of(self.release, parts, self._log))


def place_of(release: Release, parts: DockerParts, log: FunctionLog) -> ContainerPlace:
    """What instances of this release need to know of their function."""
    has_our_runtime = release.image is not None and release.image.has_our_template
    return ContainerPlace(release.deployment.id, log, parts.settings.port, has_our_runtime)
