"""A whole gateway on loopback, and somebody who asks it."""

import io
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from gateway_ext.gateway import Gateway
from gateway_ext.openfaas.basic_auth import BasicCredentials
from gateway_ext.openfaas.system_routes import LargestGpu
from gateway_ext.ports import Provider
from gateway_ext.settings import GatewaySettings
from scheduler.client.lease_client import LeaseClient
from scheduler.client.operator_client import OperatorClient
from tests.kit.fakes.memory_provider import MemoryProvider

USER, PASSWORD = "admin", "a password of the tests"
NOBODY = ""
_ADMIN = BasicCredentials(USER, PASSWORD).header


@dataclass(frozen=True, slots=True)
class Said:
    """One answer; its body is JSON's value where it says that it is JSON."""

    status: int
    body: Any
    headers: Mapping[str, str]


@dataclass(slots=True)
class World:
    """One gateway; `session` shows no credentials by itself."""

    gateway: Gateway
    session: aiohttp.ClientSession

    async def ask(self, method: str, path: str, body: object = None, **more: Any) -> Said:
        """One request of somebody who may; a body that is not bytes is sent as JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        data = None if body is None else io.BytesIO(raw)
        headers = {"Authorization": more.pop("who", _ADMIN), **more.pop("headers", {})}
        url = self.gateway.url + path
        async with self.session.request(
            method, url, data=data, headers=headers, allow_redirects=False, **more
        ) as answer:
            text = await answer.text()
            kind = answer.headers.get("content-type", "")
            found = json.loads(text) if kind == "application/json" else text
            return Said(answer.status, found, answer.headers)

    async def get(self, path: str, **more: Any) -> Said:
        return await self.ask("GET", path, **more)

    async def deploy(self, service: str, **more: Any) -> Said:
        return await self.ask(
            "POST", "/system/functions", {"service": service, "image": "i"} | more
        )


@asynccontextmanager
async def gateway_world(
    state_dir: Path,
    provider: Provider | None = None,
    *,
    leases: LeaseClient | None = None,
    pinning: OperatorClient | None = None,
    largest_gpu_bytes: LargestGpu = lambda: None,
    console: OperatorClient | None = None,
    every_s: float = 1.0,
    **more: Any,
) -> AsyncIterator[World]:
    """A gateway with this provider (else one in memory that starts nothing)."""
    secrets_dir = state_dir / "secrets"
    secrets_dir.mkdir(parents=True, exist_ok=True)
    (secrets_dir / "basic-auth-user").write_text(USER + "\n")
    (secrets_dir / "basic-auth-password").write_text(PASSWORD + "\n")
    usual: dict[str, Any] = {"listen": "127.0.0.1:0", "state_dir": str(state_dir), "drain_s": 1.0}
    settings = GatewaySettings(**usual | more)
    gateway = Gateway(
        *(settings, provider or MemoryProvider(), leases),
        pinning=pinning,
        largest_gpu_bytes=largest_gpu_bytes,
        console=console,
        every_s=every_s,
    )
    async with (
        gateway,
        aiohttp.ClientSession() as session,
    ):
        yield World(gateway, session)
