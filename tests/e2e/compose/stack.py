"""What docker-compose.yml brings up, on an Engine of the test's own, and how people use it."""

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.kit import needs
from tests.kit.engines.docker_engine import Engine, EngineFailed
from tests.kit.places import ROOT
from tests.kit.waiting import wait_until

PATIENCE_S = 120.0
FUNCTION_BASE = "gpufaas-test/function:latest"

SERVICES = ("etcd", "nats", "scheduler-1", "scheduler-2", "cpu-manager", "gateway")

_BUILD_S = 900.0
_PATH = f"{os.defpath}:/usr/sbin:/sbin"


class ComposeStack:
    """The project `gpufaas` with the profile that emulates GPUs."""

    def __init__(self, engine: Engine, folder: Path, images: Mapping[str, str]) -> None:
        self.engine = engine
        self.folder = folder
        self._compose = str(needs.command("docker-compose", "docker-compose"))
        self.secrets = folder / "secrets"
        self.run("sh", str(ROOT / "deploy/compose/secrets.sh"))
        (folder / ".env").write_text(_lines({**self._settings(), **images}))

    @property
    def url(self) -> str:
        return f"http://{self.engine.address}:8080"

    @property
    def password(self) -> str:
        return (self.secrets / "basic-auth-password").read_text().strip()

    def compose(self, *words: str, timeout_s: float = PATIENCE_S) -> str:
        """What docker-compose prints for this; EngineFailed with what it said where it fails."""
        files = ("--project-directory", str(ROOT), "--file", str(ROOT / "docker-compose.yml"))
        chosen = ("--env-file", str(self.folder / ".env"))
        return self.run(self._compose, *files, *chosen, *words, timeout_s=timeout_s)

    def up(self) -> None:
        """Build what is ours, and have all of it healthy."""
        self.compose("build", "gateway", "cpu-manager", timeout_s=_BUILD_S)
        self.compose("up", "--detach", "--no-build", timeout_s=2 * PATIENCE_S)
        self.all_healthy()

    def all_healthy(self) -> None:
        """Wait for every service."""
        for service in SERVICES:
            self.healthy(service)

    def container(self, service: str) -> dict[str, Any]:
        """All that the Engine says about it."""
        return dict(self.engine.inspect(self._name(service)))

    def healthy(self, service: str) -> None:
        """Wait for it."""

        def is_so() -> bool:
            state = self.container(service)["State"]
            return bool(state["Running"]) and state["Health"]["Status"] == "healthy"

        wait_until(is_so, f"{service} is healthy", instead=lambda: self.said(service))

    def kill(self, service: str) -> str:
        """End its process from outside, as the kernel does; the container that it was of."""
        found = self.container(service)
        os.kill(found["State"]["Pid"], signal.SIGKILL)
        return str(found["State"]["StartedAt"])

    def again(self, service: str, before: str) -> None:
        """Wait until the Engine has restarted it, and it is healthy."""
        wait_until(
            lambda: self.container(service)["State"]["StartedAt"] != before,
            f"{service} is started again",
        )
        self.healthy(service)

    def address(self, service: str, network: str) -> str:
        """Where it is on one of its networks."""
        return str(self.container(service)["NetworkSettings"]["Networks"][network]["IPAddress"])

    def said(self, service: str) -> str:
        return self.compose("logs", "--tail", "40", service)

    def faas(self, program: Path, *words: str, stdin: str = "") -> str:
        """What the real faas-cli prints."""
        return self.run(str(program), *words, stdin=stdin, timeout_s=_BUILD_S)

    def ask(self, method: str, path: str, said: object = None) -> httpx.Response:
        """One of the routes below /system."""
        with httpx.Client(
            base_url=self.url, timeout=PATIENCE_S, auth=("admin", self.password)
        ) as http:
            return http.request(method, path, json=said)

    def call(self, name: str, body: bytes | str = b"", **how: Any) -> httpx.Response:
        with httpx.Client(base_url=self.url, timeout=PATIENCE_S) as http:
            return http.post(f"/function/{name}", content=body, **how)

    def answers(self, name: str, body: bytes | str = b"") -> bool:
        """Whether a call of it succeeds now."""
        try:
            return self.call(name, body).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def replicas(self, name: str) -> int:
        """How many of it are ready."""
        answer = self.ask("GET", f"/system/function/{name}")
        return int(answer.json()["availableReplicas"]) if answer.is_success else -1

    def command(self, *words: str) -> str:
        """What one of our commands prints, in a container of the control plane."""
        return self.engine.docker("exec", self._name("gateway"), "gpufaas", *words)

    def _name(self, service: str) -> str:
        """The one container of a service."""
        labels = (
            f"label=com.docker.compose.{kind}" for kind in ("project=gpufaas", f"service={service}")
        )
        (name,) = self.engine.containers(*labels)
        return name

    def _settings(self) -> dict[str, str]:
        conf = (ROOT / "deploy/compose/nats.conf").read_text()
        mine = self.folder / "nats.conf"  # Debian's server is older than this setting
        mine.write_text(conf.replace("  sync_interval: always\n", ""))
        return {
            "COMPOSE_PROJECT_NAME": "gpufaas",
            "COMPOSE_PROFILES": "cpu",
            "DOCKER_SOCKET": str(self.engine.socket),
            "GATEWAY_BIND": "0.0.0.0",
            "IMAGES": "gpufaas-test",
            "NATS_CONF": str(mine),
            "SECRETS": str(self.secrets),
            "TAG": "e2e",
            "WATCH_BIND": "0.0.0.0",
        }

    def run(self, *command: str, stdin: str = "", timeout_s: float = PATIENCE_S) -> str:
        environment = {"PATH": _PATH, "HOME": str(self.folder), **self.engine.environment}
        environment |= {"COMPOSE_DOCKER_CLI_BUILD": "1", "DOCKER_BUILDKIT": "1"}
        environment |= {"GPUFAAS_SECRETS": str(self.secrets), "OPENFAAS_CONFIG": str(self.folder)}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            raise EngineFailed(f"{' '.join(command)}: {done.stdout[-4000:]}{done.stderr[-4000:]}")
        return done.stdout


def _lines(settings: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in settings.items())
