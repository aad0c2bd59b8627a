"""What the docker provider remembers on disk: everything that is not on the Engine itself."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from secrets import token_hex
from typing import Any

from gateway_ext.errors import ProviderFailed
from gateway_ext.model import Deployment, FunctionId
from gateway_ext.providers import deployments
from gateway_ext.providers.docker.engine import Image
from gateway_ext.providers.files import put
from gateway_ext.providers.state_lock import StateLock

_RECORD = "record.json"


@dataclass(frozen=True, slots=True)
class Release:
    """A deployment with what all its containers share.

    `image` is that of this moment, whatever its name is given to later; None until it is there.
    `injected` tells whether a function would be given the same today.
    """

    id: str
    deployment: Deployment
    image: Image | None
    injected: str


@dataclass(frozen=True, slots=True)
class Record:
    """A function as it is kept; `before` serves until `release` is ready."""

    release: Release
    before: Release | None
    folder: Path
    created_at: datetime
    wanted: int

    @property
    def releases(self) -> list[Release]:
        """Those that containers may run of."""
        return [one for one in (self.before, self.release) if one is not None]


class Store:
    """The state folder; one gateway at a time has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.lock = StateLock(self.folder)
        self._functions = self.folder / "functions"

    def open(self) -> list[Record]:
        """Everything that was deployed; ProviderFailed where another gateway is at it."""
        for folder in (self.folder, self._functions):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.lock.take()
        return list(self._records())

    def new_folder(self, function: FunctionId) -> Path:
        """A folder for a function that is deployed for the first time."""
        folder = self._functions / f"{function}.{token_hex(4)}"
        folder.mkdir(mode=0o700)
        return folder

    def save(self, record: Record) -> None:
        """Remember it so."""
        put(record.folder / _RECORD, json.dumps(_written(record)).encode(), 0o600)

    def forget(self, record: Record) -> None:
        """It will not be brought back; its folder stays until `discard`."""
        (record.folder / _RECORD).unlink(missing_ok=True)

    def discard(self, folder: Path) -> None:
        """Remove a function's folder."""
        shutil.rmtree(folder, ignore_errors=True)

    def _records(self) -> Iterator[Record]:
        for folder in sorted(self._functions.iterdir()):
            path = folder / _RECORD
            if not path.exists():
                self.discard(folder)  # of a function that was being removed, or deployed
                continue
            try:
                yield _read(json.loads(path.read_bytes()), folder)
            except (ValueError, TypeError, KeyError) as error:
                raise ProviderFailed(f"{path} is damaged: {error}") from error


def _written(record: Record) -> dict[str, Any]:
    return {
        "release": _release_written(record.release),
        "before": _release_written(record.before) if record.before else None,
        "created_at": record.created_at.isoformat(),
        "wanted": record.wanted,
    }


def _release_written(release: Release) -> dict[str, Any]:
    return {
        "id": release.id,
        "deployment": deployments.written(release.deployment),
        "image": list(release.image) if release.image else None,
        "injected": release.injected,
    }


def _read(written: dict[str, Any], folder: Path) -> Record:
    before = written["before"]
    return Record(
        release=_release_read(written["release"]),
        before=_release_read(before) if before else None,
        folder=folder,
        created_at=datetime.fromisoformat(written["created_at"]),
        wanted=written["wanted"],
    )


def _release_read(written: dict[str, Any]) -> Release:
    image = written["image"]
    return Release(
        id=written["id"],
        deployment=deployments.read(written["deployment"]),
        image=Image(*image) if image else None,
        injected=written["injected"],
    )
