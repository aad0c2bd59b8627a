"""A nats-server for tests, which can be killed and started again, and a queue on it."""

import socket
import subprocess
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import nats
from nats.js.api import ClusterInfo

from gateway_ext.jobs.queue import JobQueue, QueueLimits, opened
from gateway_ext.jobs.values import Job, JobLane
from gateway_ext.shared_jobs.queue import JetStreamQueue
from gateway_ext.shared_jobs.settings import JetStreamSettings
from gpufaas.stack.held_ports import HeldPort
from tests.kit import needs
from tests.kit.waiting import eventually, wait_until
from tests.kit.worlds.job_world import LOG

STREAMS = ("gpufaas_jobs", "gpufaas_parts")
# Parts without a job are removed after this time, of which a put may take a third: enough on a
# machine that does much else.
ORPHAN_S = 6.0
_ASK_S = 1.0


@dataclass
class NatsServer:
    """One server process on a port of its own, which its next start has too."""

    folder: Path
    options: tuple[str, ...] = ()
    reserved: HeldPort = field(default_factory=HeldPort, repr=False)
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.reserved.number}"

    def start(self) -> None:
        program = needs.command("nats-server", "nats-server")
        self.folder.mkdir(parents=True, exist_ok=True)
        place = ("-a", "127.0.0.1", "-p", str(self.reserved.number))
        arguments = (*place, "-js", "-sd", str(self.folder), *self.options)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([program, *arguments], stderr=log)
        self._until_it_answers()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()

    def close(self) -> None:
        """Stop the server and give its port back."""
        self.stop()
        self.reserved.release()

    def _log(self) -> str:
        return (self.folder / "log").read_text()

    def _until_it_answers(self) -> None:
        wait_until(self._answers, "nats-server answers", instead=self._log)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self._log()
        try:
            socket.create_connection(("127.0.0.1", self.reserved.number), timeout=1).close()
        except OSError:
            return False
        return True


@contextmanager
def nats_server(folder: Path, *options: str) -> Iterator[NatsServer]:
    server = NatsServer(folder, options)
    try:
        server.start()
        yield server
    finally:
        server.close()


@contextmanager
def nats_cluster(folder: Path, size: int = 3) -> Iterator[list[NatsServer]]:
    """Servers that keep every stream together."""
    folder.mkdir()
    with ExitStack() as stack:
        ports = [stack.enter_context(HeldPort()).number for _ in range(size)]
        servers = _configured(folder, ports)
        for server in servers:
            stack.callback(server.close)
            server.start()
        yield servers


def _configured(folder: Path, ports: Sequence[int]) -> list[NatsServer]:
    """Servers of one cluster, whose routes have these ports."""
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    servers = []
    for at, port in enumerate(ports):
        config = folder / f"{at}.conf"
        listen = f'name: tests, listen: "127.0.0.1:{port}"'
        config.write_text(f"server_name: n{at}\ncluster {{ {listen}, routes: [{routes}] }}\n")
        servers.append(NatsServer(folder / str(at), ("-c", str(config))))
    return servers


def settings_for(url: str, **others: object) -> JetStreamSettings:
    quick: dict[str, object] = {"beat_s": 0.2, "lease_s": 1.0, "mark_s": 0.4, "connect_s": 2.0}
    return JetStreamSettings((url,), **{**quick, **others})  # type: ignore[arg-type] # as named


@asynccontextmanager
async def a_shared_queue(
    folder: Path, settings: JetStreamSettings, limits: QueueLimits | None = None
) -> AsyncIterator[JetStreamQueue]:
    async with opened(JetStreamQueue(folder, settings, limits or QueueLimits(), LOG)) as queue:
        yield queue


async def until_up(queue: JetStreamQueue) -> None:
    await eventually(lambda: not queue.away, "the queue is connected")


async def messages(server: NatsServer, stream: str) -> list[str]:
    """The subjects of all that is in a stream now."""
    client = await nats.connect(server.url)
    try:
        found = await client.jetstream().stream_info(stream, subjects_filter=">")
        return sorted(found.state.subjects or {})
    finally:
        await client.close()


async def remove_streams(server: NatsServer, prefix: str) -> None:
    """Give the space back that the two streams with this prefix reserve, if they were created."""
    client = await nats.connect(server.url)
    try:
        for stream in await client.jetstream().streams_info():
            if (name := stream.config.name) and name.startswith(f"{prefix}_"):
                await client.jetstream().delete_stream(name)
    finally:
        await client.close()


async def left_in_streams(server: NatsServer) -> set[str]:
    """The subjects of all records and parts, without the heartbeats of gateways."""
    records = await messages(server, "gpufaas_jobs")
    parts = await messages(server, "gpufaas_parts")
    return {*(one for one in records if ".gateway." not in one), *parts}


async def until_emptied(server: NatsServer, but: Collection[str] = ()) -> None:
    """Wait until the streams have nothing but heartbeats and these subjects."""

    async def is_empty() -> bool:
        return not await left_in_streams(server) - set(but)

    await eventually(is_empty, "the streams are empty")


async def until_led(server: NatsServer) -> None:
    """Wait until the servers of a cluster have a leader: only then they answer a first request."""

    async def is_led() -> bool:
        client = await nats.connect(server.url)
        try:
            await client.jetstream(timeout=_ASK_S).account_info()
        except (nats.errors.Error, nats.js.errors.Error):
            return False
        finally:
            await client.close()
        return True

    await eventually(is_led, "the cluster has a leader")


async def until_copied(server: NatsServer) -> None:
    """Wait until every server of a cluster has all that is in the streams."""
    client = await nats.connect(server.url)

    async def is_copied() -> bool:
        infos = [await client.jetstream().stream_info(name) for name in STREAMS]
        return all(_is_copied(info.cluster) for info in infos)

    try:
        await eventually(is_copied, "all servers have all messages")
    finally:
        await client.close()


def _is_copied(cluster: ClusterInfo | None) -> bool:
    if cluster is None or not cluster.leader:
        return False
    return bool(cluster.replicas) and all(one.current for one in cluster.replicas or ())


async def until_cleaned(server: NatsServer) -> None:
    """Wait until a clean-up has removed a new orphan: by then it has judged all older parts too."""
    orphan = "gpufaas.parts.orphan.call"
    client = await nats.connect(server.url)
    await client.jetstream().publish(orphan, b"")
    await client.close()

    async def is_gone() -> bool:
        return orphan not in await messages(server, "gpufaas_parts")

    await eventually(is_gone, "the orphan is removed")


async def until_claimed(queue: JobQueue, lane: JobLane) -> Sequence[Job]:
    """Claim a job of this lane, once there is one that can be claimed."""
    jobs: list[Job] = []

    async def claim() -> bool:
        jobs.extend(await queue.claim([lane], 1e12))
        return bool(jobs)

    await eventually(claim, "a job can be claimed")
    return jobs
