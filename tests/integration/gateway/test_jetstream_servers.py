"""The queue on NATS with servers that are full, want a password, use TLS, or are killed."""

import asyncio
import ssl
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from gateway_ext.errors import Busy, QueueAway, QueueFailed
from gateway_ext.jobs.attempts import BackOff, RetryPolicy
from gateway_ext.jobs.values import AsyncCall, call_lane
from gateway_ext.jobs.worker import JobWorker, JobWorkerSettings
from gateway_ext.shared_jobs.queue import JetStreamQueue
from tests.kit.engines.nats_servers import (
    a_shared_queue,
    nats_cluster,
    nats_server,
    settings_for,
    until_copied,
    until_led,
    until_up,
)
from tests.kit.waiting import eventually
from tests.kit.worlds.job_world import ECHO, LOG, Functions, ScriptedAnswer, call, put

LANE = call_lane(ECHO)
LARGE = bytes(range(251)) * 9000  # a few parts


def now(call_id: str, **others: str) -> AsyncCall:
    return call(call_id, queued_at_s=time.time(), **others)  # type: ignore[arg-type] # as named


async def test_full_server_says_when_to_come_back(tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    config.write_text("jetstream { max_file_store: 40MB }\n")

    with nats_server(tmp_path / "nats", "-c", str(config)) as server:
        async with a_shared_queue(tmp_path / "a", settings_for(server.url)) as queue:
            for kept in range(100):
                try:
                    await put(queue, now(str(kept)), LARGE)
                except Busy:
                    break
            assert 2 <= kept == queue.tally.calls[ECHO] < 20
            for job in await queue.claim([LANE] * kept, 1e12):
                await queue.finish(job.number)
            await eventually(lambda: _fits(queue), "a call fits again")


async def _fits(queue: JetStreamQueue) -> bool:
    try:
        return await put(queue, now("after"), b"x" * 100_000)
    except (QueueFailed, Busy):
        return False


async def refused(queue: JetStreamQueue, why: str) -> None:
    """Wait until a put fails for this reason: the connection has to fail first."""

    async def fails() -> bool:
        with pytest.raises(QueueAway) as raised:
            await put(queue, now("refused"))
        return why in str(raised.value).lower()

    await eventually(fails, why)


async def test_password_is_asked_for_and_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("wrong\n")
    options = ("--user", "gateway", "--pass", "right")

    with nats_server(tmp_path / "nats", *options) as server:
        who = {"user": "gateway", "password_file": str(tmp_path / "password"), "connect_s": 0.5}
        async with a_shared_queue(tmp_path / "a", settings_for(server.url, **who)) as queue:
            await refused(queue, "authorization")
            (tmp_path / "password").write_text("right\n")
            await until_up(queue)
            assert await put(queue, now("one"))


async def test_server_shows_a_certificate_of_the_authority_that_is_named(
    tmp_path: Path, certificate: Callable[[Path], tuple[Path, Path]]
) -> None:
    cert, key = certificate(tmp_path)
    options = ("--tls", "--tlscert", str(cert), "--tlskey", str(key))

    with nats_server(tmp_path / "nats", *options) as server:
        url = server.url.replace("nats://", "tls://").replace("127.0.0.1", "localhost")
        known = settings_for(url, ca_file=str(cert))
        async with a_shared_queue(tmp_path / "a", known) as queue:
            assert await put(queue, now("one"))
        unknown = settings_for(url, connect_s=0.5)
        async with a_shared_queue(tmp_path / "b", unknown) as queue:
            await refused(queue, "certificate")


@pytest.fixture
def certificate() -> Callable[[Path], tuple[Path, Path]]:
    def make(folder: Path) -> tuple[Path, Path]:
        cert, key = folder / "cert.pem", folder / "key.pem"
        said = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
        names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
        files = ("-keyout", str(key), "-out", str(cert))
        subprocess.run(
            ["openssl", "req", "-x509", *said, *names, *files], check=True, capture_output=True
        )
        ssl.create_default_context(cafile=str(cert))  # it is one
        return cert, key

    return make


@pytest.mark.slow
async def test_work_goes_on_when_one_of_three_servers_is_killed(tmp_path: Path) -> None:
    with nats_cluster(tmp_path / "nats") as servers:
        for server in servers:
            await until_led(server)
        urls = tuple(server.url for server in servers)
        settings = replace(settings_for(urls[0], replicas=3, lease_s=10.0), servers=urls)
        functions = Functions(lambda *_: ScriptedAnswer(after_s=0.05))
        patience = RetryPolicy(back_off=BackOff(first_s=0.05, most_s=0.2))
        tries: Counter[str] = Counter()
        async with a_shared_queue(tmp_path / "a", settings) as queue:
            await until_up(queue)
            async with JobWorker(
                queue, functions, lambda _: None, JobWorkerSettings(patience=patience), LOG
            ):
                await asyncio.gather(*(kept(queue, str(at), tries) for at in range(60)))
                await until_copied(servers[0])
                servers[0].kill()
                await asyncio.gather(*(kept(queue, str(at), tries) for at in range(60, 90)))
                servers[0].start()
                await eventually(lambda: not queue.tally.calls, "all calls are made")
            made = Counter(one for one, _ in functions.made)
            assert sorted(map(int, made)) == list(range(90))
            # A put without an answer may have stored its call, which is made before the next put.
            assert made <= tries
            assert queue.tally.dead == 0


async def kept(queue: JetStreamQueue, call_id: str, tries: Counter[str]) -> None:
    """Put a call as a client does that repeats it after a failure; how often is counted."""

    async def put_once() -> bool:
        tries[call_id] += 1
        with suppress(QueueFailed):
            await put(queue, now(call_id), b"x" * 100_000)
            return True
        return False

    await eventually(put_once, "the call is stored")
