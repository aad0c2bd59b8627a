"""A `gpufaas up` of its own: its folder, its processes, and what is asked of it."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx

from gpufaas.remote.scheduler_api import SchedulerApi
from gpufaas.stack.held_ports import HeldPort
from gpufaas.stack_folder import StackFolder
from scheduler.service.access import ApiRole, token
from tests.kit.places import ROOT
from tests.kit.waiting import wait_until

PATIENCE_S = 60.0
_MARK = "E2E_STACK"  # in the environment of `up`, and of what inherits it
_DEVICES = ("--devices", "cpu:2", "--gpu-memory", "2GiB", "--store-memory", "1GiB")


class Reached(Protocol):
    """A system whose gateway and scheduler are asked, wherever its processes are."""

    @property
    def url(self) -> str: ...

    @property
    def password(self) -> str: ...

    @property
    def scheduler(self) -> SchedulerApi: ...


class Stack:
    """One that is up, or was; handlers are written into `work`, where it runs."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.state = folder / "state"
        self.port = HeldPort().keep()
        self.output = folder / "up.log"
        self._environment = {**environment, _MARK: str(folder)}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.work.mkdir()
        (self.work / "template").symlink_to(ROOT / "template")
        (folder / "gpufaas.toml").write_text(
            f'[gateway]\nroots = ["{self.work}", "{ROOT}"]\n'
            'callback_allowed = ["127.0.0.1"]\n[scheduler]\n'
            f'listen = "127.0.0.1:{HeldPort().keep()}"\n'
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def password(self) -> str:
        return (self.state / "secrets" / "basic-auth-password").read_text().strip()

    @property
    def scheduler_url(self) -> str:
        running = StackFolder(self.state).running()
        assert running is not None, self.said()
        return running.scheduler

    @property
    def scheduler(self) -> SchedulerApi:
        secret = (self.state / "secret").read_bytes()
        return SchedulerApi((self.scheduler_url,), token(secret, ApiRole.ADMIN))

    def launch(self, *options: str) -> subprocess.Popen[bytes]:
        """`gpufaas up` as from a terminal of its own, not waited for."""
        said = ("up", "--state", str(self.state), "--config", str(self.folder / "gpufaas.toml"))
        port = ("--port", str(self.port))
        with self.output.open("ab") as output:
            process = subprocess.Popen(
                _command(*said, *port, *_DEVICES, *options),
                cwd=self.work,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Have it up."""
        process = self.launch(*options)
        wait_until(lambda: self.is_up() or process.poll() is not None, "up")
        assert process.poll() is None, self.said()
        return process

    def is_up(self) -> bool:
        """Whether what was launched last says so."""
        running = StackFolder(self.state).running()
        return running is not None and running.pid == self._processes[-1].pid

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Another command of ours, to its end."""
        return subprocess.run(
            _command(*command),
            cwd=self.work,
            env={**self._environment, **variables},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def said(self) -> str:
        """What `up` and its parts wrote last."""
        logs = [self.output, *sorted((self.state / "logs").glob("*.log"))]
        return "\n".join(f"== {log.name}\n{_tail(log)}" for log in logs if log.exists())

    def left(self) -> list[str]:
        """Processes and sockets of it that there still are."""
        return [*map(str, self.processes().items()), *self._sockets()]

    def processes(self) -> dict[int, str]:
        """Every process that belongs to it, with its command."""
        words = [word.encode() for word in (f"{_MARK}={self.folder}\0", f"{self.state}/")]
        found = {}
        for pid in _pids():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                known = command + _environ(pid)
                if pid != os.getpid() and any(word in known for word in words):
                    found[pid] = command.replace(b"\0", b" ").decode(errors="replace")
        return found

    def part(self, *words: str) -> int:
        """The process of one of the parts that `up` runs: its command has all these words."""
        running = StackFolder(self.state).running()
        assert running is not None, self.said()
        commands = {pid: self.processes().get(pid, "") for pid in children(running.pid)}
        found = [pid for pid, said in commands.items() if all(word in said for word in words)]
        return found[0] if found else 0

    def workers(self) -> list[int]:
        """Processes that run models, or wait for one."""
        manager = self.part("gpu-manager")
        servers = children(manager) if manager else []  # nobody's are the machine's first ones
        return [one for server in servers for one in children(server)]

    def instances(self, function: str) -> list[int]:
        """The runtimes of a function's instances; not the template that they are forks of."""
        mark = re.compile(rf"GPUFAAS_INSTANCE=[^\0]*/{re.escape(function)}-[0-9a-f]+\0".encode())
        found = []
        for pid, command in sorted(self.processes().items()):
            with contextlib.suppress(OSError):
                shown = _environ(pid)
                is_template = b"\0GPUFAAS_TEMPLATE=" in shown
                if "gateway_ext/runtime" in command and mark.search(shown) and not is_template:
                    found.append(pid)
        return found

    def end(self) -> None:
        """Whatever happened, nothing of it stays."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(PATIENCE_S)
            process.kill()
            process.wait()
        for pid in self.processes():
            kill(pid)

    def _sockets(self) -> list[str]:
        lines = Path("/proc/net/unix").read_text().splitlines()
        return [line.split()[-1] for line in lines if f"{self.state}/" in line]


class Rest:
    """HTTP towards a gateway; it keeps no connection, so that nothing has to be closed."""

    def __init__(self, stack: Reached, *, password: str | None = None) -> None:
        secret = stack.password if password is None else password
        kept = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=stack.url, timeout=PATIENCE_S, limits=kept, verify=False)
        self._auth = ("admin", secret)

    def ask(self, method: str, path: str, said: object = None) -> httpx.Response:
        """One of the routes below /system."""
        return self.http.request(method, path, json=said, auth=self._auth)

    def stream(self, method: str, path: str) -> contextlib.AbstractContextManager[httpx.Response]:
        """The same, its answer read as it comes."""
        return self.http.stream(method, path, auth=self._auth)

    def call(self, name: str, body: bytes | str = b"", **how: Any) -> httpx.Response:
        """A function, or a path below it."""
        return self.http.post(f"/function/{name}", content=body, **how)

    def status(self, name: str) -> Any:
        answer = self.ask("GET", f"/system/function/{name}")
        return answer.json() if answer.status_code == httpx.codes.OK else {}

    def deploy(self, name: str, *, method: str = "POST", **fields: object) -> None:
        """Deploy it, and wait until it answers."""
        said = {"service": name, "image": f"e2e/{name}:latest", **fields}
        answer = self.ask(method, "/system/functions", said)
        assert answer.status_code == httpx.codes.ACCEPTED, answer.text
        self.ready(name)

    def ready(self, name: str, count: int = 1) -> None:
        def is_so() -> bool:
            found = self.status(name)
            return int(found.get("availableReplicas", 0)) >= count

        wait_until(is_so, f"{name} is ready", instead=lambda: str(self.status(name)))

    def remove(self, name: str) -> None:
        answer = self.ask("DELETE", "/system/functions", {"functionName": name})
        assert answer.status_code in {httpx.codes.ACCEPTED, httpx.codes.NOT_FOUND}, answer.text

    def metric(self, name: str, **labels: str) -> float:
        """One of the gateway's; 0 where it says nothing."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith((f"{name}{{", f"{name} ")) and all(word in line for word in wanted):
                return float(line.rpartition(" ")[2])
        return 0.0


@contextlib.contextmanager
def stack(environment: Mapping[str, str]) -> Iterator[Stack]:
    """A folder for one; the path is short, as sockets are to lie in it, and open to all users."""
    folder = Path(tempfile.mkdtemp(prefix="e2e"))
    folder.chmod(0o755)
    found = Stack(folder, environment)
    try:
        yield found
    finally:
        found.end()
        shutil.rmtree(folder, ignore_errors=True)


def leases(stack: Stack) -> list[Mapping[str, Any]]:
    """All that the scheduler has given and not got back."""
    slots = [slot for gpu in stack.scheduler.get("/cluster")["gpus"] for slot in gpu["slots"]]
    return [lease for slot in slots for lease in slot["leases"]]


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def children(parent: int) -> list[int]:
    """Processes that this one started and has not yet buried."""
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and fields[0] != "Z":
                found.append(pid)
    return sorted(found)


def _environ(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def _command(*said: str) -> Sequence[str]:
    return (sys.executable, "-P", "-m", "gpufaas", *said)


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])
