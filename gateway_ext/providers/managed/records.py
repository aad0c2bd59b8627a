"""The state folder of a provider: a folder for each function, with its record as JSON."""

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import Field
from datetime import datetime
from pathlib import Path
from secrets import token_hex
from typing import Any, ClassVar, Generic, Protocol, TextIO, TypeVar

import msgspec

from common.whole_files import put_file
from gateway_ext.errors import ProviderFailed
from gateway_ext.model import Deployment, FunctionId
from gateway_ext.providers import disk

log = logging.getLogger(__name__)

_RECORD = "record.json"


class FunctionRecord(Protocol):
    """A deployed function as it is stored, a frozen dataclass; `folder` belongs to it alone."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def deployment(self) -> Deployment: ...  # the one that was accepted last

    @property
    def folder(self) -> Path: ...  # where the record is; another one for each life of a name

    @property
    def created_at(self) -> datetime: ...  # the time of the first deployment

    @property
    def wanted(self) -> int: ...


R = TypeVar("R", bound=FunctionRecord)


class RecordStore(Generic[R]):
    """Records of all functions in a state folder, which one gateway at a time uses.

    A lock of the folder says which: the system releases it if the gateway dies.
    """

    folder_mode = 0o700  # of a function's folder

    def __init__(self, folder: Path, kind: type[R]) -> None:
        self.folder = folder.absolute()
        self.functions_folder = self.folder / "functions"
        self._kind = kind
        self._lock: TextIO | None = None

    def open(self) -> list[R]:
        """All records; ProviderFailed if another gateway uses the folder or a record is damaged."""
        for folder in (self.folder, self.functions_folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise ProviderFailed(f"another gateway has its state in {self.folder}") from error
        self._lock = lock
        return list(self._records())

    @property
    def is_ours(self) -> bool:
        return self._lock is not None

    def give_back(self) -> None:
        """Let another gateway use the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def new_folder(self, function: FunctionId, gid: int | None = None) -> Path:
        """Make the folder of a function that is deployed for the first time."""
        folder = self.functions_folder / f"{function}.{token_hex(4)}"
        folder.mkdir(mode=0o700)
        folder.chmod(self.folder_mode)
        if gid is not None:
            os.chown(folder, 0, gid)
        return folder

    def save(self, record: R) -> None:
        """Write the record; it is on disk when this returns."""
        written = msgspec.to_builtins(record, enc_hook=_plain)
        del written["folder"]
        put_file(record.folder / _RECORD, json.dumps(written).encode(), 0o600)

    def forget(self, record: R) -> None:
        """Delete the record; its folder stays until `discard`."""
        (record.folder / _RECORD).unlink(missing_ok=True)

    def discard(self, folder: Path) -> None:
        """Delete a function's folder, or a folder in it; a new gateway deletes what cannot be."""
        try:
            disk.remove(folder)
        except OSError as error:
            log.warning("%s is removed later: %s", folder, error)

    def _records(self) -> Iterator[R]:
        for folder in sorted(self.functions_folder.iterdir()):
            path = folder / _RECORD
            if not path.exists():  # the gateway ended during a deployment or a removal
                self.discard(folder)
                continue
            try:
                written = json.loads(path.read_bytes()) | {"folder": str(folder)}
                yield msgspec.convert(written, self._kind, dec_hook=_converted)
            except (ValueError, TypeError, RecursionError, msgspec.ValidationError) as error:
                raise ProviderFailed(f"{path} is damaged: {error}") from error


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)


def _converted(kind: type, value: Any) -> object:
    return kind(value)
