"""What the process provider remembers on disk, so that a new gateway brings all of it back."""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from gateway_ext.errors import ProviderFailed
from gateway_ext.model import Deployment, FunctionId
from gateway_ext.providers import deployments
from gateway_ext.providers.files import put
from gateway_ext.providers.state_lock import StateLock

_RECORD = "record.json"
_LONGEST_SOCKET = 100  # bytes; the system's own limit is 108


@dataclass(frozen=True, slots=True)
class Record:
    """A function as it is kept: `folder` is its own, new for every first deployment."""

    deployment: Deployment
    folder: Path
    build: Path
    created_at: datetime
    wanted: int
    uid: int | None


class Store:
    """The state folder; one gateway at a time has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.sockets = self.folder / "run"
        self._functions = self.folder / "functions"
        self.lock = StateLock(self.folder)

    def open(self) -> list[Record]:
        """Everything that was deployed; ProviderFailed where another gateway is at it."""
        if len(os.fsencode(self.sockets)) > _LONGEST_SOCKET - len("/0123456789.sock"):
            raise ProviderFailed(f"{self.folder} is too long a path for sockets in it")
        for folder, mode in (
            (self.folder, 0o711),
            (self._functions, 0o711),
            (self.folder / "envs", 0o755),
            (self.folder / "secrets", 0o700),
            (self.sockets, 0o700),
        ):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(mode)
        self.lock.take()
        for left in self.sockets.iterdir():
            left.unlink()
        return list(self._records())

    def new_folder(self, function: FunctionId, gid: int | None) -> Path:
        """A folder for a function that is deployed for the first time."""
        folder = self._functions / f"{function}.{secrets.token_hex(4)}"
        folder.mkdir()
        folder.chmod(0o750)
        if gid is not None:
            os.chown(folder, 0, gid)
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
            if path.exists():
                yield _read(json.loads(path.read_bytes()), folder)
            else:
                self.discard(folder)  # of a function that was being removed, or deployed


def _written(record: Record) -> dict[str, Any]:
    return {
        "deployment": deployments.written(record.deployment),
        "build": record.build.name,
        "created_at": record.created_at.isoformat(),
        "wanted": record.wanted,
        "uid": record.uid,
    }


def _read(written: dict[str, Any], folder: Path) -> Record:
    return Record(
        deployment=deployments.read(written["deployment"]),
        folder=folder,
        build=folder / written["build"],
        created_at=datetime.fromisoformat(written["created_at"]),
        wanted=written["wanted"],
        uid=written["uid"],
    )
