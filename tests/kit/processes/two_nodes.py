"""A scheduler and several GPU managers in processes of their own, and functions under the shim."""

import json
import os
import urllib.request
from pathlib import Path
from typing import Any, Self

from gpu_manager.credentials import FunctionCredentials, FunctionIdentity, load_secret
from gpufaas.stack.held_ports import HeldPort
from scheduler.service.access import ApiRole, token
from tests.kit.nodes.worker_client import FunctionClient
from tests.kit.processes.daemons import GPUFAAS, START_S, Daemon
from tests.kit.programs.torch_forks import ForkedProgram


class Program:
    """A function under the shim, which says a line for every line that it hears."""

    def __init__(self, source: str, environment: dict[str, str]) -> None:
        self._program = ForkedProgram(source, environment)

    def hear(self) -> str:
        """The next line; empty where it has ended."""
        return self._program.stdout.readline().strip()

    def say(self, line: str = "") -> None:
        self._program.stdin.write(line + "\n")
        self._program.stdin.flush()

    def ask(self, line: str = "") -> str:
        """Say a line and hear one."""
        self.say(line)
        return self.hear()

    def kill(self) -> None:
        self._program.process.kill()
        self._program.close()


class TwoNodes:
    """Whatever of a cluster a test starts; leaving the context ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = folder / "secret"
        self.url = f"http://127.0.0.1:{HeldPort().keep()}"
        self._running: list[Daemon | Program] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for running in reversed(self._running):
            running.kill()

    def scheduler(self, *options: str) -> Daemon:
        command = ["scheduler", "--listen", self.url.removeprefix("http://"), *options]
        return self._started("scheduler", "answers at", *command)

    def node(self, name: str, address: str, *options: str, memory: str = "400MiB") -> Daemon:
        """A GPU manager that listens at this address."""
        command = ["gpu-manager", "--node", name, "--devices", "cpu:1", "--gpu-memory", memory]
        command += ["--listen", address, "--scheduler", self.url, *options]
        return self._started(name, "is attached", *command)

    def credential(self, function: str, tenant: str = "team") -> str:
        identity = FunctionIdentity(tenant, function)
        return FunctionCredentials(load_secret(self.secret)).issue(identity)

    def program(
        self, source: str, address: str, name: str = "program", tenant: str = "team"
    ) -> Program:
        """A function whose own node's manager is at this address."""
        environment = {
            "PATH": os.defpath,
            "GPUFAAS_ENABLED": "1",
            "GPUFAAS_ADDRESS": address,
            "GPUFAAS_CREDENTIAL": self.credential(name, tenant),
            "GPUFAAS_TRACING": "wait",
        }
        found = Program(source, environment)
        self._running.append(found)
        return found

    def function(self, address: str) -> FunctionClient:
        """A function that talks to this manager and says exactly what a test wants."""
        return FunctionClient(address, self.credential("function"))

    def gpus(self) -> dict[str, dict[str, Any]]:
        """The GPUs as the scheduler shows them, by node."""
        found = self.get("/cluster")["gpus"]
        return {gpu["node"]: gpu for gpu in found}

    def get(self, path: str, method: str = "GET") -> Any:
        bearer = {"authorization": f"Bearer {token(load_secret(self.secret), ApiRole.ADMIN)}"}
        request = urllib.request.Request(f"{self.url}{path}", headers=bearer, method=method)
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return json.load(answer)

    def _started(self, name: str, ready: str, *command: str) -> Daemon:
        words = [*GPUFAAS, *command, "--secret-file", str(self.secret)]
        found = Daemon(words, self.folder / f"{name}.log", ready)
        self._running.append(found)
        found.start()
        found.answers()
        return found
