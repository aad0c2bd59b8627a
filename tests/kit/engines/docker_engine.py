"""A Docker Engine of a test's own: dockerd in a network and mount name space, gone without a trace.

Its bridges, firewall rules and mounts are in name spaces of its own, so that engines of others on
this machine, and the machine's firewall, see nothing of it. Containers reach the world through the
machine; the test reaches containers' own addresses while it is `inside`, and published ports at
`address` from anywhere.
"""

import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.kit import needs
from tests.kit.waiting import wait_until

_PREFIX = "gpufaas-docker-"
_PACKAGE = ".".join(("docker", "io"))  # Debian's; written like a registry, and none is named here
_PROGRAMS = (b"dockerd", b"containerd", b"docker-", b"runc", b"tail")
_CGROUPS = Path("/sys/fs/cgroup")
_NETS = "10.204."
_CLONE_NEWNET = 0x40000000
_START_S, _STOP_S = 60.0, 40.0


class EngineFailed(Exception):
    """The Engine did not come up or did not end; what it said is in the text."""


class Engine:
    """A dockerd with everything that belongs to it."""

    def __init__(self) -> None:
        self._own = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(2)}"
        self.folder = Path(tempfile.gettempdir()) / self._own
        self.socket = self.folder / "docker.sock"
        self.url = f"unix://{self.socket}"
        self.pid = 0
        self._dockerd = needs.command("dockerd", _PACKAGE)
        # That of the same package: it builds without a plug-in, which newer ones want.
        same = self._dockerd.parents[1] / "bin" / "docker"
        self.client = same if same.exists() else needs.command("docker", _PACKAGE)
        self._link = f"gpf{secrets.token_hex(4)}"
        self._net = _free_net()
        self._process: subprocess.Popen[bytes] | None = None
        self._holder: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where ports that containers publish answer to this machine."""
        return f"{self._net}.2"

    @property
    def environment(self) -> dict[str, str]:
        """The environment with which the docker client and similar tools find this Engine."""
        return {"DOCKER_HOST": self.url, "DOCKER_CONFIG": str(self.folder / "client")}

    def docker(self, *words: str | Path, **more: object) -> str:
        """What the docker client prints for this; EngineFailed with what it said where it fails."""
        command = [str(self.client), "--host", self.url, *map(str, words)]
        environment = {"PATH": os.defpath, "HOME": str(self.folder), **self.environment}
        environment["DOCKER_BUILDKIT"] = "1"
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            **{"env": environment, "timeout": 600, **more},  # type: ignore[call-overload]  # of run
        )
        if done.returncode:
            raise EngineFailed(f"docker {' '.join(map(str, words))}: {done.stderr or done.stdout}")
        return str(done.stdout).strip()

    def containers(self, *filters: str) -> list[str]:
        """The names of all containers that pass the filters (`label=x=y`), running or not."""
        chosen = [word for one in filters for word in ("--filter", one)]
        found = self.docker("ps", "--all", "--format", "{{.Names}}", *chosen)
        return sorted(found.splitlines())

    def inspect(self, name: str) -> dict[str, object]:
        """Everything that the Engine says about a container, an image or a network."""
        found = json.loads(self.docker("inspect", name))
        assert isinstance(found[0], dict)
        return found[0]

    def command(self, *words: str) -> list[str]:
        """What runs a command where containers' own addresses can be reached."""
        return ["nsenter", f"--net={self._space('net')}", *words]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Have this thread, and threads and processes that it starts, reach containers."""
        with Path("/proc/thread-self/ns/net").open("rb") as outside:
            with self._space("net").open("rb") as inside:
                _enter(inside.fileno())
            try:
                yield
            finally:
                _enter(outside.fileno())

    def make(self) -> None:
        """Its folder and network, and the Engine itself."""
        _end_those_of_the_dead()
        try:
            self.folder.mkdir(mode=0o711)
            self._make_spaces()
            self._make_network()
            self.start()
        except BaseException:
            self.end()
            raise

    def start(self) -> None:
        """Have it answer."""
        options = [
            *("--data-root", self.folder / "data", "--exec-root", self.folder / "exec"),
            *("--pidfile", self.folder / "pid", "--host", self.url, "--group", "root"),
            *("--storage-driver", "overlay2", "--shutdown-timeout", "5"),
            *("--cgroup-parent", f"/{self._own}", "--config-file", self._config()),
        ]
        own_mounts = f"--mount={self._space('mnt')}"
        command = self.command("nsenter", own_mounts, str(self._dockerd), *map(str, options))
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.pid = self._process.pid  # nsenter becomes what it starts
        self._wait(self._process)

    def kill(self) -> None:
        """End dockerd at once, and containerd with it; what runs in containers lives on."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        for path in self.folder.rglob("*.pid"):
            path.unlink()  # processes of a test are reaped late: to the next one they seem to live

    def stop(self) -> None:
        """Ask dockerd to end, which ends all containers."""
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def end(self) -> None:
        """Leave nothing: no process, mount, network, cgroup or file."""
        if self._process is not None and self._process.poll() is None:
            self._remove_containers()
            self.stop()
        _end(self._own, self.folder)
        if self._holder is not None:
            self._holder.wait()

    def log(self) -> str:
        """What dockerd has said of late."""
        return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-30:])

    def _config(self) -> Path:
        """An empty one: that of the machine, if there is any, is not ours."""
        path = self.folder / "daemon.json"
        path.write_text("{}")
        return path

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        def is_over() -> bool:
            return process.poll() is not None or _answers(self.socket)

        wait_until(is_over, "dockerd answers", within_s=_START_S, instead=self.log)
        if process.poll() is not None:
            raise EngineFailed(f"dockerd does not answer:\n{self.log()}")

    def _remove_containers(self) -> None:
        with suppress(EngineFailed):  # what is left is ended with dockerd
            if names := self.containers():
                self.docker("rm", "--force", "--volumes", *names)

    def _make_spaces(self) -> None:
        """The name spaces live as long as this process, which waits for what never comes."""
        waited = self.folder / "holder"
        waited.touch()
        unshare = ["unshare", "--net", "--mount", "--propagation", "slave"]
        self._holder = subprocess.Popen([*unshare, "tail", "--follow", str(waited)])
        wait_until(self._has_spaces, "name spaces are made", within_s=_START_S)

    def _has_spaces(self) -> bool:
        assert self._holder is not None
        if self._holder.poll() is not None:
            raise EngineFailed("no name spaces can be made")
        return b"tail" in Path("/proc", str(self._holder.pid), "comm").read_bytes()

    def _space(self, kind: str) -> Path:
        assert self._holder is not None
        return Path("/proc", str(self._holder.pid), "ns", kind)

    def _make_network(self) -> None:
        """A link to this machine, which hands on what containers send to elsewhere."""
        assert self._holder is not None
        here, there = f"{self._net}.1", f"{self._net}.2"
        pair = ("type", "veth", "peer", "name", "outside", "netns", str(self._holder.pid))
        _run("ip", "link", "add", self._link, *pair)
        _run("ip", "addr", "add", f"{here}/30", "dev", self._link)
        _run("ip", "link", "set", self._link, "up")
        _run(*self.command("ip", "addr", "add", f"{there}/30", "dev", "outside"))
        for device in ("lo", "outside"):
            _run(*self.command("ip", "link", "set", device, "up"))
        _run(*self.command("ip", "route", "add", "default", "via", here))
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        named = ("--match", "comment", "--comment", self._own)
        for table, rule in self._rules():
            _run("iptables", "--wait", *table, "--insert", *rule, *named)

    def _rules(self) -> Sequence[tuple[tuple[str, ...], tuple[str, ...]]]:
        ours = f"{self._net}.0/30"
        return (
            (("--table", "nat"), ("POSTROUTING", "--source", ours, "--jump", "MASQUERADE")),
            ((), ("FORWARD", "--in-interface", self._link, "--jump", "ACCEPT")),
            ((), ("FORWARD", "--out-interface", self._link, "--jump", "ACCEPT")),
        )


