"""Function images, a docker provider on a real Engine, and a gateway as a process of its own."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

import gateway_ext.runtime
import torch_shim
from gateway_ext.model import Deployment, Endpoint, FunctionId, LogLine
from gateway_ext.ports import Injection, LogQuery
from gateway_ext.providers.docker.provider import DockerBounds, DockerProvider
from gateway_ext.settings import GatewaySettings
from tests.kit.engines.docker_base_image import BASE
from tests.kit.engines.docker_engine import Engine
from tests.kit.places import ROOT
from tests.kit.processes.process_functions import Heard
from tests.kit.waiting import StillWaiting, eventually, wait_until

PATIENCE_S = 120.0
USER = "10001:10001"
HANDLER = """
import json, os, socket, sys, time
VERSION = {version!r}
def handle(event, context):
    if event.path == "/die":
        print("these are my last words", flush=True)
        os._exit(3)
    if event.path == "/take":
        take = bytearray(int(event.query["mib"]) << 20)
    if event.path == "/slow":
        time.sleep(float(event.query["s"]))
    if event.path == "/say":
        print(event.query["what"], flush=True)
        print(event.query["what"] + " wrong", file=sys.stderr, flush=True)
    if event.path == "/reach":
        with socket.socket() as s:
            s.settimeout(2)
            return str(s.connect_ex((event.query["host"], 8080)))
    if event.path == "/connect":
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(event.query["socket"])
            return s.recv(100)
    if event.path == "/write":
        try:
            open(event.query["file"], "w").write("x")
        except OSError as error:
            return str(error)
        return "written"
    if event.path == "/secret":
        return open("/var/openfaas/secrets/" + event.query["name"], "rb").read()
    if event.path == "/status":
        return open("/proc/self/status").read()
    if event.path == "/environment":
        return dict(os.environ)
    return {{"version": VERSION, "host": socket.gethostname(), "uid": os.getuid()}}
"""
_DOCKERFILE = f"""
FROM {BASE}
{{label}}
COPY runtime /home/app/runtime
COPY torch_shim /home/app/torch_shim
COPY function /home/app/function
ENV GPUFAAS_HANDLER=/home/app/function PYTHONUNBUFFERED=1
ENV PYTHONPATH=/home/app/torch_shim/activate
USER {USER}
CMD ["python", "/home/app/runtime"]
"""
_LABEL = 'LABEL com.gpufaas.template="python3-torch-gpu"'


class Images:
    """Small images of functions, built once each."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._folder = folder
        self._made: set[str] = set()

    def __call__(self, name: str, handler: str = "", *, ours: bool = True) -> str:
        """An image of this name, whose handler says it as its version."""
        if name not in self._made:
            self._make(name, handler or HANDLER.format(version=name), ours=ours)
            self._made.add(name)
        return name

    def _make(self, name: str, handler: str, *, ours: bool) -> None:
        context = self._folder / name.replace(":", "-")
        (context / "function").mkdir(parents=True)
        shutil.copytree(Path(gateway_ext.runtime.__file__).parent, context / "runtime")
        shutil.copytree(Path(torch_shim.__file__).parent, context / "torch_shim")
        (context / "function" / "handler.py").write_text(handler)
        (context / "Dockerfile").write_text(_DOCKERFILE.format(label=_LABEL if ours else ""))
        self._engine.docker("build", "--tag", name, context)


class World:
    """A provider with a state of its own."""

    def __init__(self, engine: Engine, state: Path, injection: Injection | None) -> None:
        self.engine = engine
        self.heard = Heard()
        self.injection = injection
        self.settings = GatewaySettings(state_dir=str(state), docker_url=engine.url)
        self.bounds = DockerBounds(drain_s=5.0, stop_s=5.0, first_pause_s=0.1, pull_answer_s=10.0)
        self.provider = DockerProvider(self.settings, injection, self.bounds)

    def new_provider(self, **settings: Any) -> DockerProvider:
        """Another gateway's function table, filled by the provider."""
        self.heard = Heard()
        chosen = replace(self.settings, **settings)
        self.provider = DockerProvider(chosen, self.injection, self.bounds)
        return self.provider

    async def deploy(self, image: str, name: str = "f", **how: Any) -> FunctionId:
        update = how.pop("update", False)
        deployment = Deployment(FunctionId("openfaas-fn", name), image, **how)
        await self.provider.deploy(deployment, update=update)
        return deployment.id

    async def ready(self, function: FunctionId, count: int = 1) -> list[Endpoint]:
        try:
            await eventually(lambda: len(self.heard.endpoints.get(function, ())) == count)
        except StillWaiting as error:
            status = await self.provider.function(function, usage=False)
            raise AssertionError(f"{status}\n{await self.log(function)}") from error
        return self.heard.endpoints[function]

    async def log(self, function: FunctionId, **query: Any) -> list[LogLine]:
        wanted = LogQuery(function)._replace(**query)
        return [line async for line in self.provider.logs(wanted)]

    async def trouble(self, function: FunctionId, text: str) -> str:
        """Wait until the status shows this text; returns all of the trouble."""
        found = ""

        async def is_shown() -> bool:
            nonlocal found
            found = (await self.provider.function(function, usage=False)).trouble
            return text in found

        await eventually(is_shown, f"the trouble {text!r}")
        return found

    async def removed(self, function: FunctionId) -> None:
        await self.provider.remove(function)
        await eventually(
            lambda: not self.engine.containers(f"label=com.gpufaas.function={function}")
        )


