"""What a worker gives up before it reads anything of a tenant's. Linux only.

Every step that the system does not allow is named in what these functions return, for the log:
a worker runs with less protection rather than not at all.
"""

import contextlib
import ctypes
import errno
import functools
import os
import resource
import signal
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_NO_NEW_PRIVILEGES = 1, 4, 38
_NEW_NETWORK, _NEW_USER = 0x40000000, 0x10000000
_CAPABILITY_VERSION = 0x20080522
_FILES = "no files but the system's"

_libc = ctypes.CDLL(None, use_errno=True)


def isolate() -> list[str]:
    """For this process and those it forks: no network, few files, no rights by executing a file."""
    missing: list[str] = []
    _attempt(missing, "no new privileges", lambda: _control(_SET_NO_NEW_PRIVILEGES, 1))
    _attempt(missing, _FILES, narrow)
    _attempt(missing, "no network", _leave_network)
    # A new user namespace makes the process undumpable, which closes its own /proc files to it.
    _control(_SET_DUMPABLE, 1)
    return missing


def separate(missing: list[str]) -> list[str]:
    """For one of the forked processes: temporary files that the others do not see.

    `missing` is what `isolate` returned. Without files of their own there is nothing to separate.
    """
    found: list[str] = []
    if not any(what.startswith(_FILES) for what in missing):
        _attempt(found, "temporary files of its own", own_temporary_folders)
    return found


def die_with(parent: int) -> None:
    """Be killed when the parent ends, even if it has ended already."""
    _control(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def give_up_rights(uid: int, descriptors: int, processes: int, parent: int) -> list[str]:
    """Become an unprivileged user (unless `uid` is 0) within limits, closed to inspection.

    From then on the system refuses what a worker never asks for.
    """
    missing: list[str] = []
    limits = (
        ("no core file", resource.RLIMIT_CORE, 0),
        ("few open files", resource.RLIMIT_NOFILE, descriptors),
        ("few processes", resource.RLIMIT_NPROC, processes),
    )
    for what, limit, value in limits:
        _attempt(missing, what, functools.partial(_lower, limit, value))
    if uid:
        _attempt(missing, "a user of its own", lambda: _become(uid))
    else:
        missing.append("a user of its own")
    _attempt(missing, "not dumpable", lambda: _control(_SET_DUMPABLE, 0))
    die_with(parent)  # a change of user forgets it
    _attempt(missing, "few system calls", refuse_system_calls)
    return missing


def _leave_network() -> None:
    """Without the right to do so it takes a new user namespace, whose rights are then dropped."""
    if not _libc.unshare(_NEW_NETWORK):
        return
    _call(_libc.unshare, _NEW_USER | _NEW_NETWORK)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _call(_libc.capset, header, (ctypes.c_uint32 * 6)())


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def _control(option: int, value: int) -> None:
    _call(_libc.prctl, option, value, 0, 0, 0)


def _call(function: Callable[..., int], *arguments: object) -> None:
    if function(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _attempt(missing: list[str], what: str, step: Callable[[], None]) -> None:
    try:
        step()
    except (OSError, ValueError) as error:
        missing.append(f"{what} ({error})")


# The files that a worker sees: the system's libraries, Python, ours, the GPU's devices, no more.
#
# The fork server moves to a root of its own before it imports torch, and each worker gets its own
# folders for temporary files. What a tenant's worker needs later, such as CUDA's libraries, lies
# in the system's folders or in Python's, which stay.

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
    _call(_libc.unshare, _NEW_MOUNTS)
    _mount("none", Path("/"), "", _RECURSIVE | _PRIVATE)


def _wanted() -> list[Path]:
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
    given = os.environ.get("LD_LIBRARY_PATH", "").split(":")  # noqa: TID251 - the loader's own
    for file in Path("/etc/ld.so.conf.d").glob("*.conf"):
        with contextlib.suppress(OSError):
            given += file.read_text(encoding="utf-8", errors="replace").split("\n")
    for line in given:
        path = Path(line.strip())
        if path.is_absolute():
            yield path


def _show(path: Path, handle: int, root: Path) -> None:
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
    _call(_libc.syscall, _PIVOT_ROOT[os.uname().machine], os.fsencode("."), os.fsencode("old"))
    os.chdir("/")
    _call(_libc.umount2, b"/old", _DETACH)
    Path("/old").rmdir()


_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


def _mount(source: str, target: Path, kind: str, flags: int, options: str = "") -> None:
    words = [os.fsencode(word) for word in (source, target, kind)]
    if _libc.mount(*words, ctypes.c_ulong(flags), options.encode()):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(target))


# The system calls that a worker cannot make once it belongs to a tenant: a seccomp filter.
#
# It is a list of what a worker never needs, not of what it needs: drivers of GPUs call the system
# in ways that change with their versions. It covers all threads, and cannot be taken back.

# Numbers on x86_64 and on aarch64; None where there is no such call.
_REFUSED: dict[str, tuple[int, int | None]] = {
    # other programs and processes
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "tkill": (200, 130),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # other machines, and other processes' listeners
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # other files
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    # the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "setns": (308, 268),
    "unshare": (272, 97),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "syslog": (103, 116),
    "personality": (135, 92),
    "vmsplice": (278, 75),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "fork": (57, None),
    "vfork": (58, None),
}
# Allowed for one's own process, or with some arguments: see `_program`.
_CHECKED = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "prlimit64": (302, 261),
    "prctl": (157, 167),
}

