"""A network and a mount name space of a test's own, with a way to the world, gone without a trace.

Bridges, firewall rules and mounts that programs make in there are seen by nobody else on this
machine. The test reaches what is in there while it is `inside`, and at `address` from anywhere.
A test that is killed leaves nothing either: a process beside it sees to that.
"""

import ctypes
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.kit.engines.space_traces import (
    SpacesFailed,
    folder_of,
    hierarchies,
    remove,
    run,
)
from tests.kit.places import ROOT
from tests.kit.waiting import wait_until

_NETS = "10.204."
_CLONE_NEWNET = 0x40000000
_START_S = 60.0
_KEEPER = "tail"
_AS_MANY_PROCESSES = 8


class OwnSpaces:
    """Name spaces that end with everything that was started in them.

    `programs` are the beginnings of the names of what is started there: such a process with the
    folder among its words belongs here, as does every process in the cgroup of this `name`.
    """

    def __init__(self, prefix: str, programs: Sequence[str]) -> None:
        self.name = f"{prefix}{os.getpid()}-{secrets.token_hex(2)}"
        self.folder = folder_of(self.name)
        self._programs = (*programs, _KEEPER)
        self._prefix = prefix
        self._link = f"gpf{secrets.token_hex(4)}"
        self._net, self._claim = _free_net()
        self._holder: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where what is in there answers to this machine."""
        return f"{self._net}.2"

    @property
    def machine(self) -> str:
        """Where this machine answers to what is in there."""
        return f"{self._net}.1"

    def command(self, *words: str, mounts: bool = False) -> list[str]:
        """What runs a command in the network, and with `mounts` among the mounts, of these."""
        own = [f"--mount={self._space('mnt')}"] if mounts else []
        return ["nsenter", f"--net={self._space('net')}", *own, *words]

    def run(self, *words: str) -> str:
        """What a command in there prints; SpacesFailed with what it said where it fails."""
        return run(*self.command(*words, mounts=True))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Have this thread, and threads and processes that it starts, be in the network."""
        with Path("/proc/thread-self/ns/net").open("rb") as outside:
            with self._space("net").open("rb") as inside:
                _enter(inside.fileno())
            try:
                yield
            finally:
                _enter(outside.fileno())

    def make(self) -> None:
        """The folder, the name spaces, and a link to this machine; what killed tests left goes."""
        self._end_those_of_the_dead()
        self._be_guarded()
        self.folder.mkdir(mode=0o711)
        self._make_cgroups()
        self._make_spaces()
        self._make_network()

    def end(self) -> None:
        """Leave no process, mount, network, cgroup or file; SpacesFailed says what stays."""
        remove(self.name, self._programs)
        if self._holder is not None:
            self._holder.wait()
        if self._guard is not None:
            self._guard.communicate(b"x")
        os.close(self._claim)

    def _be_guarded(self) -> None:
        """Start what removes everything if this process is killed: its input ends then."""
        words = [sys.executable, "-m", "tests.kit.engines.space_traces"]
        self._guard = subprocess.Popen(
            [*words, self.name, *self._programs],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _make_cgroups(self) -> None:
        """That of the containers, in each hierarchy; the kernel would weigh it as one process."""
        for hierarchy in hierarchies():
            folder = hierarchy / self.name
            folder.mkdir(exist_ok=True)
            for name, usual in (("cpu.shares", 1024), ("cpu.weight", 100)):
                if (folder / name).exists():
                    (folder / name).write_text(str(_AS_MANY_PROCESSES * usual))

    def _make_spaces(self) -> None:
        """They live as long as this process, which waits for what never comes."""
        waited = self.folder / "holder"
        waited.touch()
        unshare = ["unshare", "--net", "--mount", "--propagation", "slave"]
        self._holder = subprocess.Popen([*unshare, "tail", "--follow", str(waited)])
        wait_until(self._has_spaces, "name spaces are made", within_s=_START_S)

    def _has_spaces(self) -> bool:
        assert self._holder is not None
        if self._holder.poll() is not None:
            raise SpacesFailed("no name spaces can be made")
        return _KEEPER in Path("/proc", str(self._holder.pid), "comm").read_text()

    def _space(self, kind: str) -> Path:
        assert self._holder is not None
        return Path("/proc", str(self._holder.pid), "ns", kind)

    def _make_network(self) -> None:
        """A link to this machine, which hands on what is sent to elsewhere."""
        assert self._holder is not None
        pair = ("type", "veth", "peer", "name", "outside", "netns", str(self._holder.pid))
        run("ip", "link", "add", self._link, *pair)
        run("ip", "addr", "add", f"{self.machine}/30", "dev", self._link)
        run("ip", "link", "set", self._link, "up")
        run(*self.command("ip", "addr", "add", f"{self.address}/30", "dev", "outside"))
        for device in ("lo", "outside"):
            run(*self.command("ip", "link", "set", device, "up"))
        run(*self.command("ip", "route", "add", "default", "via", self.machine))
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        named = ("--match", "comment", "--comment", self.name)
        for table, rule in self._rules():
            run("iptables", "--wait", *table, "--insert", *rule, *named)

    def _rules(self) -> Sequence[tuple[tuple[str, ...], tuple[str, ...]]]:
        ours = f"{self._net}.0/30"
        return (
            (("--table", "nat"), ("POSTROUTING", "--source", ours, "--jump", "MASQUERADE")),
            ((), ("FORWARD", "--in-interface", self._link, "--jump", "ACCEPT")),
            ((), ("FORWARD", "--out-interface", self._link, "--jump", "ACCEPT")),
        )

    def _end_those_of_the_dead(self) -> None:
        for folder in Path(tempfile.gettempdir()).glob(f"{self._prefix}*"):
            pid = folder.name.removeprefix(self._prefix).partition("-")[0]
            if pid.isdecimal() and not Path("/proc", pid).exists():
                remove(folder.name, self._programs)


def _free_net() -> tuple[str, int]:
    """The first three numbers of a network that nothing on this machine has, and a claim on it.

    Nothing has its addresses yet: the name of a socket, whose descriptor this is, keeps other
    processes from finding it free as well.
    """
    claim = socket.socket(socket.AF_UNIX)
    for number in range(os.getpid() % 200, 256):
        with suppress(OSError):
            claim.bind(f"\0gpufaas-test-net-{number}")
            if f" {_NETS}{number}." not in run("ip", "-o", "addr"):
                return f"{_NETS}{number}", claim.detach()
            claim.close()
            claim = socket.socket(socket.AF_UNIX)
    raise SpacesFailed("no network is free")


def _enter(descriptor: int) -> None:
    """Python 3.12 has os.setns."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
