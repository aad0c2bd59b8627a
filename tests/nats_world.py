"""A nats-server for tests, which can be killed and started again, and a queue on it."""

import asyncio
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import nats

from gateway_ext.jobs.jetstream.queue import JetStreamQueue, jetstream_queue
from gateway_ext.jobs.jetstream.settings import JetStreamSettings
from gateway_ext.jobs.tally import QueueLimits
from tests import needs
from tests.job_world import LOG
from tests.scheduler_process import free_port


@dataclass
class NatsServer:
    """One server process on a port of its own, with its streams in a folder."""

    folder: Path
    options: tuple[str, ...] = ()
    port: int = 0
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        program = needs.command("nats-server", "nats-server")
        self.port = self.port or free_port()
        self.folder.mkdir(parents=True, exist_ok=True)
        said = ("-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self.folder))
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([program, *said, *self.options], stderr=log)
        self._until_it_answers()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()

    def _until_it_answers(self) -> None:
        deadline_s = time.monotonic() + 20
        while time.monotonic() < deadline_s:
            assert self.process is not None
            if self.process.poll() is not None:
                break
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                    return
            except OSError:
                time.sleep(0.01)
        raise AssertionError((self.folder / "log").read_text())


@contextmanager
def nats_server(folder: Path, *options: str) -> Iterator[NatsServer]:
    server = NatsServer(folder, options)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextmanager
def nats_cluster(folder: Path, size: int = 3) -> Iterator[list[NatsServer]]:
    """Servers that keep every stream together."""
    folder.mkdir()
    ports = [free_port() for _ in range(size)]
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    servers = []
    for at, port in enumerate(ports):
        config = folder / f"{at}.conf"
        listen = f'name: tests, listen: "127.0.0.1:{port}"'
        config.write_text(f"server_name: n{at}\ncluster {{ {listen}, routes: [{routes}] }}\n")
        servers.append(NatsServer(folder / str(at), ("-c", str(config))))
    try:
        for server in servers:
            server.start()
        yield servers
    finally:
        for server in servers:
            server.stop()


def settings_for(url: str, **others: object) -> JetStreamSettings:
    quick: dict[str, object] = {"beat_s": 0.2, "lease_s": 1.0, "mark_s": 0.4, "connect_s": 2.0}
    return JetStreamSettings((url,), **{**quick, **others})  # type: ignore[arg-type] # as named


@asynccontextmanager
async def a_shared_queue(
    folder: Path, settings: JetStreamSettings, limits: QueueLimits | None = None
) -> AsyncIterator[JetStreamQueue]:
    queue = await jetstream_queue(folder, settings, limits or QueueLimits(), LOG)
    try:
        yield queue
    finally:
        await queue.close()


async def until_up(queue: JetStreamQueue, within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while queue.away:
            await asyncio.sleep(0.01)


async def messages(server: NatsServer, stream: str) -> list[str]:
    """The subjects of all that is in a stream now."""
    client = await nats.connect(server.url)
    try:
        found = await client.jetstream().stream_info(stream, subjects_filter=">")
        return sorted(found.state.subjects or {})
    finally:
        await client.close()
