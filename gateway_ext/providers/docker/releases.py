"""What the docker provider stores on disk: what the Engine itself does not know."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from gateway_ext.model import Deployment
from gateway_ext.providers.docker.engine import EngineImage


@dataclass(frozen=True, slots=True)
class Release:
    """A deployment with what all its containers share.

    `image` is the image that the name meant when it was resolved, None until it is on the Engine.
    `injected` is a digest of the injected variables: it differs when they would differ today.
    """

    id: str
    deployment: Deployment
    image: EngineImage | None
    injected: str

    @property
    def has_our_runtime(self) -> bool:
        return self.image is not None and self.image.has_our_template


@dataclass(frozen=True, slots=True)
class ReleaseRecord:
    """A function as it is stored; `before` serves until `release` is ready."""

    release: Release
    before: Release | None
    folder: Path
    created_at: datetime
    wanted: int

    @property
    def deployment(self) -> Deployment:
        return self.release.deployment

    @property
    def releases(self) -> list[Release]:
        return [release for release in (self.before, self.release) if release is not None]
