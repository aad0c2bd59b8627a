"""The files that a worker sees: the system's libraries, Python, ours, the GPU's devices, no more.

The fork server moves to a root of its own before it imports torch, and each worker gets its own
folders for temporary files. What a tenant's worker needs later, such as CUDA's libraries, lies in
the system's folders or in Python's, which stay.
"""

import contextlib
import ctypes
import os
import stat
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_NEW_MOUNTS = 0x00020000
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_EXECUTION = 1, 2, 4, 8
_REMOUNT, _BIND, _RECURSIVE, _PRIVATE, _DETACH = 32, 4096, 16384, 1 << 18, 2
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/sys")
_LOADER = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "nvidia")
_DRIVERS = ("/run/opengl-driver", "/run/nvidia/driver")  # where some systems put the driver
_DEVICES = ("null", "zero", "full", "random", "urandom", "dxg")
_TEMPORARY = ("/tmp", "/dev/shm")
_TEMPORARY_OPTIONS = "mode=1777,size=64m"
_INSTALLED = ("site-packages", "dist-packages")
_PACKAGES = ("gpu_manager", "torch_shim")

_libc = ctypes.CDLL(None, use_errno=True)


def narrow() -> None:
    """Move this process and those it forks to a root with the files that workers need."""
    _unshare()
    _in_temporary_folders()
    wanted = _wanted()
    links = {link for path in wanted for link in _links(path)}
    handles = [(path, os.open(path, os.O_PATH)) for path in _outermost(wanted)]
    root = Path("/tmp")  # what is mounted there only this process sees
    mask = os.umask(0o022)
    _mount("tmpfs", root, "tmpfs", _NO_SETUID, "mode=0755,size=1m")
    try:
        for path, handle in handles:
            _show(path, handle, root)
        for link in sorted(links):
            _show_link(link, root)
        _show_processes(root)
        for folder in _TEMPORARY:
            (root / folder[1:]).mkdir(parents=True, exist_ok=True)
        _enter(root)
    except OSError:
        _libc.umount2(os.fsencode(root), _DETACH)
        raise
    finally:
        os.umask(mask)
        for _, handle in handles:
            os.close(handle)


def own_temporary_folders() -> None:
    """Give this process folders for temporary files that no other one sees."""
    _unshare()
    flags = _NO_SETUID | _NO_DEVICES | _NO_EXECUTION
    handles = [(path, os.open(path, os.O_PATH)) for path in _in_temporary_folders()]
    mask = os.umask(0o022)
    try:
        for folder in _TEMPORARY:
            _mount("tmpfs", Path(folder), "tmpfs", flags, _TEMPORARY_OPTIONS)
        for path, handle in handles:
            _show(path, handle, Path("/"))
    finally:
        os.umask(mask)
        for _, handle in handles:
            os.close(handle)


def _unshare() -> None:
    if _libc.unshare(_NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _mount("none", Path("/"), "", _RECURSIVE | _PRIVATE)


def _wanted() -> list[Path]:
    """What there is of it."""
    found = {Path(path) for path in (*_SYSTEM, *_DRIVERS)}
    found.update(Path("/etc") / name for name in _LOADER)
    found.update(Path("/dev") / name for name in _DEVICES)
    found.update(Path("/dev").glob("nvidia*"))
    found.update(_of_python())
    found.update(_of_the_loader())
    return [path for path in found if path.exists() and path.resolve() != Path("/")]


def _outermost(wanted: list[Path]) -> list[Path]:
    """The same files by their real paths, without those in a folder that is there too."""
    found: list[Path] = []
    for path in sorted({path.resolve() for path in wanted}):
        if not found or not path.is_relative_to(found[-1]):
            found.append(path)
    return found


@cache
def _in_temporary_folders() -> tuple[Path, ...]:
    """Files that stay although they lie there: a checkout, or a Python, below /tmp."""
    folders = [Path(folder) for folder in _TEMPORARY]
    wanted = _outermost(_wanted())
    return tuple(path for path in wanted if any(path.is_relative_to(each) for each in folders))


def _links(path: Path) -> Iterator[Path]:
    """The symbolic links on the way to a path."""
    for part in (*reversed(path.parents), path):
        if part.is_symlink():
            yield part.parent.resolve() / part.name
            yield from _links(part.parent.resolve() / part.readlink())


def _of_python() -> Iterator[Path]:
    """Its own folders and its packages; of a source tree no more than the packages needed here."""
    ours = Path(__file__).resolve().parents[2]
    for entry in {sys.prefix, sys.base_prefix, sys.exec_prefix, *filter(None, sys.path)}:
        path = Path(entry)
        if path.resolve() != ours or path.name in _INSTALLED:
            yield path
        if path.name in _INSTALLED and path.is_dir():
            yield from _linked_to(path)
    yield from (ours / name for name in _PACKAGES)


def _linked_to(packages: Path) -> set[Path]:
    """What the links of a folder of packages lead to; the whole folder if that has packages too."""
    targets = (Path(entry.path).resolve() for entry in os.scandir(packages) if entry.is_symlink())
    return {each.parent if each.parent.name in _INSTALLED else each for each in targets}


def _of_the_loader() -> Iterator[Path]:
    """Folders that shared libraries are looked for in."""
    given = os.environ.get("LD_LIBRARY_PATH", "").split(":")  # noqa: TID251 - the loader's own
    for file in Path("/etc/ld.so.conf.d").glob("*.conf"):
        with contextlib.suppress(OSError):
            given += file.read_text(encoding="utf-8", errors="replace").split("\n")
    for line in given:
        path = Path(line.strip())
        if path.is_absolute():
            yield path


def _show(path: Path, handle: int, root: Path) -> None:
    """Have it under the new root as well, read-only unless it is a device."""
    target = root / path.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISDIR(os.fstat(handle).st_mode):  # the path itself may be hidden by now
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    _mount(f"/proc/self/fd/{handle}", target, "", _BIND | _RECURSIVE)
    if path.parts[1] != "dev":
        _mount("none", target, "", _REMOUNT | _BIND | _READ_ONLY | _NO_SETUID | _NO_DEVICES)


def _show_link(link: Path, root: Path) -> None:
    target = root / link.relative_to("/")
    if not os.path.lexists(target):  # also for a dangling link
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(link.readlink())


def _show_processes(root: Path) -> None:
    """Only one's own processes where the system can hide the others."""
    target = root / "proc"
    target.mkdir()
    try:
        flags = _NO_SETUID | _NO_DEVICES | _NO_EXECUTION
        _mount("proc", target, "proc", flags, "hidepid=2")
    except OSError:
        _mount("/proc", target, "", _BIND | _RECURSIVE)


def _enter(root: Path) -> None:
    old = root / "old"
    old.mkdir()
    os.chdir(root)
    if _libc.syscall(_PIVOT_ROOT[os.uname().machine], os.fsencode("."), os.fsencode("old")):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.chdir("/")
    if _libc.umount2(b"/old", _DETACH):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    Path("/old").rmdir()


_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


def _mount(source: str, target: Path, kind: str, flags: int, options: str = "") -> None:
    words = [os.fsencode(word) for word in (source, target, kind)]
    if _libc.mount(*words, ctypes.c_ulong(flags), options.encode()):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(target))
