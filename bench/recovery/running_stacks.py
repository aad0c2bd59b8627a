"""Stacks of one product's checkout, reached by its commands, its HTTP and its processes alone."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.measure.report import MeasurementFailed
from bench.recovery.stack_needs import etcd_program, free_port

_UP_S, _END_S, _POLL_S = 120.0, 45.0, 0.1
_ASK_S = 5.0
_MARK = "GPUFAAS_BENCH_RECOVERY"  # in the environment of everything that a stack starts
_TEMPLATE = b"GPUFAAS_TEMPLATE="  # in that of what a function's instances are forked from
_DEVICES = ("--devices", "cpu:2", "--gpu-memory", "1GiB", "--store-memory", "512MiB")
_EMULATED = ("--emulate-load", "0.2", "--emulate-run", "0.2")
_OK, _ACCEPTED = 200, 202


class RunningStack(ABC):
    """Processes of one product, in a folder of their own; `product` is the checkout that runs."""

    def __init__(self, product: Path, folder: Path) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.state = folder / "state"
        self.work.mkdir()
        self.state.mkdir()
        (self.work / "template").symlink_to(product / "template")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.scheduler_urls: tuple[str, ...] = ()
        self._environment = {  # the product is another checkout
            **os.environ,  # noqa: TID251 - the bench is an entry point
            "PYTHONPATH": str(product),
            _MARK: str(folder),
        }
        self._children: list[subprocess.Popen[bytes]] = []
        self._token = ""

    @abstractmethod
    def start(self) -> None:
        """Start everything, and wait until the gateway answers."""

    @abstractmethod
    def pids(self, part: str) -> list[int]:
        """The processes of a part."""

    @abstractmethod
    def restore(self) -> None:
        """Start what a round has ended and nothing else starts again."""

    def deploy(
        self,
        name: str,
        handler: str,
        annotations: Mapping[str, str],
        files: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Deploy a function whose handler is this text, and wait until it is ready.

        `files` are texts that lie beside the handler.
        """
        where = self.work / "handlers" / name
        where.mkdir(parents=True)
        (where / "handler.py").write_text(handler)
        for file, text in {"requirements.txt": "", **files}.items():
            (where / file).write_text(text)
        fields = {
            "service": name,
            "image": f"bench/{name}:latest",
            "annotations": {**annotations, "com.gpufaas.path": f"handlers/{name}"},
        }
        status, body = self._system("POST", "/system/functions", fields)
        if status != _ACCEPTED:
            raise MeasurementFailed(f"{name}: {status} {body!r}")
        self.until(lambda: self.ready(name) > 0, f"{name} is ready")

    def scale(self, name: str, replicas: int) -> None:
        """Order this many replicas."""
        fields = {"serviceName": name, "replicas": replicas}
        status, body = self._system("POST", f"/system/scale-function/{name}", fields)
        if status != _ACCEPTED:
            raise MeasurementFailed(f"{name}: {status} {body!r}")

    def ready(self, name: str) -> int:
        """The number of replicas that can be called."""
        status, body = self._system("GET", f"/system/function/{name}", None)
        return int(json.loads(body).get("availableReplicas", 0)) if status == _OK else 0

    def leases(self) -> dict[int, str]:
        """The leases that a scheduler shows, with their GPUs; OSError if none answers."""
        cluster = self.cluster()
        return {
            lease["id"]: gpu["id"]
            for gpu in cluster["gpus"]
            for slot in gpu["slots"]
            for lease in slot["leases"]
        }

    def cluster(self) -> dict[str, Any]:
        """The cluster as the leading scheduler shows it; OSError if none answers."""
        found: dict[str, Any] = self._shown("/cluster")
        return found

    def models(self) -> list[dict[str, Any]]:
        """Every model, as the leading scheduler shows it; OSError if none answers."""
        found: list[dict[str, Any]] = self._shown("/models")
        return found

    def _shown(self, path: str) -> Any:
        failure: OSError = OSError("there is no scheduler")
        for url in self.scheduler_urls:
            try:
                request = urllib.request.Request(
                    f"{url}{path}", headers={"Authorization": f"Bearer {self._bearer()}"}
                )
                with urllib.request.urlopen(request, timeout=_ASK_S) as answer:
                    return json.loads(answer.read())
            except OSError as error:
                failure = error
        raise failure

    def end(self) -> None:
        """End every process of the stack, frozen ones too."""
        for pid in self.processes():
            _signal(pid, signal.SIGCONT)
        for child in reversed(self._children):
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_END_S)
            child.kill()
            child.wait()
        for pid in self.processes():
            _signal(pid, signal.SIGKILL)

    def processes(self) -> dict[int, str]:
        """Every process of the stack, with its command."""
        marks = (f"{_MARK}={self.folder}".encode(), f"{self.folder}/".encode())
        found = {}
        for path in Path("/proc").iterdir():
            if not path.name.isdecimal() or int(path.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                command = (path / "cmdline").read_bytes()
                known = command + (path / "environ").read_bytes()
                if any(mark in known for mark in marks):
                    found[int(path.name)] = command.replace(b"\0", b" ").decode(errors="replace")
        return found

    def until(self, happens: Callable[[], bool], what: str, within_s: float = _UP_S) -> None:
        """Wait for a condition; MeasurementFailed says what did not happen."""
        deadline_s = time.monotonic() + within_s
        while not happens():
            if time.monotonic() > deadline_s or any(one.poll() for one in self._children):
                raise MeasurementFailed(f"not so within {within_s:g} s: {what}\n{self._logs()}")
            time.sleep(_POLL_S)

    def matching(self, *words: str, parents: list[int] | None = None) -> list[int]:
        """Processes whose command has these words; with `parents`, only their children."""
        return [
            pid
            for pid, command in sorted(self.processes().items())
            if all(word in command for word in words)
            and (parents is None or parent_of(pid) in parents)
        ]

    def below_manager(self, part: str, managers: list[int]) -> list[int]:
        """The fork server, or the workers, of these GPU managers."""
        servers = self.matching("gpu_manager.worker", parents=managers)
        return servers if part == "fork server" else self.matching(parents=servers)

    def instances(self, function: str) -> list[int]:
        """The processes of a function's instances."""
        mark = f"/{function}-".encode()
        found = []
        for pid, command in sorted(self.processes().items()):
            if "gateway_ext/runtime" in command:
                with contextlib.suppress(OSError):
                    parts = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    if any(p.startswith(_TEMPLATE) for p in parts):
                        continue
                    if any(p.startswith(b"GPUFAAS_INSTANCE=") and mark in p for p in parts):
                        found.append(pid)
        return found

    def gateway_answers(self) -> bool:
        """Whether the gateway is ready."""
        try:
            return self._ask("GET", "/readyz", None, {})[0] == _OK
        except OSError:
            return False

    def command(self, *arguments: str) -> list[str]:
        """A command line of the product."""
        return [sys.executable, "-P", "-m", "gpufaas", *arguments]

    def launch(self, name: str, command: list[str]) -> "subprocess.Popen[bytes]":
        """Start one of the stack's processes."""
        with (self.folder / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                command,
                cwd=self.work,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._children.append(child)
        return child

    def _bearer(self) -> str:
        if not self._token:
            asked = self.command("token", "--secret-file", str(self.state / "secret"))
            done = subprocess.run(asked, env=self._environment, capture_output=True, check=True)
            self._token = done.stdout.decode().strip()
        return self._token

    def _system(
        self, method: str, path: str, content: Mapping[str, object] | None
    ) -> tuple[int, bytes]:
        secrets = self.state / "secrets"
        words = [
            (secrets / f"basic-auth-{one}").read_text().strip() for one in ("user", "password")
        ]
        basic = b64encode(":".join(words).encode()).decode()
        return self._ask(method, path, content, {"Authorization": f"Basic {basic}"})

    def _ask(
        self, method: str, path: str, content: object, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.url + path, body, dict(headers), method=method)
        try:
            with urllib.request.urlopen(request, timeout=_ASK_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def _logs(self) -> str:
        logs = [*self.folder.glob("*.log"), *self.state.glob("logs/*.log")]
        return "\n".join(
            f"== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            for log in logs
        )


class SupervisedStack(RunningStack):
    """`gpufaas up`, which starts again what ends."""

    emulated: tuple[str, ...] = _EMULATED
    _WORDS: Mapping[str, tuple[str, ...]] = {
        "gateway": ("-m gpufaas gateway",),
        "scheduler": ("-m gpufaas scheduler",),
        "GPU manager": ("-m gpufaas gpu-manager",),
        "etcd": ("--data-dir",),
    }

    def start(self) -> None:
        """See RunningStack."""
        listen = f'[scheduler]\nlisten = "127.0.0.1:{free_port()}"\n'
        (self.folder / "gpufaas.toml").write_text(f'[gateway]\nroots = ["{self.work}"]\n{listen}')
        options = ("--config", str(self.folder / "gpufaas.toml"), "--port", str(self.port))
        state = ("--state", str(self.state))
        self._up = self.launch(
            "up", self.command("up", *state, *options, *_DEVICES, *self.emulated)
        )
        record = self.state / "stack.json"
        self.until(
            lambda: record.exists() and json.loads(record.read_text())["scheduler"], "it is up"
        )
        self.scheduler_urls = (json.loads(record.read_text())["scheduler"],)

    def pids(self, part: str) -> list[int]:
        """See RunningStack."""
        if part in self._WORDS:
            return self.matching(*self._WORDS[part], parents=[self._up.pid])
        if part.startswith("instance of "):
            return self.instances(part.removeprefix("instance of "))
        return self.below_manager(part, self.pids("GPU manager"))

    def restore(self) -> None:
        """Nothing: `gpufaas up` does it."""


class PairedStack(RunningStack):
    """Two schedulers, one GPU manager, one gateway and an etcd; nothing restarts what ends."""

    def start(self) -> None:
        """See RunningStack."""
        self._etcd_port, ports = free_port(), (free_port(), free_port())
        self.scheduler_urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        self.launch("etcd", self._etcd_command())
        self._schedulers = {
            url: self.launch(f"scheduler-{url[-5:]}", self._scheduler_command(url))
            for url in self.scheduler_urls
        }
        self.until(lambda: bool(self.leader()), "a scheduler leads")
        both, secret = ",".join(self.scheduler_urls), str(self.state / "secret")
        node = f"unix:{self.state}/node/node.sock"
        (self.state / "node").mkdir()
        joined = ("--scheduler", both, "--secret-file", secret)
        manager = ("gpu-manager", "--listen", node, *joined, *_DEVICES, *_EMULATED)
        self.launch("gpu-manager", self.command(*manager))
        gateway = ("--listen", f"127.0.0.1:{self.port}", "--state-dir", str(self.state / "gateway"))
        secrets = ("--secrets-dir", str(self.state / "secrets"), "--node", node)
        self.launch("gateway", self.command("gateway", *gateway, *secrets, *joined))
        self.until(self.gateway_answers, "the gateway answers")
        self.until(lambda: bool(self.cluster()["gpus"]), "the GPUs have joined")

    def leader(self) -> str:
        """The URL of the scheduler that leads, and that the other one agrees to; else empty."""
        for url in self.scheduler_urls:
            with (
                contextlib.suppress(OSError, ValueError),
                urllib.request.urlopen(f"{url}/readyz", timeout=1) as answer,
            ):
                if json.loads(answer.read()).get("leading"):
                    return url
        return ""

    def pids(self, part: str) -> list[int]:
        """See RunningStack; the only part is the leading scheduler."""
        if part != "leading scheduler of two":
            return []
        url = self.leader()
        return [self._schedulers[url].pid] if url else []

    def restore(self) -> None:
        """Start a scheduler that was killed again, and wait until both answer."""
        for url, child in list(self._schedulers.items()):
            if child.poll() is not None:
                self._children.remove(child)
                command = self._scheduler_command(url)
                self._schedulers[url] = self.launch(f"scheduler-{url[-5:]}", command)
                self.until(lambda url=url: _answers(url), f"{url} answers")  # type: ignore[misc]  # mypy infers no lambda with a default
        self.until(lambda: bool(self.leader()), "a scheduler leads")

    def _scheduler_command(self, url: str) -> list[str]:
        etcd = ("--etcd", f"http://127.0.0.1:{self._etcd_port}")
        secret = ("--secret-file", str(self.state / "secret"))
        return self.command("scheduler", "--listen", url.partition("//")[2], *etcd, *secret)

    def _etcd_command(self) -> list[str]:
        url = f"http://127.0.0.1:{self._etcd_port}"
        peers = "http://127.0.0.1:0"
        return [
            etcd_program(),
            *("--data-dir", str(self.state / "etcd"), "--log-level", "warn"),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"default={peers}"),
        ]


@contextlib.contextmanager
def running(stack: RunningStack) -> Iterator[RunningStack]:
    """Run the stack as long as the context lasts."""
    try:
        stack.start()
        yield stack
    finally:
        stack.end()


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=1) as answer:
            return bool(answer.status == _OK)
    except OSError:
        return False


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
