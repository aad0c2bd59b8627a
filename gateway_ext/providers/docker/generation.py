"""One release of a function: its containers, as many as are wanted of it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from gateway_ext import wishes
from gateway_ext.errors import BadDeployment
from gateway_ext.model import Deployment
from gateway_ext.ports import Injection
from gateway_ext.providers.docker import spec
from gateway_ext.providers.docker.engine import Engine, Image
from gateway_ext.providers.docker.fleet import Fleet
from gateway_ext.providers.docker.images import Images
from gateway_ext.providers.docker.instance import Instance, Place
from gateway_ext.providers.docker.settings import DockerSettings
from gateway_ext.providers.docker.store import Release
from gateway_ext.providers.docker.transport import EngineRefused
from gateway_ext.providers.docker.volumes import Volumes
from gateway_ext.providers.function_log import FunctionLog
from gateway_ext.providers.replica import Watch
from gateway_ext.providers.replicas import Replicas

_NO_IMAGE = "no such image"


@dataclass(frozen=True, slots=True)
class Kit:
    """What all functions of a provider share."""

    settings: DockerSettings
    engine: Engine
    fleet: Fleet
    images: Images
    volumes: Volumes
    injection: Injection | None

    def injected(self, deployment: Deployment) -> Mapping[str, str]:
        """What a function is given, if it is one for GPUs."""
        if self.injection is None or not wishes.of(deployment).gpu:
            return {}
        return self.injection.environment(deployment.id)

    def check(self, deployment: Deployment, image: Image) -> None:
        """BadDeployment where it is a GPU function whose image has no shim in it."""
        if self.injection is not None and wishes.of(deployment).gpu and not image.ours:
            name = deployment.image
            raise BadDeployment(f"image {name} is not built on a template of ours: it has no shim")


class Generation(Replicas[Instance]):
    """Replicas of one release; its image is there."""

    def __init__(
        self,
        release: Release,
        kit: Kit,
        log: FunctionLog,
        changed: Callable[[], None],
        running: Iterable[Instance] = (),
    ) -> None:
        super().__init__(Watch(self._make, changed, log, kit.settings), running)
        self.release = release
        self._kit = kit
        self._log = log

    @property
    def deployment(self) -> Deployment:
        """What they run."""
        return self.release.deployment

    async def _make(self) -> Instance:
        try:
            return await self._started()
        except EngineRefused as refused:
            if _NO_IMAGE not in refused.message.lower() or self.release.image is None:
                raise
        # Somebody tidied images up while nothing ran of this one.
        image = await self._kit.images.kept(self.release.image, self.deployment.image)
        self.release = replace(self.release, image=image)
        return await self._started()

    async def _started(self) -> Instance:
        kit = self._kit
        volume = await kit.volumes.ready(self.release)
        injected = kit.injected(self.deployment)
        body = spec.container(self.release, kit.settings, kit.engine.labels, injected, volume)
        return await kit.fleet.start(body, place_of(self.release, kit, self._log))


def place_of(release: Release, kit: Kit, log: FunctionLog) -> Place:
    """Where an instance of this release belongs."""
    ours = release.image is not None and release.image.ours
    return Place(release.deployment.id, log, kit.settings.port, ours)
