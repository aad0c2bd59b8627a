"""The system calls that a worker cannot make once it belongs to a tenant: a seccomp filter.

It is a list of what a worker never needs, not of what it needs: drivers of GPUs call the system in
ways that change with their versions. It covers all threads, and cannot be taken back.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable
from typing import NamedTuple

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
_SET_DEATH_SIGNAL, _SET_DUMPABLE = 1, 4
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

_libc = ctypes.CDLL(None, use_errno=True)


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
    """The filter's instructions."""
    refused = [numbers[machine.column] for numbers in _REFUSED.values()]
    own = {name: numbers[machine.column] for name, numbers in _CHECKED.items()}
    return [
        _word(_LOAD, _AUDIT_AT),
        _word(_EQUAL, machine.audit, 1, 0),
        _word(_RETURN, _FAIL | errno.EPERM),
        _word(_LOAD, _NUMBER_AT),
        *_when(_FROM, _OF_X32, errno.EPERM),
        *(word for number in refused if number is not None for word in _refuse(number)),
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


def _refuse(number: int) -> list[bytes]:
    return _when(_EQUAL, number, errno.EPERM)


def _when(comparison: int, value: int, error: int) -> list[bytes]:
    return [_word(comparison, value, 0, 1), _word(_RETURN, _FAIL | error)]


def _check(number: int, check: list[bytes]) -> list[bytes]:
    """For this call look at its first argument; the check always returns."""
    load = _word(_LOAD, _FIRST_ARGUMENT_AT)
    return [_word(_EQUAL, number, 0, len(check) + 1), load, *check]


def _clone_of_thread() -> list[bytes]:
    return [
        *_when(_ANY, _NEW_NAMESPACES, errno.EPERM),
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
    refused = [word for value in values for word in _when(_EQUAL, value, errno.EPERM)]
    return [*refused, _word(_RETURN, _ALLOW)]
