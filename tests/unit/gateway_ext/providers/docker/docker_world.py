"""A docker provider on an Engine that misbehaves, and a listener that remembers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from common.gpu_wishes import GpuWishes
from gateway_ext.model import Deployment, FunctionId
from gateway_ext.ports import Injection, LogQuery
from gateway_ext.providers.docker.provider import DockerBounds, DockerProvider
from gateway_ext.settings import GatewaySettings
from tests.kit.fakes.fake_engine import FakeEngine, fake_engine
from tests.kit.processes.process_functions import Heard
from tests.kit.waiting import eventually

F = FunctionId("openfaas-fn", "f")


class World:
    def __init__(self, engine: FakeEngine, folder: Path, port: int) -> None:
        self.engine = engine
        self.folder = folder
        self._port = port
        self.heard = Heard()
        self.provider = self.another()

    def another(self, injection: Injection | None = None, **settings: Any) -> DockerProvider:
        usual: dict[str, Any] = {
            "port": self._port,
            "drain_s": 1.0,
            "stop_s": 1.0,
            "first_pause_s": 0.05,
        }
        chosen = {name: settings.pop(name) for name in list(settings) if name.startswith("docker_")}
        gateway = GatewaySettings(
            state_dir=str(self.folder / "state"), docker_url=self.engine.url, **chosen
        )
        bounds = DockerBounds(**usual | settings)
        self.heard = Heard()
        self.provider = DockerProvider(gateway, injection, bounds)
        return self.provider

    async def deploy(self, image: str = "f:1", **how: Any) -> None:
        update = how.pop("update", False)
        await self.provider.deploy(Deployment(F, image, **how), update=update)

    async def ready(self, count: int = 1) -> list[str]:
        await eventually(lambda: len(self.heard.endpoints.get(F, ())) == count)
        return [one.instance for one in self.heard.endpoints[F]]

    async def replaced(self, instance: str) -> None:
        """Wait until another instance than this one is ready."""
        await eventually(
            lambda: any(one.instance != instance for one in self.heard.endpoints[F]),
            "a new instance",
        )

    async def trouble(self, text: str) -> None:
        async def is_shown() -> bool:
            return text in (await self.provider.function(F, usage=False)).trouble

        await eventually(is_shown, f"the trouble {text!r}")

    async def log_texts(self) -> list[str]:
        return [one.text async for one in self.provider.logs(LogQuery(F))]

    async def output_read(self, times: int) -> None:
        """Wait until the Engine was asked for output so many times more."""
        wanted = self._output_requests() + times
        await eventually(lambda: self._output_requests() >= wanted, "more requests for output")

    def _output_requests(self) -> int:
        return sum(one.endswith("/logs") for one in self.engine.asked)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    writer.close()


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    """Every container of the Engine answers at one port, ready."""
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    async with fake_engine(folder) as engine:
        found = World(engine, folder, server.sockets[0].getsockname()[1])
        await found.provider.start(found.heard)
        try:
            yield found
        finally:
            await found.provider.close()
            server.close()
            await server.wait_closed()


class Told:
    """The environment that GPU functions get for their manager."""

    def __init__(self, address: str, gpu: str = "T4") -> None:
        self._environment = {"GPUFAAS_ADDRESS": address, "GPUFAAS_GPU_NAME": gpu}

    def environment(self, function: FunctionId, _wishes: GpuWishes) -> Mapping[str, str]:
        del function
        return self._environment
