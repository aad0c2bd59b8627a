"""Builds: the folder that a deployment names, a copy that never changes, and its record."""

import contextlib
import hashlib
import os
import stat
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from gateway_ext.errors import BadDeployment, ProviderFailed, is_full_disk
from gateway_ext.model import Deployment
from gateway_ext.openfaas.function_options import PATH
from gateway_ext.providers import disk
from gateway_ext.providers.disk import TreeEntry, TreeRefused
from gateway_ext.providers.managed.records import RecordStore
from gateway_ext.settings import GatewaySettings

_HANDLER = "handler.py"
_PACKAGE = "function"  # the folder of the handler in builds of faas-cli
_REQUIREMENTS = "requirements.txt"
_IGNORED = frozenset({"__pycache__", ".git", ".venv"})
_MOST_FILES, _MOST_LEVELS = 100_000, 64
_MOST_REQUIREMENTS_BYTES = 1 << 20
_PART_BYTES = 1 << 20
_MOST_SHOWN = 300  # characters of what was sent, in a refusal


def find(deployment: Deployment, settings: GatewaySettings) -> Path:
    """The folder with the handler.py; BadDeployment names every place that was searched.

    The image's name counts before the function's. Of a build and the folder of the same name in a
    root, which it was made of, the newer one is taken: faas-cli does not make a build anew.
    A folder is accepted only if it lies, links followed, in one of the roots or in the folder of
    builds: the right to deploy must not be the right to run any file of the machine, nor to learn
    what is outside.
    """
    allowed = [Path(folder).resolve() for folder in (*settings.roots, settings.builds_dir)]
    places = _places(deployment, settings)
    for name in dict.fromkeys(place.name for place in places):
        of_name = (_handler_in(place, allowed) for place in places if place.name == name)
        folders = [folder for folder in of_name if folder is not None]
        if folders:
            return folders[0] if PATH in deployment.annotations else max(folders, key=_changed_ns)
    meant = f"{deployment.id} (image {_shown(deployment.image)})"
    looked = ", ".join(_shown(str(place.absolute())) for place in places)
    not_run = f"; fprocess is not run here: `handle` in {_HANDLER} is called"
    raise BadDeployment(
        f"there is no build of {meant}; looked at {looked}: {_HANDLER} or {_PACKAGE}/{_HANDLER}"
        " must be there, and not outside of the folders that deployments may name"
        f"{not_run if deployment.process else ''}"
    )


def copy(folder: Path, into: Path, gid: int | None, most_bytes: int) -> Path:
    """Copy the handler so that this group can read it; the copy's name has its digest."""
    scratch = into / "copying"
    disk.remove(scratch)
    target = scratch / _PACKAGE
    try:
        for made in (scratch, target):
            made.mkdir()
            _own(made, gid, 0o750)
        digest = _copy_tree(folder, target, gid, most_bytes)
    except OSError as error:
        disk.remove(scratch)
        if is_full_disk(error):
            raise
        raise BadDeployment(f"the build in {folder} cannot be used: {error}") from error
    except BaseException:
        disk.remove(scratch)
        raise
    final = into / f"build-{digest}"
    if final.exists():
        disk.remove(scratch)
    else:
        scratch.rename(final)
    return final


def handler_of(build: Path) -> Path:
    return build / _PACKAGE


def requirements_of(build: Path) -> bytes:
    """The content of its requirements.txt; empty if there is none."""
    path = handler_of(build) / _REQUIREMENTS
    return path.read_bytes() if path.is_file() else b""


def _places(deployment: Deployment, settings: GatewaySettings) -> list[Path]:
    named = deployment.annotations.get(PATH)
    if named:
        is_absolute = Path(named).is_absolute()
        return [Path(named)] if is_absolute else [Path(root, named) for root in settings.roots]
    image = deployment.image.rpartition("/")[2].partition("@")[0].partition(":")[0]
    names = [name for name in (image, deployment.id.name) if name not in ("", ".", "..")]
    folders = (settings.builds_dir, *settings.roots)
    return [Path(folder, name) for name in dict.fromkeys(names) for folder in folders]


