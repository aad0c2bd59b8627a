"""What code that a tenant got to run in its worker can ask the system for: a real worker, asked.

The probe takes the place of `math.lgamma`, which programs may call, in the fork server's process.
"""

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from gpu_manager.runtimes import fork_client
from tests.kit.worlds.caller import Caller, program, step
from tests.kit.worlds.worker_machine import Machine
from torch_shim.wire.programs import Ref

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a file system of its own needs root")

_PROBE = textwrap.dedent(
    """
    import ctypes, math, os, socket
    libc = ctypes.CDLL(None, use_errno=True)

    def raw(*arguments):
        if libc.syscall(*(ctypes.c_long(argument) for argument in arguments)) < 0:
            raise OSError(ctypes.get_errno(), "refused")

    def listen():
        with socket.socketpair()[0] as one:
            one.listen()

    SECRET, MANAGER = {secret!r}, {manager}
    THINGS = {{
        1: lambda: os.execv("/usr/bin/env", ["env"]),
        2: lambda: os.posix_spawn("/usr/bin/env", ["env"], {{}}),
        3: os.fork,
        4: lambda: socket.socket(socket.AF_INET),
        5: lambda: socket.socket(socket.AF_UNIX),
        6: listen,
        7: lambda: raw({ptrace}, 0, 0, 0, 0),
        8: lambda: raw({readv}, MANAGER, 0, 0, 0, 0, 0),
        9: lambda: os.kill(MANAGER, 0),
        10: lambda: os.pidfd_open(MANAGER),
        11: lambda: raw({unshare}, 0x10000000),
        12: lambda: raw({io_uring}, 1, 0),
        13: lambda: raw({bpf}, 0, 0, 0),
        14: lambda: raw({userfaultfd}, 0),
        15: lambda: libc.prctl(1, 0, 0, 0, 0) and raw(-1),
        20: lambda: open(SECRET),
        21: lambda: os.listdir(os.path.dirname(SECRET)),
        22: lambda: os.listdir("/root/.ssh"),
        23: lambda: open("/etc/shadow"),
        24: lambda: open("/proc/%d/cmdline" % MANAGER),
        25: lambda: os.listdir("/run"),
        26: lambda: open("/usr/written", "w"),
        40: lambda: open("/tmp/own", "w"),
        41: lambda: open("/dev/null"),
        42: lambda: os.kill(os.getpid(), 0),
    }}

    def probe(number):
        try:
            THINGS[int(number)]()
        except OSError as error:
            return error.errno
        return 0

    math.lgamma = probe
    """
)
_X86 = {"ptrace": 101, "readv": 310, "unshare": 272, "io_uring": 425, "bpf": 321}
_ARM = {"ptrace": 117, "readv": 270, "unshare": 97, "io_uring": 425, "bpf": 280}
_CALLS = {"x86_64": {**_X86, "userfaultfd": 323}, "aarch64": {**_ARM, "userfaultfd": 282}}

REFUSED_CALLS = {
    "it executes a program": 1,
    "it spawns a program": 2,
    "it forks": 3,
    "it opens a network socket": 4,
    "it opens a local socket": 5,
    "it listens": 6,
    "it asks to be traced": 7,
    "it reads another's memory": 8,
    "it signals its manager": 9,
    "it opens its manager's process": 10,
    "it makes a namespace": 11,
    "it makes a ring": 12,
    "it loads into the kernel": 13,
    "it handles page faults": 14,
    "it wants to outlive its manager": 15,
}
HIDDEN = {
    "the manager's state": 20,
    "the folder of that": 21,
    "root's keys": 22,
    "the system's passwords": 23,
    "the manager's command line": 24,
    "sockets of others": 25,
}


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    secret = tmp_path_factory.mktemp("state") / "secret"
    secret.write_text("of another")
    with pytest.MonkeyPatch.context() as patch:
        _install(patch, secret)
        machine = Machine()
        try:
            hosted = machine.load()
            machine.admit(hosted)
            with machine.connect(hosted) as caller:
                yield caller
        finally:
            machine.run(machine.runtime.close())
            machine.runner.close()


def _install(patch: pytest.MonkeyPatch, secret: Path) -> None:
    """Have fork servers begin with the probe."""
    original = fork_client._command  # noqa: SLF001 - the one place where the command is made
    numbers = _CALLS[os.uname().machine]
    source = _PROBE.format(secret=str(secret), manager=os.getpid(), **numbers)

    def command(devices: str, descriptors: Sequence[int]) -> list[str]:
        words = original(devices, descriptors)
        return [source + word if word.startswith("import runpy") else word for word in words]

    patch.setattr(fork_client, "_command", command)


def _asked(caller: Caller, number: int) -> object:
    """The error number with which the worker's system answered."""
    return caller.call(program(step("M:lgamma", number), inputs=0, output=[Ref(0)])).outputs[0]


@pytest.mark.parametrize("number", REFUSED_CALLS.values(), ids=REFUSED_CALLS)
def test_worker_is_refused_when(caller: Caller, number: int) -> None:
    assert _asked(caller, number) == errno.EPERM


def _may_mount() -> bool:
    command = ["unshare", "--mount", "true"]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0


own_files = pytest.mark.skipif(not _may_mount(), reason="this system allows no mounts of one's own")


@own_files
@pytest.mark.parametrize("number", HIDDEN.values(), ids=HIDDEN)
def test_worker_does_not_see(caller: Caller, number: int) -> None:
    assert _asked(caller, number) == errno.ENOENT


@own_files
def test_worker_writes_to_no_file_of_the_system(caller: Caller) -> None:
    assert _asked(caller, 26) in {errno.EROFS, errno.EACCES}


@pytest.mark.parametrize("number", [40, 41, 42])
def test_worker_keeps_what_it_needs(caller: Caller, number: int) -> None:
    assert _asked(caller, number) == 0


def test_worker_computes_with_several_threads_when_it_is_confined(caller: Caller) -> None:
    what = program(
        step("t:torch.ones", [1, 8, 64, 64]),
        step("t:torch.ones", [16, 8, 3, 3]),
        step("t:torch.nn.functional.conv2d", Ref(0), Ref(1)),
        step("o:matmul", Ref(2), Ref(2)),
        step("t:torch.linalg.svd", Ref(0)),
        inputs=0,
        output=[Ref(3)],
    )
    (found,) = caller.call(what).outputs
    assert torch.equal(found, torch.full((1, 16, 62, 62), 72.0 * 72.0 * 62))


@own_files
def test_checkout_below_a_temporary_folder_stays_and_the_rest_of_it_goes(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "module.py").write_text("FOUND = 1\n")
    (tmp_path / "theirs").write_text("secret")
    program = f"""
        import sys
        sys.path.append({str(tmp_path / "ours")!r})
        from pathlib import Path
        from gpu_manager.worker import sandbox
        sandbox.narrow()
        sandbox.own_temporary_folders()
        import module
        print(module.FOUND, Path({str(tmp_path / "theirs")!r}).exists())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    assert subprocess.check_output(command, text=True).split() == ["1", "False"]
