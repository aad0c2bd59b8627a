"""What the process provider stores on disk, so that a new gateway starts all functions again."""

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from gateway_ext.errors import ProviderFailed
from gateway_ext.model import Deployment
from gateway_ext.providers.managed import deployment_json
from gateway_ext.providers.managed.record_store import RecordStore

_LONGEST_SOCKET = 100  # bytes; the kernel's own limit is 108


@dataclass(frozen=True, slots=True)
class BuildRecord:
    """A function as it is stored; `build` is a folder in `folder`, `uid` the function's user."""

    deployment: Deployment
    folder: Path
    build: Path
    created_at: datetime
    wanted: int
    uid: int | None


class BuildStore(RecordStore[BuildRecord]):
    """The state folder of the process provider; functions' users may pass through it."""

    folder_mode = 0o750

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.sockets = self.folder / "run"
        self.left_users: frozenset[int] = frozenset()  # of functions' folders, when it was opened

    def open(self) -> list[BuildRecord]:
        """All records; sockets that an earlier gateway left are deleted."""
        if len(os.fsencode(self.sockets)) > _LONGEST_SOCKET - len("/0123456789.sock"):
            raise ProviderFailed(f"{self.folder} is too long a path for sockets in it")
        for folder, mode in (
            (self.folder, 0o711),
            (self.functions_folder, 0o711),
            (self.folder / "envs", 0o755),
            (self.folder / "secrets", 0o700),
            (self.sockets, 0o700),
        ):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(mode)
        folders = self.functions_folder.iterdir()
        self.left_users = frozenset(folder.lstat().st_gid for folder in folders)
        records = super().open()
        for left in self.sockets.iterdir():
            left.unlink()
        return records

    def _written(self, record: BuildRecord) -> dict[str, Any]:
        return {
            "deployment": deployment_json.written(record.deployment),
            "build": record.build.name,
            "created_at": record.created_at.isoformat(),
            "wanted": record.wanted,
            "uid": record.uid,
        }

    def _read(self, written: dict[str, Any], folder: Path) -> BuildRecord:
        return BuildRecord(
            deployment=deployment_json.read(written["deployment"]),
            folder=folder,
            build=folder / written["build"],
            created_at=datetime.fromisoformat(written["created_at"]),
            wanted=written["wanted"],
            uid=written["uid"],
        )
