"""A process provider with real processes, a listener that remembers, and handlers as text."""

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway_ext.model import (
    NO_TROUBLES,
    Deployment,
    Endpoint,
    FunctionId,
    LogLine,
    Troubles,
)
from gateway_ext.openfaas import function_options
from gateway_ext.ports import Injection, LogQuery
from gateway_ext.providers.process.provider import ProcessProvider
from gateway_ext.providers.process.settings import ProcessBounds
from gateway_ext.settings import GatewaySettings
from tests.kit.waiting import StillWaiting, eventually

PATIENCE_S = 30.0
FIRST_UID = 40_000  # not the range of a gateway that is installed on this machine
WHO = """
import json, os, subprocess, sys, time
def handle(event, context):
    if event.path == "/die":
        os._exit(3)
    if event.path == "/child":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if event.path == "/take":
        take = bytearray(int(event.query["mib"]) << 20)
        time.sleep(20)
    environment = {k: v for k, v in os.environ.items()}
    return {"pid": os.getpid(), "uid": os.getuid(), "environment": environment, "cwd": os.getcwd(),
            "path": sys.path}
"""
HELLO = "def handle(event, context):\n    return 'hello'\n"


class Heard:
    """A listener: what is deployed where, and every call that it waits for."""

    def __init__(self) -> None:
        self.deployments: dict[FunctionId, Deployment] = {}
        self.endpoints: dict[FunctionId, list[Endpoint]] = {}
        self.troubles: dict[FunctionId, Troubles] = {}
        self.gone: list[FunctionId] = []
        self.drained_names: list[str] = []
        self.drain: asyncio.Event | None = None
        self.least: dict[FunctionId, int] = {}  # endpoints, since there were some

    def function_is(
        self,
        deployment: Deployment,
        endpoints: Sequence[Endpoint],
        *,
        wanted: int,
        troubles: Troubles = NO_TROUBLES,
    ) -> None:
        del wanted
        function_options.of(deployment)  # BadDeployment, as of the gateway's table
        self.troubles[deployment.id] = troubles
        self.deployments[deployment.id] = deployment
        self.endpoints[deployment.id] = list(endpoints)
        if deployment.id in self.least or endpoints:
            least = self.least.get(deployment.id, len(endpoints))
            self.least[deployment.id] = min(least, len(endpoints))

    def function_gone(self, function: FunctionId) -> None:
        self.gone.append(function)
        self.endpoints.pop(function, None)

    async def drained(self, instances: Iterable[str], within_s: float) -> bool:
        self.drained_names += instances
        if self.drain is None:
            return True
        try:
            await asyncio.wait_for(self.drain.wait(), within_s)
        except TimeoutError:
            return False
        return True


class World:
    """A provider on folders of its own."""

    def __init__(self, folder: Path, injection: Injection | None = None, **bounds: float) -> None:
        self.folder = folder
        self.builds = folder / "build"
        self.state = folder / "state" / "functions"
        self.heard = Heard()
        self.settings = GatewaySettings(
            state_dir=str(folder / "state"),
            builds_dir=str(self.builds),
            roots=(str(folder / "root"),),
            template_bytes=int(bounds.pop("template_bytes", 4 << 30)),
        )
        self.bounds = replace(
            ProcessBounds(first_uid=FIRST_UID),
            **{"stop_s": 3.0, "drain_s": 5.0, "first_pause_s": 0.1, **bounds},  # type: ignore[arg-type]  # numbers all
        )
        self.injection = injection
        self.provider = self.new_provider()

    def new_provider(self) -> ProcessProvider:
        return ProcessProvider(self.settings, self.bounds, self.injection)

    def build(self, name: str, handler: str = HELLO, requirements: str = "") -> Path:
        folder = self.builds / name / "function"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "handler.py").write_text(handler)
        (folder / "requirements.txt").write_text(requirements)
        return folder

    async def deploy(self, name: str = "f", *, update: bool = False, **how: object) -> FunctionId:
        deployment = replace(
            Deployment(FunctionId("openfaas-fn", name), f"reg/{name}:latest"),
            **how,  # type: ignore[arg-type]  # a test's own fields
        )
        await self.provider.deploy(deployment, update=update)
        return deployment.id

    async def ready(self, function: FunctionId, count: int = 1) -> list[Endpoint]:
        def is_so() -> bool:
            return len(self.heard.endpoints.get(function, ())) == count

        try:
            await eventually(is_so, "ready instances")
        except StillWaiting as error:
            status = await self.provider.function(function, usage=False)
            lines = "\n".join(line.text for line in await self.log(function))
            raise AssertionError(f"{status}\n{lines}") from error
        return self.heard.endpoints[function]

    async def log(self, function: FunctionId, **query: object) -> list[LogLine]:
        wanted = replace_query(LogQuery(function), query)
        return [line async for line in self.provider.logs(wanted)]

    def left(self) -> list[str]:
        """What is still in the folder of functions, sockets and environments."""
        kinds = ("functions", "run", "envs")
        return sorted(str(p) for kind in kinds for p in (self.state / kind).iterdir())


def replace_query(query: LogQuery, changes: Mapping[str, object]) -> LogQuery:
    return query._replace(**changes)  # type: ignore[arg-type]  # a test's own fields


@contextlib.asynccontextmanager
async def world(injection: Injection | None = None, **bounds: float) -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory(prefix="w") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "root").mkdir()
        (folder / "build").mkdir()
        found = World(folder, injection, **bounds)
        await found.provider.start(found.heard)
        try:
            yield found
        finally:
            await found.provider.close()


async def call(endpoint: Endpoint, path: str = "/") -> bytes:
    """The body of the answer."""
    kind, _, socket_path = endpoint.address.partition(":")
    assert kind == "unix"
    reader, writer = await asyncio.open_unix_connection(socket_path)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: f\r\nConnection: close\r\n\r\n".encode())
        return (await reader.read()).partition(b"\r\n\r\n")[2]
    finally:
        writer.close()


def marked(instance: str, state: Path | None = None) -> list[int]:
    """Processes of an instance, the first one first.

    `instance` may be the beginning of several names; `state`, a state folder of a provider, leaves
    out processes of other providers on this machine.
    """
    found = []
    folder = b"" if state is None else os.fsencode(state)
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with contextlib.suppress(OSError):
                environment = (path / "environ").read_bytes()
                wanted = (b"GPUFAAS_INSTANCE=", f"/{instance}".encode(), folder)
                if all(one in environment for one in wanted):
                    found.append(int(path.name))
    return sorted(found)


async def lines_with(there: World, function: FunctionId, text: str) -> bool:
    """Whether a line of the function's log has this text in it."""
    return any(text in line.text for line in await there.log(function))


async def template_text(there: World, function: FunctionId) -> str:
    """The state of the function's template."""
    return (await there.provider.function(function, usage=False)).template


async def told(endpoint: Endpoint) -> dict[str, Any]:
    """The JSON object that the function answers with."""
    found: dict[str, Any] = json.loads(await call(endpoint))
    return found


def store_otherwise(state: Path, function: FunctionId, accepted: str, now: str) -> None:
    """Change a stored deployment, as if an earlier gateway had accepted what none does now."""
    (record,) = state.glob(f"functions/{function}.*/record.json")
    text = record.read_text()
    assert accepted in text
    record.write_text(text.replace(accepted, now))


async def trouble(provider: ProcessProvider, function: FunctionId, text: str) -> None:
    """Wait until the status of the function shows this text."""

    async def is_shown() -> bool:
        return text in (await provider.function(function, usage=False)).trouble

    await eventually(is_shown, f"the trouble {text!r}")
