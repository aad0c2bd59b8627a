"""A whole stack as `gpufaas up` runs it, in a process group and folder of its own."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.load.statistics import CacheCounts
from gpufaas.remote.scheduler_api import SchedulerApi, in_path
from gpufaas.stack.held_ports import HeldPort
from gpufaas.stack_folder import StackFolder
from scheduler.service.access import ApiRole, token

_UP_S, _DOWN_S, _READY_S = 90.0, 60.0, 300.0
# What ran under a lease that the gateway keeps is reported a moment later.
_REPORTED_S = 0.15
_ASK_S = 0.1
_CALL_S, _REST_S = 120.0, 10.0
_OK, _CREATED, _ACCEPTED = 200, 201, 202
_JSON = {"Content-Type": "application/json"}
_NO_VARIABLES: Mapping[str, str] = {}


class StackNotReady(Exception):
    """The stack or a function in it did not start, or a call failed."""


class CallFailed(StackNotReady):
    """A function's call was not answered 200."""

    def __init__(self, name: str, status: int, text: str) -> None:
        super().__init__(f"{name} answers {status}: {text}")
        self.status = status


@dataclass(frozen=True, slots=True)
class WholeStack:
    """A running stack."""

    folder: StackFolder
    pid: int
    url: str
    scheduler: SchedulerApi

    def add_namespace(self, name: str) -> None:
        """Make a namespace for functions."""
        status, body = self.system("POST", "/system/namespace/", {"name": name})
        if status != _CREATED:
            raise StackNotReady(f"namespace {name}: {status} {body.decode(errors='replace')}")

    def deploy(self, deployment: Mapping[str, object]) -> None:
        """Deploy a function; `ready` waits for its instance."""
        status, body = self.system("POST", "/system/functions", deployment)
        if status != _ACCEPTED:
            raise StackNotReady(
                f"{deployment['service']}: {status} {body.decode(errors='replace')}"
            )

    def ready(self, name: str) -> None:
        """Wait until a function has an instance; its name may end with .NAMESPACE."""
        short, _, namespace = name.partition(".")
        patience_s = time.monotonic() + _READY_S
        while True:
            _, body = self.system("GET", f"/system/function/{short}?namespace={namespace}")
            found = json.loads(body)
            if found.get("availableReplicas"):
                return
            if time.monotonic() > patience_s:
                raise StackNotReady(f"{name}: {found.get('annotations')}")
            time.sleep(_ASK_S)

    def call(self, name: str, body: bytes) -> bytes:
        """Call a function, or CallFailed."""
        status, answer = _asked(f"{self.url}/function/{name}", "POST", body, _JSON)
        if status != _OK:
            raise CallFailed(name, status, answer.decode(errors="replace"))
        return answer

    def cache(self) -> CacheCounts:
        """The hits, misses and evictions that the scheduler has counted so far."""
        time.sleep(_REPORTED_S)
        cluster = self.cluster()
        return CacheCounts(cluster["hits"], cluster["misses"], cluster["evictions"])

    def cluster(self) -> dict[str, Any]:
        """The cluster, as the scheduler shows it."""
        found: dict[str, Any] = self.scheduler.get("/cluster")
        return found

    def evict_all(self) -> None:
        """Wait until every lease has been given back, and have all models leave the GPUs."""
        self._rest()
        for gpu in self.cluster()["gpus"]:
            for resident in gpu["residents"]:
                path = f"/models/{in_path(resident['model'])}/evict"
                self.administrator.post(path, gpu=gpu["id"])
        left = [gpu["residents"] for gpu in self.cluster()["gpus"] if gpu["residents"]]
        if left:
            raise StackNotReady(f"not evicted: {json.dumps(left)}")

    def set_policy(self, policy: str) -> None:
        """Have the scheduler use this policy from now on."""
        self.administrator.put("/policy", {"policy": policy, "parameters": {}})

    @property
    def administrator(self) -> SchedulerApi:
        """The scheduler, with the right to change things."""
        bearer = token(self.folder.secret_file.read_bytes(), ApiRole.ADMIN)
        state = self.folder.running()
        if state is None:
            raise StackNotReady("the stack has ended")
        return SchedulerApi((state.scheduler,), bearer)

    def system(
        self, method: str, path: str, content: Mapping[str, object] | None = None
    ) -> tuple[int, bytes]:
        """The status and the body of the answer to a request below /system."""
        user, password = (
            (self.folder.credentials / f"basic-auth-{name}").read_text(encoding="utf-8").strip()
            for name in ("user", "password")
        )
        basic = b64encode(f"{user}:{password}".encode()).decode()
        body = None if content is None else json.dumps(content).encode()
        return _asked(self.url + path, method, body, {"Authorization": f"Basic {basic}"})

    def _rest(self) -> None:
        """Leases are given back after the answer."""
        patience_s = time.monotonic() + _REST_S
        while any(slot["leases"] for gpu in self.cluster()["gpus"] for slot in gpu["slots"]):
            if time.monotonic() > patience_s:
                raise StackNotReady(f"leases are held for {_REST_S:g} s after the last answer")
            time.sleep(_ASK_S)


@contextmanager
def whole_stack(
    root: Path, options: Sequence[str] = (), variables: Mapping[str, str] = _NO_VARIABLES
) -> Iterator[WholeStack]:
    """Run a stack on a free port for as long as the context lasts; root/build has its builds.

    `variables` are added to its environment.
    """
    folder = StackFolder(root / "state")
    folder.root.mkdir()
    log = root / "up.log"
    added = [f"{name}={value}" for name, value in variables.items()]
    command = ["env", *added, sys.executable, "-m", "gpufaas", "up"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(*command, "--state", str(folder.root)),
                *("--listen", f"127.0.0.1:{HeldPort().keep()}", *options),
            ],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield _come_up(process, folder, log)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_DOWN_S)


def _come_up(process: "subprocess.Popen[bytes]", folder: StackFolder, log: Path) -> WholeStack:
    patience_s = time.monotonic() + _UP_S
    while (running := folder.running()) is None:
        if process.poll() is not None or time.monotonic() > patience_s:
            raise StackNotReady(f"gpufaas up: {log.read_text(encoding='utf-8', errors='replace')}")
        time.sleep(_ASK_S)
    bearer = token(folder.secret_file.read_bytes(), ApiRole.CALLER)
    return WholeStack(
        folder, process.pid, running.gateway, SchedulerApi((running.scheduler,), bearer)
    )


def _asked(
    url: str, method: str, body: bytes | None, headers: Mapping[str, str]
) -> tuple[int, bytes]:
    request = urllib.request.Request(url, body, dict(headers), method=method)
    try:
        with urllib.request.urlopen(request, timeout=_CALL_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
