"""What the process provider remembers on disk, so that a new gateway brings all of it back."""

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from gateway_ext.errors import ProviderFailed
from gateway_ext.model import Deployment, FunctionId, Namespace, Resources
from gateway_ext.providers.process.files import put

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
        self._namespaces = self.folder / "namespaces.json"
        self._lock: TextIO | None = None

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
        self._take_lock()
        for left in self.sockets.iterdir():
            left.unlink()
        return list(self._records())

    @property
    def ours(self) -> bool:
        """Whether this gateway has it."""
        return self._lock is not None

    def close(self) -> None:
        """Another gateway may have it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

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

    def namespaces(self) -> dict[str, Namespace]:
        """Those that people made."""
        if not self._namespaces.exists():
            return {}
        read = json.loads(self._namespaces.read_bytes())
        return {name: Namespace(name, *maps) for name, maps in read.items()}

    def save_namespaces(self, namespaces: Mapping[str, Namespace]) -> None:
        """Remember them so."""
        said = {n.name: [dict(n.labels), dict(n.annotations)] for n in namespaces.values()}
        put(self._namespaces, json.dumps(said).encode(), 0o600)

    def _take_lock(self) -> None:
        lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise ProviderFailed(f"another gateway has its state in {self.folder}") from error
        self._lock = lock

    def _records(self) -> Iterator[Record]:
        for folder in sorted(self._functions.iterdir()):
            path = folder / _RECORD
            if path.exists():
                yield _read(json.loads(path.read_bytes()), folder)
            else:
                self.discard(folder)  # of a function that was being removed, or deployed


def _written(record: Record) -> dict[str, Any]:
    deployment = record.deployment
    plain = replace(
        deployment,
        environment=dict(deployment.environment),
        labels=dict(deployment.labels),
        annotations=dict(deployment.annotations),
    )
    return {
        "deployment": asdict(plain) | {"id": list(deployment.id)},
        "build": record.build.name,
        "created_at": record.created_at.isoformat(),
        "wanted": record.wanted,
        "uid": record.uid,
    }


def _read(written: dict[str, Any], folder: Path) -> Record:
    said = written["deployment"]
    for key in ("limits", "requests"):
        said[key] = None if said[key] is None else Resources(**said[key])
    for key in ("constraints", "secrets"):
        said[key] = tuple(said[key])
    return Record(
        deployment=Deployment(**said | {"id": FunctionId(*said["id"])}),
        folder=folder,
        build=folder / written["build"],
        created_at=datetime.fromisoformat(written["created_at"]),
        wanted=written["wanted"],
        uid=written["uid"],
    )
