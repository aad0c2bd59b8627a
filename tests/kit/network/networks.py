"""Hosts on a network of a test's own, any two of which can be cut off from each other.

Where the kernel lets us, every host is a network name space on a bridge. A cut loses every packet
and ends no connection: each of the two ends is given a hardware address for the other one that
nobody has.
"""

import ctypes
import os
import secrets
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

HERE = "here"  # the host at which the test itself asks

_PORT = 7700
_NET = "10.203.0."
_NOBODY = "02:00:00:00:00:ff"
_NARROW, _LONGEST = "1mbit", "2s"
_NAMES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_PREFIX = "gpufaas-test-"


class NoNetwork(Exception):
    """Network name spaces cannot be made here; the text says why."""


class Network(Protocol):
    """Hosts; the test's own traffic is among theirs while it is `inside`.

    `silent` says that a host that is cut off does not even acknowledge packets.
    """

    silent: bool

    def command(self, host: str, *command: str) -> list[str]:
        """What runs a command on that host."""
        ...

    def listens_at(self, host: str) -> str:
        """HOST:PORT for whatever serves there."""
        ...

    def url(self, host: str, asked_by: str = HERE) -> str:
        """Where that host is reached from another one; the URL for here is good for all."""
        ...

    def cut(self, host: str, *others: str) -> None:
        """From now on nothing passes between that host and these, or anybody."""
        ...

    def heal(self) -> None:
        """Everything passes again."""
        ...

    def inside(self) -> AbstractContextManager[None]:
        """Have this thread, and those that it starts, on the network."""
        ...

    def make(self) -> None:
        """NoNetwork where that cannot be."""
        ...

    def end(self) -> None:
        """Leave nothing of it; all processes on it have ended."""
        ...


class NameSpaces:
    """Network name spaces on a bridge, in the 10.203.0.0/24 that nobody else sees."""

    silent = True

    def __init__(self, hosts: Sequence[str]) -> None:
        self._addresses = {host: f"{_NET}{number}" for number, host in enumerate((HERE, *hosts), 1)}
        self._own = f"{os.getpid()}-{secrets.token_hex(2)}"
        self._made: list[str] = []
        self._cuts: set[tuple[str, str]] = set()
        self._slow: set[str] = set()

    def command(self, host: str, *command: str) -> list[str]:
        """What runs a command on that host."""
        return ["nsenter", f"--net={_NAMES / self._name(host)}", *command]

    def address(self, host: str) -> str:
        """Its address, for all."""
        return self._addresses[host]

    def listens_at(self, host: str) -> str:
        """HOST:PORT for whatever serves there."""
        return f"{self._addresses[host]}:{_PORT}"

    def url(self, host: str, asked_by: str = HERE) -> str:
        """Where that host is reached from another one."""
        del asked_by  # every host has the same address for all
        return f"http://{self.listens_at(host)}"

    def cut(self, host: str, *others: str) -> None:
        """From now on nothing passes between that host and these, or anybody."""
        for other in others or self._addresses.keys() - {host}:
            self.cut_one_way(host, other)
            self.cut_one_way(other, host)

    def cut_one_way(self, host: str, to: str) -> None:
        """From now on nothing passes from that host to this one; the other way it does."""
        self._cuts.add((host, to))
        self._neighbour(host, to, "replace", "lladdr", _NOBODY, "nud", "permanent")

    def slow(self, host: str) -> None:
        """From now on all that this host sends waits in a long queue before a narrow link.

        The kernels on which this has to run lack netem, which would delay every packet alike.
        """
        self._slow.add(host)
        self._queue(host, "replace", "tbf", "rate", _NARROW, "burst", "2kb", "latency", _LONGEST)

    def heal(self) -> None:
        """Everything passes again."""
        while self._cuts:
            self._neighbour(*self._cuts.pop(), "del")
        while self._slow:
            self._queue(self._slow.pop(), "del")

    # -- making and ending it ---------------------------------------------------------------------

    def make(self) -> None:
        """NoNetwork where that cannot be."""
        _end_those_of_the_dead()
        try:
            for host in self._addresses:
                _ip("netns", "add", self._name(host))
                self._made.append(self._name(host))
            self._join()
        except (subprocess.CalledProcessError, OSError) as error:
            said = getattr(error, "stderr", None) or str(error)
            self.end()
            raise NoNetwork(str(said).strip()) from error

    def end(self) -> None:
        """Leave nothing of it."""
        while self._made:
            _ip("netns", "del", self._made.pop())

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Have this thread, and those that it starts, on the network."""
        with Path("/proc/thread-self/ns/net").open("rb") as outside:
            with (_NAMES / self._name(HERE)).open("rb") as inside:
                _enter(inside.fileno())
            try:
                yield
            finally:
                _enter(outside.fileno())

    def _join(self) -> None:
        here = self._name(HERE)
        _ip("-n", here, "link", "add", "bridge", "type", "bridge")
        _ip("-n", here, "addr", "add", f"{self._addresses[HERE]}/24", "dev", "bridge")
        _ip("-n", here, "link", "set", "bridge", "up")
        _ip("-n", here, "link", "set", "lo", "up")
        for host in self._addresses.keys() - {HERE}:
            there, port = self._name(host), f"to-{host}"
            pair = ("type", "veth", "peer", "name", "bridge", "netns", there)
            _ip("-n", here, "link", "add", port, *pair)
            _ip("-n", here, "link", "set", port, "master", "bridge", "up")
            _ip("-n", there, "addr", "add", f"{self._addresses[host]}/24", "dev", "bridge")
            _ip("-n", there, "link", "set", "bridge", "up")
            _ip("-n", there, "link", "set", "lo", "up")

    def _neighbour(self, at: str, to: str, verb: str, *more: str) -> None:
        neighbour = (self._addresses[to], "dev", "bridge", *more)
        _ip("-n", self._name(at), "neigh", verb, *neighbour)

    def _queue(self, host: str, verb: str, *more: str) -> None:
        command = ["tc", "-n", self._name(host), "qdisc", verb, "dev", "bridge", "root", *more]
        subprocess.run(command, check=True, capture_output=True, text=True)

    def _name(self, host: str) -> str:
        return f"{_PREFIX}{self._own}-{host}"


def _end_those_of_the_dead() -> None:
    """A test that was killed left its name spaces behind."""
    for path in _names():
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", pid).exists():
            with suppress(subprocess.CalledProcessError):  # another test may be at it as well
                _ip("netns", "del", path.name)


def _names() -> Iterable[Path]:
    return _NAMES.glob(f"{_PREFIX}*") if _NAMES.is_dir() else ()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _enter(descriptor: int) -> None:
    """Python 3.12 has os.setns."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
