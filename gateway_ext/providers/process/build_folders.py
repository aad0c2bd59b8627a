"""Builds: the folder that a deployment names, and a copy of it that never changes."""

import hashlib
import os
import shutil
import stat
from pathlib import Path

from gateway_ext.errors import BadDeployment
from gateway_ext.model import Deployment
from gateway_ext.openfaas.function_options import PATH
from gateway_ext.providers.process.process_settings import ProcessProviderSettings

_HANDLER = "handler.py"
_PACKAGE = "function"  # the folder of the handler in builds of faas-cli
_IGNORED = shutil.ignore_patterns("__pycache__", ".git", ".venv", "*.pyc")


def find(deployment: Deployment, settings: ProcessProviderSettings) -> Path:
    """The folder with the handler.py; BadDeployment names every place that was searched.

    A folder is accepted only if it lies, links followed, in one of the roots or in the folder of
    builds: the right to deploy must not be the right to run any file of the machine.
    """
    allowed = [folder.resolve() for folder in (*settings.roots, settings.builds)]
    looked: list[str] = []
    for place in _places(deployment, settings):
        folder = _handler_in(place.resolve())
        if folder is None:
            looked.append(f"{place.absolute()} (no {_HANDLER}, nor {_PACKAGE}/{_HANDLER})")
        elif not any(folder.is_relative_to(root) for root in allowed):
            looked.append(f"{place.absolute()} (outside of the folders that deployments may name)")
        else:
            return folder
    meant = f"{deployment.id} (image {deployment.image})"
    raise BadDeployment(f"there is no build of {meant}; looked at " + ", ".join(looked))


def copy(folder: Path, into: Path, gid: int | None) -> Path:
    """Copy the handler so that this group can read it; the copy's name has its digest."""
    scratch = into / "copying"
    _discard(scratch)
    target = scratch / _PACKAGE
    try:
        shutil.copytree(folder, target, symlinks=True, ignore=_IGNORED)
        digest = _seal(target, gid)
        _own(scratch, gid, 0o750)
    except (OSError, shutil.Error) as error:
        _discard(scratch)
        raise BadDeployment(f"the build in {folder} cannot be read: {error}") from error
    final = into / f"build-{digest}"
    if final.exists():
        _discard(scratch)
    else:
        scratch.rename(final)
    return final


def handler_of(build: Path) -> Path:
    """The folder of the handler in a copy."""
    return build / _PACKAGE


def requirements_of(build: Path) -> bytes:
    """The content of its requirements.txt; empty if there is none."""
    path = handler_of(build) / "requirements.txt"
    return path.read_bytes() if path.is_file() else b""


def _places(deployment: Deployment, settings: ProcessProviderSettings) -> list[Path]:
    named = deployment.annotations.get(PATH)
    if named:
        return [Path(named)] if Path(named).is_absolute() else [r / named for r in settings.roots]
    image = deployment.image.rpartition("/")[2].partition("@")[0].partition(":")[0]
    names = [name for name in (image, deployment.id.name) if name not in ("", ".", "..")]
    return [settings.builds / name for name in dict.fromkeys(names)]


def _handler_in(place: Path) -> Path | None:
    for folder in (place / _PACKAGE, place):
        if (folder / _HANDLER).is_file():
            return folder.resolve()
    return None


def _seal(target: Path, gid: int | None) -> str:
    """The digest of all files in it, which become readable for the group on the way."""
    digest = hashlib.sha256()
    _own(target, gid, 0o750)
    for path in sorted(target.rglob("*")):
        name = str(path.relative_to(target)).encode()
        digest.update(b"%d:%b" % (len(name), name))
        if path.is_symlink():
            if not path.resolve().is_relative_to(target.resolve()):
                raise BadDeployment(f"{path.name} is a link that leaves the build")
            digest.update(b"l" + os.fsencode(path.readlink()))
        elif path.is_dir():
            _own(path, gid, 0o750)
        elif path.is_file():
            executable = path.stat().st_mode & stat.S_IXUSR
            _own(path, gid, 0o750 if executable else 0o640)
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        else:
            raise BadDeployment(f"{path.name} is neither a file nor a folder")
    return digest.hexdigest()[:16]


def _own(path: Path, gid: int | None, mode: int) -> None:
    path.chmod(mode)
    if gid is not None:
        os.chown(path, 0, gid)


def _discard(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
