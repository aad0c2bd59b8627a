"""A Docker Engine of a test's own: dockerd in a network and mount name space, gone without a trace.

Its bridges, firewall rules and mounts are in name spaces of its own, so that engines of others on
this machine, and the machine's firewall, see nothing of it. Containers reach the world through the
machine; the test reaches containers' own addresses while it is `inside`, and published ports at
`address` from anywhere.
"""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from tests.kit import needs
from tests.kit.engines.own_spaces import OwnSpaces
from tests.kit.waiting import wait_until

_PREFIX = "gpufaas-docker-"
_PACKAGE = ".".join(("docker", "io"))  # Debian's; written like a registry, and none is named here
_PROGRAMS = ("dockerd", "containerd", "docker-", "runc")
_START_S, _STOP_S = 60.0, 40.0


class EngineFailed(Exception):
    """The Engine did not come up or did not end; what it said is in the text."""


class Engine:
    """A dockerd with everything that belongs to it."""

    def __init__(self) -> None:
        self._spaces = OwnSpaces(_PREFIX, _PROGRAMS)
        self.folder = self._spaces.folder
        self.socket = self.folder / "docker.sock"
        self.url = f"unix://{self.socket}"
        self.pid = 0
        self._dockerd = needs.command("dockerd", _PACKAGE)
        # That of the same package: it builds without a plug-in, which newer ones want.
        same = self._dockerd.parents[1] / "bin" / "docker"
        self.client = same if same.exists() else needs.command("docker", _PACKAGE)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where ports that containers publish answer to this machine."""
        return self._spaces.address

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

    def has_image(self, name: str) -> bool:
        """Whether an image of this name, with its tag, is here."""
        return name in self.docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split()

    def inspect(self, name: str) -> dict[str, object]:
        """Everything that the Engine says about a container, an image or a network."""
        found = json.loads(self.docker("inspect", name))
        assert isinstance(found[0], dict)
        return found[0]

    def inside(self) -> AbstractContextManager[None]:
        """Have this thread, and threads and processes that it starts, reach containers."""
        return self._spaces.inside()

    def make(self) -> None:
        """Its folder and name spaces, and the Engine itself."""
        try:
            self._spaces.make()
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
            *("--cgroup-parent", f"/{self._spaces.name}", "--config-file", self._config()),
        ]
        command = self._spaces.command(str(self._dockerd), *map(str, options), mounts=True)
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
        # Processes of a test are reaped late: to the next one they seem to live. Folders of
        # containers that end go away meanwhile.
        for folder, _, names in os.walk(self.folder):
            for name in names:
                if name.endswith(".pid"):
                    Path(folder, name).unlink(missing_ok=True)

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
        self._spaces.end()

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


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as asking, suppress(OSError):
        asking.settimeout(2)
        asking.connect(str(path))
        asking.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
        return b" 200 " in asking.recv(100)
    return False
