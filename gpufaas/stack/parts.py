"""The programs of a stack: how each is started, and when it is up."""

import asyncio
import http.client
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpufaas.etcd_access import USER
from gpufaas.settings import Everything
from gpufaas.stack.children import Part
from gpufaas.stack.folder import StackFolder

_OK = 200
_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a stack is made of, before any of it runs."""

    settings: Everything
    folder: StackFolder
    environment: Mapping[str, str]
    config: str | None
    node_name: str
    node_metrics: str
    scheduler_url: str
    gateway_url: str
    etcd_urls: tuple[str, ...]
    etcd_password: Path | None  # where it is, if the etcd is our own

    @property
    def node_address(self) -> str:
        """Where functions find the GPU manager."""
        return self.folder.node_address

    @property
    def gateway_credentials(self) -> Path:
        """Where the gateway's user and password are, as OpenFaaS keeps them."""
        named = self.settings.gateway.secrets_dir or self.environment.get("secret_mount_path")
        return Path(named) if named else self.folder.credentials

    def scheduler(self) -> Part:
        """Who decides."""
        options = [
            *("--listen", urlsplit(self.scheduler_url).netloc),
            *("--policy", self.settings.policy),
            *(("--etcd", ",".join(self.etcd_urls)) if self.etcd_urls else ()),
        ]
        if self.etcd_password is not None:
            options += ["--etcd-user", USER, "--etcd-password-file", str(self.etcd_password)]

        async def ready() -> bool:
            return bool((await _health(self.scheduler_url)).get("leading"))

        return self._part("scheduler", options, ready)

    def node(self) -> Part:
        """Who has GPUs."""
        node = self.settings.node
        options = [
            *("--scheduler", self.scheduler_url, "--node", self.node_name),
            *("--listen", self.node_address, "--devices", node.devices),
            *("--gpu-overlap", str(node.gpu_overlap)),
            *("--emulate-load", node.emulate_load, "--emulate-run", node.emulate_run),
            *(("--gpu-memory", node.gpu_memory) if node.gpu_memory else ()),
            *(("--store-memory", node.store_memory) if node.store_memory else ()),
            *(("--metrics", self.node_metrics) if self.node_metrics else ()),
            *("--log-format", self.settings.log_format),
        ]

        async def ready() -> bool:
            return int((await _health(self.scheduler_url)).get("gpus", 0)) > 0

        return self._part("gpu-manager", options, ready, configured=False)

    def gateway(self) -> Part:
        """Who speaks to people."""
        options = [
            *("--listen", self.settings.gateway.listen, "--scheduler", self.scheduler_url),
            *("--node", self.node_address, "--state-dir", str(self.folder.gateway)),
            *("--secrets-dir", str(self.gateway_credentials)),
        ]

        async def ready() -> bool:
            return (await _get(self.gateway_url, "/readyz"))[0] == _OK

        stop_s = self.settings.gateway.drain_s + 10.0
        return self._part("gateway", options, ready, stop_s=stop_s)

    def _part(
        self,
        name: str,
        options: list[str],
        ready: Callable[[], Awaitable[bool]],
        *,
        configured: bool = True,
        stop_s: float = 10.0,
    ) -> Part:
        config = ["--config", self.config] if configured and self.config else []
        secret = ["--secret-file", str(self.folder.secret_file)]
        command = (sys.executable, "-P", "-m", "gpufaas.cli", name, *config, *options, *secret)
        environment = {**self.environment, "PYTHONUNBUFFERED": "1"}
        return Part(name, command, self.folder.log(name), ready, environment, stop_s)


async def _health(url: str) -> Mapping[str, Any]:
    """What `/readyz` of a scheduler says; nothing where it does not answer."""
    _, body = await _get(url, "/readyz")
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


async def _get(url: str, path: str) -> tuple[int, bytes]:
    """Status and body; (0, nothing) where there is no answer."""

    def ask() -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    return await asyncio.to_thread(ask)
