"""The programs of a stack: their command lines, and the checks that they are up."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpufaas.options.configuration import AT_START, AllSettings
from gpufaas.options.gpu_node import as_flags
from gpufaas.remote.http_request import NoAnswer, http_url, open_response
from gpufaas.stack.etcd_login import USER
from gpufaas.stack.supervisor import Part
from gpufaas.stack_folder import StackFolder

_OK = 200
_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class StackPlan:
    """A stack's addresses, files and settings, before any part runs."""

    settings: AllSettings
    folder: StackFolder
    environment: Mapping[str, str]
    config: str | None
    node_name: str
    node_metrics: str
    scheduler_url: str
    gateway_url: str
    etcd_urls: tuple[str, ...]
    etcd_password: Path | None  # the file of the password, if the etcd is our own

    @property
    def gateway_credentials(self) -> Path:
        """The folder of the gateway's user and password, in files named as OpenFaaS's."""
        named = self.settings.gateway.secrets_dir or self.environment.get("secret_mount_path")
        return Path(named) if named else self.folder.credentials

    def scheduler(self) -> Part:
        options = [
            *("--listen", urlsplit(self.scheduler_url).netloc),
            *("--policy", self.settings.policy),
            *("--exit-rule", self.settings.exit_rule),
            *(("--etcd", ",".join(self.etcd_urls)) if self.etcd_urls else ()),
        ]
        if self.etcd_password is not None:
            options += ["--etcd-user", USER, "--etcd-password-file", str(self.etcd_password)]

        async def ready() -> bool:
            return bool((await _health(self.scheduler_url)).get("leading"))

        return self._part("scheduler", options, ready, alive_at=self.scheduler_url)

    def node(self) -> Part:
        node = replace(self.settings.node, metrics=self.node_metrics)
        options = [
            *("--scheduler", self.scheduler_url, "--node", self.node_name),
            *("--listen", self.folder.node_address, "--log-format", self.settings.log_format),
            *as_flags(node),
        ]

        async def ready() -> bool:
            return int((await _health(self.scheduler_url)).get("gpus", 0)) > 0

        url = f"http://{self.node_metrics}" if self.node_metrics else ""
        part = self._part("gpu-manager", options, ready, configured=False, alive_at=url)
        # Functions that are there already are not announced again, and would wait for workers.
        return replace(part, command_again=(*part.command, "--prepare", AT_START))

    def gateway(self) -> Part:
        options = [
            *("--listen", self.settings.gateway.listen, "--scheduler", self.scheduler_url),
            *("--node", self.folder.node_address, "--state-dir", str(self.folder.gateway)),
            *("--secrets-dir", str(self.gateway_credentials)),
        ]

        async def ready() -> bool:
            return (await _get(self.gateway_url, "/readyz"))[0] == _OK

        stop_s = self.settings.gateway.drain_s + 10.0
        return self._part("gateway", options, ready, stop_s=stop_s, alive_at=self.gateway_url)

    def _part(
        self,
        name: str,
        options: list[str],
        ready: Callable[[], Awaitable[bool]],
        *,
        configured: bool = True,
        stop_s: float = 10.0,
        alive_at: str,
    ) -> Part:
        config = ["--config", self.config] if configured and self.config else []
        secret = ["--secret-file", str(self.folder.secret_file)]
        command = (sys.executable, "-P", "-m", "gpufaas", name, *config, *options, *secret)
        environment = {**self.environment, "PYTHONUNBUFFERED": "1"}
        return Part(
            *(name, command, self.folder.log(name), ready, environment, stop_s),
            answers=partial(_is_alive, alive_at) if alive_at else None,
        )


async def _is_alive(url: str) -> bool:
    """Whether the part at this URL answers at all, ready or not."""
    return (await _get(url, "/healthz"))[0] != 0


async def _health(url: str) -> Mapping[str, Any]:
    """The answer to `/readyz` of a scheduler; empty if there is none."""
    _, body = await _get(url, "/readyz")
    try:
        health = json.loads(body)
    except ValueError:
        return {}
    return health if isinstance(health, dict) else {}


async def _get(url: str, path: str) -> tuple[int, bytes]:
    """Status and body; (0, empty) if there is no answer."""

    def request() -> tuple[int, bytes]:
        server = http_url(url, "part")
        try:
            with open_response(server, "part", "GET", path, timeout_s=_TIMEOUT_S) as response:
                return response.status, response.read()
        except NoAnswer:
            return 0, b""

    return await asyncio.to_thread(request)