def _changed_ns(folder: Path) -> int:
    """When a file in the folder was written last, as far as it can be read."""
    newest_ns = 0
    with contextlib.suppress(OSError), disk.opened(folder) as top:
        for entry in disk.entries(top, most=_MOST_FILES, levels=_MOST_LEVELS, skip=_is_ignored):
            if entry.is_file:
                newest_ns = max(newest_ns, entry.status.st_mtime_ns)
    return newest_ns


def _shown(sent: str) -> str:
    return ascii(sent[:_MOST_SHOWN])[1:-1]


def _handler_in(place: Path, allowed: list[Path]) -> Path | None:
    """The folder there that has a handler and is inside of the allowed ones."""
    try:
        for folder in ((place / _PACKAGE).resolve(), place.resolve()):
            inside = any(folder.is_relative_to(root) for root in allowed)
            if inside and (folder / _HANDLER).is_file():
                return folder
    except (OSError, ValueError, RuntimeError):  # no path, too long, closed, links in a circle
        return None
    return None


def _copy_tree(folder: Path, target: Path, gid: int | None, most_bytes: int) -> str:
    """Copy all but what is ignored; returns a digest of the copy.

    The source may be changed by others meanwhile: links are copied as such and never followed.
    """
    digest = hashlib.sha256()
    left_bytes = most_bytes
    with disk.opened(folder) as source:
        if Path(f"/proc/self/fd/{source}").readlink() != folder:
            raise TreeRefused("the path was changed during the deployment")
        for entry in disk.entries(source, most=_MOST_FILES, levels=_MOST_LEVELS, skip=_is_ignored):
            path = target / entry.path
            digest.update(b"%d:%b" % (len(os.fsencode(entry.path)), os.fsencode(entry.path)))
            if entry.is_folder:
                path.mkdir()
                _own(path, gid, 0o750)
            elif entry.is_link:
                link = os.readlink(entry.name, dir_fd=entry.parent)
                digest.update(b"l" + os.fsencode(link))
                path.symlink_to(link)
            elif entry.is_file:
                digest.update(_copy_file(entry, path, left_bytes))
                left_bytes -= path.stat().st_size
                _own(path, gid, 0o750 if entry.status.st_mode & stat.S_IXUSR else 0o640)
            else:
                raise TreeRefused(f"{entry.path} is neither a file nor a folder")
    _check_links(target)
    asked = target / _REQUIREMENTS
    if asked.is_file() and asked.stat().st_size > _MOST_REQUIREMENTS_BYTES:
        raise TreeRefused(f"{_REQUIREMENTS}: {_MOST_REQUIREMENTS_BYTES} bytes are the most")
    return digest.hexdigest()[:16]


def _copy_file(entry: TreeEntry, path: Path, most_bytes: int) -> bytes:
    """Copy a file of at most this size; returns the digest of its content."""
    content, size = hashlib.sha256(), 0
    with os.fdopen(entry.opened(), "rb") as source, path.open("xb") as copied:
        while part := source.read(_PART_BYTES):
            size += len(part)
            if size > most_bytes:
                raise TreeRefused(f"{entry.path} is too large: {most_bytes} bytes are left for it")
            content.update(part)
            copied.write(part)
    return content.digest()


def _check_links(target: Path) -> None:
    """A link must not lead out of the copy, in which nobody changes anything."""
    with disk.opened(target) as top:
        for entry in disk.entries(top):
            leads_to = Path(os.path.realpath(target / entry.path))
            if entry.is_link and not leads_to.is_relative_to(target.resolve()):
                raise TreeRefused(f"{entry.path} is a link that leaves the build")


def _is_ignored(name: str) -> bool:
    return name in _IGNORED or name.endswith(".pyc")


def _own(path: Path, gid: int | None, mode: int) -> None:
    path.chmod(mode)
    if gid is not None:
        os.chown(path, 0, gid)


_LONGEST_SOCKET = 100  # bytes; the kernel's own limit is 108


@dataclass(frozen=True, slots=True)
class BuildRecord:
    """A function as it is stored; `build` names a folder in `folder`, `uid` is its user."""

    deployment: Deployment
    folder: Path
    build: str
    created_at: datetime
    wanted: int
    uid: int | None

    @property
    def build_folder(self) -> Path:
        return self.folder / self.build


class BuildStore(RecordStore[BuildRecord]):
    """The state folder of the process provider; functions' users may pass through it."""

    folder_mode = 0o750

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, BuildRecord)
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