@contextmanager
def engine() -> Iterator[Engine]:
    """An Engine of one's own for as long as this lasts; fixtures of tests are made of it."""
    needs.root()
    needs.command("iptables", "iptables")
    needs.command("ip", "iproute2")
    found = Engine()
    found.make()
    try:
        yield found
    finally:
        found.end()


def _free_net() -> str:
    """The first three numbers of a network that nothing on this machine has."""
    taken = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    found = next(n for n in range(os.getpid() % 200, 256) if f" {_NETS}{n}." not in taken)
    return f"{_NETS}{found}"


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as asking, suppress(OSError):
        asking.settimeout(2)
        asking.connect(str(path))
        asking.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
        return b" 200 " in asking.recv(100)
    return False


def _end_those_of_the_dead() -> None:
    """A test that was killed left its Engine behind."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            _end(folder.name, folder)


def _end(name: str, folder: Path) -> None:
    """All of its processes, firewall rules, cgroups and files; its name spaces go with them."""
    for _ in range(100):
        if not (living := list(_processes(name))):
            break
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    else:
        raise EngineFailed(f"processes of {name} do not end: {list(_processes(name))}")
    _remove_rules(name)
    _remove_cgroups(name)
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        raise EngineFailed(f"{folder} cannot be removed")


def _processes(name: str) -> Iterator[int]:
    """What it runs for itself has its folder among its words; containers are in its cgroup."""
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and int(path.name) != os.getpid():
            with suppress(OSError):
                command, cgroup = (path / "cmdline").read_bytes(), (path / "cgroup").read_text()
                program = command.partition(b"\0")[0].rpartition(b"/")[2]
                ours = f"/{name}/".encode() in command and program.startswith(_PROGRAMS)
                if ours or f"/{name}/" in cgroup:
                    yield int(path.name)


def _remove_rules(name: str) -> None:
    for table in ("nat", "filter"):
        command = ("iptables", "--wait", "--table", table)
        for rule in _run(*command, "--list-rules").splitlines():
            if rule.startswith("-A ") and f" {name} " in f"{rule} ".replace('"', ""):
                _run(*command, "--delete", *rule.replace('"', "").split()[1:])


def _remove_cgroups(name: str) -> None:
    for top in [*_CGROUPS.glob(f"*/{name}"), *_CGROUPS.glob(name)]:
        below = sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True)
        for path in (*below, top):
            with suppress(OSError):  # it goes with the last process in it
                path.rmdir()


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineFailed(f"{' '.join(words)}: {done.stderr}")
    return done.stdout


def _enter(descriptor: int) -> None:
    """Python 3.12 has os.setns."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
