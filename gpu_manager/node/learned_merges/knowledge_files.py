"""Files of what is known of merging: one for each model and kind of device, in one folder.

What was learned with another torch, or by other code of ours that merges, is void. A file that is
not ours, or of no use, counts as none, and is written anew.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import stat
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpu_manager.worker.merging import known_merges
from gpu_manager.worker.merging.known_merges import (
    MOST_FORBIDDEN,
    MOST_KNOWN,
    KnownMerges,
    KnownRecord,
    is_name,
)
from gpu_manager.worker.merging.merge_records import Singly

log = logging.getLogger(__name__)

_FORMAT = "gpufaas merged calls 1"
_SUFFIX = ".json"
_ASIDE = ".aside"
_MOST_FILE_BYTES = 1 << 20
_MOST_FILES = 1024
_MOST_BYTES = 64 << 20  # of all files
_REASONS = frozenset(map(str, Singly))
_SOURCES = ("merging", "program")  # folders beside each other


def usual_basis() -> str:
    """What results and times of merged calls depend on beside model and device: torch, our code."""
    digest = hashlib.sha256()
    rooms = Path(known_merges.__file__).parents[1]
    for room in _SOURCES:
        for source in sorted((rooms / room).glob("*.py")):
            digest.update(source.read_bytes())
    return f"torch {version('torch')}, merging {digest.hexdigest()[:16]}"


class KnowledgeFiles:
    """A folder with at most so many files and bytes; those written longest ago leave first.

    Several managers may share it: a file is replaced as a whole, and the last one written holds.
    """

    def __init__(self, folder: Path, basis: str) -> None:
        """`basis` names what all that is known depends on."""
        self._folder = folder
        self._basis = basis
        self._writing = threading.Lock()
        self._is_faulty = False

    def read(self, model: str, device: str) -> KnownMerges:
        """Return what the file says; nothing where there is none that counts."""
        path = self._path(model, device)
        try:
            found = self._checked(json.loads(_content(path)), model, device)
        except FileNotFoundError:
            return KnownMerges(model, device)
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s: %s: merged calls of %s are compared anew", path, error, model)
            return KnownMerges(model, device)
        return found

    def write(self, known: KnownMerges) -> None:
        """Replace the file durably; where the disk refuses, the knowledge ends with the manager."""
        text = json.dumps(self._entries(known), separators=(",", ":")).encode()
        path = self._path(known.model, known.device)
        aside = path.with_name(f"{path.stem}.{secrets.token_hex(4)}{_ASIDE}")
        with self._writing:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _write(aside, text)
                aside.replace(path)
                self._make_room()
                self._is_faulty = False
            except OSError as error:
                level = logging.DEBUG if self._is_faulty else logging.WARNING
                self._is_faulty = True
                log.log(level, "%s: %s: what is known of merging ends with us", path, error)
                with contextlib.suppress(OSError):
                    aside.unlink(missing_ok=True)

    def _path(self, model: str, device: str) -> Path:
        name = hashlib.sha256(f"{model}\n{device}".encode()).hexdigest()
        return self._folder / (name + _SUFFIX)

    def _entries(self, known: KnownMerges) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "basis": self._basis,
            "model": known.model,
            "device": known.device,
            "never": dict(known.never),
            "records": [[each.name, each.row()] for each in known.records.values()],
        }

    def _checked(self, found: Any, model: str, device: str) -> KnownMerges:
        """What a file says, if it is one of ours; ValueError if it is not."""
        known = KnownMerges(model, device)
        match found:
            case {
                "format": str(form),
                "basis": str(basis),
                "model": str(of),
                "device": str(on),
                "never": dict(never),
                "records": list(records),
            }:
                pass
            case _:
                raise ValueError("it is no file of ours")
        if (form, of, on) != (_FORMAT, model, device):
            raise ValueError(f"it is of {of:.80} on {on:.80}, as {form:.40}")
        if basis != self._basis:
            log.info(
                "merged calls of %s are compared anew: %s, not %.80s", model, self._basis, basis
            )
            return known
        if len(never) > MOST_FORBIDDEN or len(records) > MOST_KNOWN:
            raise ValueError("more than we ever write")
        for digest, why in never.items():
            if not is_name(digest) or not isinstance(why, str) or why not in _REASONS:
                raise ValueError(f"{digest:.80} is never merged for {why!r:.40}")
        known.forbid(never.items())
        known.learn(map(_record, records))
        return known

    def _make_room(self) -> None:
        """Delete what was written longest ago, and what a crash left half written."""
        found = []
        for path in self._folder.iterdir():
            if path.suffix not in (_SUFFIX, _ASIDE):
                continue
            status = path.lstat()
            found.append((status.st_mtime_ns, status.st_size, path))
        left, left_bytes = len(found), sum(size for _, size, _ in found)
        for _, size, path in sorted(found, key=lambda each: each[0]):
            if left <= _MOST_FILES and left_bytes <= _MOST_BYTES:
                return
            path.unlink(missing_ok=True)
            left, left_bytes = left - 1, left_bytes - size


def _record(entry: Any) -> KnownRecord:
    match entry:
        case [str(name), list(row)]:
            return KnownRecord.of_row(name, row)
        case _:
            raise ValueError(f"{entry!r:.80} is no record")


def _content(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_FILE_BYTES:
            raise ValueError(f"{status.st_size} bytes, mode {status.st_mode:o}")
        return file.read(_MOST_FILE_BYTES)


def _write(path: Path, text: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