@asynccontextmanager
async def world(
    engine: Engine, folder: Path, injection: Injection | None = None
) -> AsyncIterator[World]:
    """Everything is removed at the end."""
    found = World(engine, folder / "state", injection)
    await found.provider.start(found.heard)
    try:
        yield found
    finally:
        for status in await found.provider.functions("openfaas-fn"):
            await found.provider.remove(status.deployment.id)
        await found.provider.close()


async def call(endpoint: Endpoint, path: str = "/") -> str:
    """The body of the answer; nothing where the function breaks off."""
    _, host, port = endpoint.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: f\r\nConnection: close\r\n\r\n".encode())
        return (await reader.read()).partition(b"\r\n\r\n")[2].decode()
    finally:
        writer.close()


class GatewayProcess:
    """`gpufaas gateway` with the docker provider; killed and started again as a test likes."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._folder = folder
        self._port = 18080  # free: tests run in the Engine's own network namespace
        self._process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=PATIENCE_S)

    def start(self) -> None:
        """Have it answer."""
        settings = {
            "provider": "docker",
            "listen": f"127.0.0.1:{self._port}",
            "docker_url": self._engine.url,
            "state_dir": str(self._folder / "state"),
            "auth": "false",
        }
        ours = {f"GPUFAAS_GATEWAY_{name.upper()}": value for name, value in settings.items()}
        with (self._folder / "gateway.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gpufaas", "gateway", "--scheduler", _NOBODY],
                env={
                    "PATH": os.defpath,
                    "HOME": str(self._folder),
                    "PYTHONPATH": str(ROOT),
                    **ours,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(lambda: self._is_up() or self.has_ended(), "the gateway answers")
        assert not self.has_ended(), self.log()

    def kill(self) -> None:
        """As a machine does that lacks memory."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """As people do."""
        self._end(signal.SIGTERM)

    def log(self) -> str:
        return (self._folder / "gateway.log").read_text()

    def deploy(self, service: str, image: str, method: str = "POST", **more: Any) -> None:
        answer = self.http.request(
            method, "/system/functions", json={"service": service, "image": image, **more}
        )
        assert answer.status_code == 202, answer.text

    def status(self, service: str, **query: Any) -> dict[str, Any]:
        answer = self.http.get(f"/system/function/{service}", params=query)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def available(self, service: str, count: int) -> None:
        def is_so() -> bool:
            return int(self.status(service).get("availableReplicas", 0)) == count

        wait_until(is_so, f"{count} replicas of {service}")

    def remove(self, service: str) -> None:
        self.http.request("DELETE", "/system/functions", json={"functionName": service})

    def has_ended(self) -> bool:
        assert self._process is not None
        return self._process.poll() is not None

    def _end(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(PATIENCE_S)

    def _is_up(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/healthz").status_code == 200
        return False


_NOBODY = "http://127.0.0.1:9"


@contextmanager
def gateway(engine: Engine, folder: Path) -> Iterator[GatewayProcess]:
    """One that runs; ended at the end, and its functions with it."""
    found = GatewayProcess(engine, folder)
    found.start()
    try:
        yield found
        for one in found.http.get("/system/functions").json():
            found.remove(one["name"])
        ours = "label=com.gpufaas.function"
        wait_until(lambda: not engine.containers(ours), "nothing is left")
    finally:
        found.http.close()
        if not found.has_ended():
            found.stop()
