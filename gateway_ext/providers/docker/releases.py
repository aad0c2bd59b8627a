"""What the docker provider stores on disk: what the Engine itself does not know."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from gateway_ext import model
from gateway_ext.model import Deployment
from gateway_ext.providers.docker.engine import EngineImage
from gateway_ext.providers.managed.records import RecordStore


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


class ReleaseStore(RecordStore[ReleaseRecord]):
    """The state folder of the docker provider."""

    def _written(self, record: ReleaseRecord) -> dict[str, Any]:
        return {
            "release": _release_written(record.release),
            "before": _release_written(record.before) if record.before else None,
            "created_at": record.created_at.isoformat(),
            "wanted": record.wanted,
        }

    def _read(self, written: dict[str, Any], folder: Path) -> ReleaseRecord:
        before = written["before"]
        return ReleaseRecord(
            release=_release_read(written["release"]),
            before=_release_read(before) if before else None,
            folder=folder,
            created_at=datetime.fromisoformat(written["created_at"]),
            wanted=written["wanted"],
        )


def _release_written(release: Release) -> dict[str, Any]:
    return {
        "id": release.id,
        "deployment": model.written_deployment(release.deployment),
        "image": list(release.image) if release.image else None,
        "injected": release.injected,
    }


def _release_read(written: dict[str, Any]) -> Release:
    image = written["image"]
    return Release(
        id=written["id"],
        deployment=model.read_deployment(written["deployment"]),
        image=EngineImage(*image) if image else None,
        injected=written["injected"],
    )