_THREAD = 0x00010000  # of the flags of clone: a thread of this process, no other process
_NEW_NAMESPACES = 0x7E020000
_OF_X32 = 0x40000000  # the bit of the calls that x86_64 has a second time


class _Machine(NamedTuple):
    """What the filter has to know of the processor's kind."""

    column: int
    audit: int
    seccomp: int


_MACHINES = {"x86_64": _Machine(0, 0xC000003E, 317), "aarch64": _Machine(1, 0xC00000B7, 277)}

# Instructions of the filter: load a word, jump if equal, greater or equal, any bit set; return.
_LOAD, _EQUAL, _FROM, _ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _AUDIT_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_SET_FILTER, _ALL_THREADS = 1, 1


def refuse_system_calls() -> None:
    """Have them fail with EPERM, in every thread of this process, from now on."""
    machine = _MACHINES.get(os.uname().machine)
    if machine is None:
        raise OSError(errno.ENOSYS, f"no filter for {os.uname().machine}")
    program = b"".join(_program(machine, os.getpid()))
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    failed = _libc.syscall(
        ctypes.c_long(machine.seccomp), _SET_FILTER, _ALL_THREADS, ctypes.c_char_p(header)
    )
    if failed:  # an error, or the id of a thread that has another filter
        raise OSError(ctypes.get_errno() or errno.ESRCH, os.strerror(ctypes.get_errno()))


def _program(machine: _Machine, pid: int) -> list[bytes]:
    refused = [numbers[machine.column] for numbers in _REFUSED.values()]
    own = {name: numbers[machine.column] for name, numbers in _CHECKED.items()}
    return [
        _word(_LOAD, _AUDIT_AT),
        _word(_EQUAL, machine.audit, 1, 0),
        _word(_RETURN, _FAIL | errno.EPERM),
        _word(_LOAD, _NUMBER_AT),
        *_when(_FROM, _OF_X32),
        *(word for number in refused if number is not None for word in _when(_EQUAL, number)),
        # Its flags lie in memory: the C library goes on with clone.
        *_when(_EQUAL, own["clone3"], errno.ENOSYS),
        *_check(own["clone"], _clone_of_thread()),
        *_check(own["prlimit64"], _one_of([0, pid])),
        *_check(own["prctl"], _none_of([_SET_DEATH_SIGNAL, _SET_DUMPABLE])),
        *(
            word
            for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
            for word in _check(own[name], _one_of([pid]))
        ),
        _word(_RETURN, _ALLOW),
    ]


def _word(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, otherwise, value)


def _when(comparison: int, value: int, error: int = errno.EPERM) -> list[bytes]:
    return [_word(comparison, value, 0, 1), _word(_RETURN, _FAIL | error)]


def _check(number: int, check: list[bytes]) -> list[bytes]:
    """For this call look at its first argument; the check always returns."""
    load = _word(_LOAD, _FIRST_ARGUMENT_AT)
    return [_word(_EQUAL, number, 0, len(check) + 1), load, *check]


def _clone_of_thread() -> list[bytes]:
    return [
        *_when(_ANY, _NEW_NAMESPACES),
        _word(_ANY, _THREAD, 0, 1),
        _word(_RETURN, _ALLOW),
        _word(_RETURN, _FAIL | errno.EPERM),
    ]


def _one_of(values: Iterable[int]) -> list[bytes]:
    allowed = [
        word for value in values for word in (_word(_EQUAL, value, 0, 1), _word(_RETURN, _ALLOW))
    ]
    return [*allowed, _word(_RETURN, _FAIL | errno.EPERM)]


def _none_of(values: Iterable[int]) -> list[bytes]:
    refused = [word for value in values for word in _when(_EQUAL, value)]
    return [*refused, _word(_RETURN, _ALLOW)]
