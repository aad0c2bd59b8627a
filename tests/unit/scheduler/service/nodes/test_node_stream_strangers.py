"""What strangers and broken managers can do to a scheduler: nothing but lose their connection."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from msgspec import structs

from cache_manager.model.ids import NodeId
from common.frame_line import FrameLine
from common.http.asgi import Receive, Scope, Send
from common.http.server_protocol import AcceptedLine
from common.stream_upgrade import StreamRequest
from scheduler.model.events import NodeSnapshot
from scheduler.service.http.app import listen, serving
from scheduler.wire.codec import VERSION, pack
from scheduler.wire.node_stream import (
    MAX_MESSAGE_BYTES,
    MOST_UNSENT_BYTES,
    Beat,
    Challenge,
    Hello,
    Leave,
    Report,
    TurnedAway,
    UpChannel,
    Welcome,
    is_proven,
    proven,
    read_greeting,
    stream_key,
    stream_path,
)
from tests.kit.cores.builders import request
from tests.kit.network.memory_transport import MemoryTransport
from tests.kit.network.raw_line import RawLine, raw_line
from tests.kit.waiting import eventually
from tests.kit.worlds.cluster_in_process import (
    SECRET,
    Scheduler,
    a_node,
    a_scheduler,
    a_standby,
    attached,
    leases_of,
)
from tests.unit.scheduler.service.nodes.steady_streams import (
    STEADY,
    a_steady_scheduler,
    steadily_attached,
)

pytestmark = pytest.mark.timeout(180, func_only=True)

KEY = stream_key(SECRET)


@asynccontextmanager
async def stranger(it: Scheduler, name: str = "n9") -> AsyncIterator[RawLine]:
    async with raw_line(it.url, stream_path(name)) as line:
        yield line


async def challenged(line: RawLine) -> Challenge:
    challenge = read_greeting(await line.receive())
    assert isinstance(challenge, Challenge)
    return challenge


async def greeted(
    line: RawLine, name: str = "n9", key: bytes = KEY, version: int = VERSION
) -> object:
    """The scheduler's answer to a manager of this name and key."""
    challenge = await challenged(line)
    hello = Hello(version, name, "a run", "a nonce", 0)
    line.send(pack(proven(hello, key, challenge.nonce)))
    return read_greeting(await line.receive())


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1",
        b"\x91" * 10_000,
        b"\x00" * 20_000,
        pack(Welcome(resumed=True)),
        pack(TurnedAway("go away")),
        pack(Hello(VERSION, "n9", "run", "nonce", 0)),
        pack(Hello(VERSION, "n9", "run", "nonce", 99, None, (), "proof")),
    ],
)
async def test_stranger_is_hung_up_on_when_it_sends_anything_but_a_true_hello(
    sent: bytes,
) -> None:
    it = await a_steady_scheduler()
    async with stranger(it) as line:
        await challenged(line)
        line.send(sent)
        assert await line.hung_up()
    assert it.nodes == {}
    assert it.fenced == []
    await it.stop()


async def test_stranger_is_hung_up_on_when_it_sends_nothing() -> None:
    it = await a_scheduler()
    async with stranger(it) as line:
        await challenged(line)
        assert await line.hung_up()
    await it.stop()


async def test_manager_is_turned_away_when_its_secret_is_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    it = await a_steady_scheduler()
    for _ in range(5):
        async with stranger(it) as line:
            answer = await greeted(line, key=stream_key(b"another secret"))
            assert isinstance(answer, TurnedAway)
            assert "secret" in answer.reason
            assert await line.hung_up()
    await it.stop()
    said = [each for each in caplog.messages if each.startswith("turned node")]
    assert len(said) == 1  # a stranger fills no log


async def test_hello_is_worth_nothing_when_it_was_sent_on_another_socket() -> None:
    it = await a_steady_scheduler()
    async with stranger(it) as one, stranger(it) as two:
        first, _ = await challenged(one), await challenged(two)
        hello = proven(Hello(VERSION, "n9", "a run", "a nonce", 0), KEY, first.nonce)
        two.send(pack(hello))
        assert isinstance(read_greeting(await two.receive()), TurnedAway)
    await it.stop()


async def test_manager_is_turned_away_when_it_speaks_another_version() -> None:
    it = await a_steady_scheduler()
    async with stranger(it) as line:
        answer = await greeted(line, version=VERSION + 1)
        assert isinstance(answer, TurnedAway)
        both = f"speaks version {VERSION + 1} and the scheduler version {VERSION}"
        assert f"{both}: upgrade the scheduler" in answer.reason
    await it.stop()


async def test_manager_does_not_follow_a_scheduler_that_does_not_know_the_secret(
    caplog: pytest.LogCaptureFixture,
) -> None:
    it, node = await a_steady_scheduler(secret=b"another secret"), a_node()
    async with steadily_attached(node, it.url) as attachment:
        await eventually(lambda: "does not know the cluster's secret" in caplog.text)
        assert not attachment.connected
        assert it.nodes == {}
    await it.stop()


async def test_node_gets_nothing_new_when_it_reconnects_before_its_old_socket_has_ended() -> None:
    it, node = await a_steady_scheduler(), a_node("n9")
    async with stranger(it) as one, stranger(it) as two:
        assert isinstance(await greeted(one), Welcome)
        report = Report(node.snapshot())
        one.send(UpChannel().pack(report))
        await eventually(lambda: it.driver.status().gpus)
        assert isinstance(await greeted(two), Welcome)
        assert [gpu.silent for gpu in it.driver.status().gpus] == [True]
        two.send(UpChannel().pack(report))
        await eventually(lambda: [gpu.silent for gpu in it.driver.status().gpus] == [False])
    await it.stop()


async def test_second_manager_is_turned_away_when_the_name_is_taken() -> None:
    it, node = await a_steady_scheduler(), a_node()
    async with steadily_attached(node, it.url) as attachment:
        held = await attachment.acquire(request("r1"))
        async with stranger(it, "n0") as line:
            answer = await greeted(line, "n0")
            assert isinstance(answer, TurnedAway)
            assert "name" in answer.reason
        assert leases_of(it) == {held.lease}
        assert attachment.connected
    await it.stop()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x93\x01\x00",
        b"\x92\x01\x00",
        b"\x93\x05\x00\x92\xa4Beat\x80",
        b"\x93\x00\x09\x92\xa4Beat\x80",
        b"\x93\x01\x00\x92\xa6Report\x80",
        b"\x93\x01\x00\x92\xa7Nothing\x80",
        b"",
    ],
)
async def test_node_is_given_up_when_it_talks_nonsense(sent: bytes) -> None:
    it = await a_steady_scheduler()
    async with stranger(it) as line:
        assert isinstance(await greeted(line), Welcome)
        assert it.nodes == {"n9": True}
        line.send(sent)
        assert await line.hung_up()
    await eventually(lambda: it.nodes == {})
    await it.stop()


async def test_socket_is_closed_when_a_message_is_larger_than_any_may_be() -> None:
    it, node = await a_steady_scheduler(), a_node()
    async with steadily_attached(node, it.url) as attachment:
        held = await attachment.acquire(request("r1"))
        async with stranger(it) as line:
            await greeted(line)
            line.send(bytes(MAX_MESSAGE_BYTES + 1))
            assert await line.hung_up()
        assert leases_of(it) == {held.lease}
        assert attachment.connected
    await it.stop()


async def test_manager_is_hung_up_on_when_it_leaves_too_much_unread() -> None:
    it, node = await a_steady_scheduler(), a_node()
    async with steadily_attached(node, it.url) as attachment:
        await attachment.attached()
        manager, transport = it.streams.attached[node.name], MemoryTransport()
        line = FrameLine(MAX_MESSAGE_BYTES)
        line.connection_made(transport)
        manager.connect(line, [])
        transport.unwritten_bytes = MOST_UNSENT_BYTES // 2
        manager.beat()
        assert not transport.has_ended()
        transport.unwritten_bytes = MOST_UNSENT_BYTES
        manager.beat()
        assert transport.has_ended()
        line.connection_lost(None)
    await it.stop()


async def test_leaving_manager_is_told_that_its_last_message_arrived() -> None:
    it, channel = await a_steady_scheduler(), UpChannel()
    async with stranger(it) as line:
        assert isinstance(await greeted(line), Welcome)
        line.send(channel.pack(Leave()))
        while channel.unacknowledged_count:  # a beat may have been on its way
            assert isinstance(channel.unpack(await line.receive()), Beat)
        assert await line.hung_up()
    assert it.nodes == {}
    await it.stop()


async def test_manager_says_why_when_a_server_knows_no_node_streams(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As a scheduler of an older release."""
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def refuse(request: StreamRequest, line: AcceptedLine) -> None:
        del request
        line.refuse()

    async def no_app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError(f"{scope} came, {receive} and {send}, and no stream")

    async with (
        serving(no_app, listener, streams=refuse),
        steadily_attached(a_node(), url) as attachment,
    ):
        await eventually(lambda: "the server answered 404" in caplog.text)
        assert not attachment.connected


@pytest.mark.parametrize(
    "leader", ["", "http://", "ftp://a", "http://a/\r\nX: y", f"http://{'a' * 70}.b", "http://[::1"]
)
async def test_manager_finds_the_leader_though_a_stranger_sends_it_nowhere(leader: str) -> None:
    it, node = await a_scheduler(), a_node()
    async with a_standby(leader) as stranger_url, attached(node, stranger_url, it.url) as found:
        await found.attached()
        assert it.nodes == {"n0": True}
    await it.stop()


async def test_stream_breaks_when_a_node_speaks_for_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    it, node = await a_steady_scheduler(), a_node()
    async with steadily_attached(node, it.url) as attachment:
        await attachment.attached()
        attachment.report(NodeSnapshot(NodeId("n1"), ()))
        await eventually(lambda: "reports as node n1" in caplog.text)
        await eventually(lambda: attachment.connected and it.driver.status().gpus)
        assert it.driver.status().nodes == ("n0",)
    await it.stop()


def test_greeting_is_not_proven_when_a_word_of_it_was_changed() -> None:
    hello = proven(Hello(VERSION, "n0", "run", "nonce", 3), KEY, "theirs")
    assert is_proven(hello, KEY, "theirs")
    assert not is_proven(hello, KEY, "others")
    assert not is_proven(structs.replace(hello, term=4), KEY, "theirs")
    assert not is_proven(hello, stream_key(b"another secret"), "theirs")
    welcome = proven(Welcome(resumed=False), KEY, "n0", "nonce")
    assert not is_proven(welcome, KEY, "n1", "nonce")
    assert not is_proven(structs.replace(welcome, resumed=True), KEY, "n0", "nonce")


async def test_scheduler_continues_to_serve_when_many_strangers_come_and_send_nothing() -> None:
    it, node = await a_scheduler(times=replace(STEADY, greeting_s=1.0)), a_node()

    async def silent(number: int) -> bool:
        async with stranger(it, f"s{number}") as line:
            return await line.hung_up()

    async with steadily_attached(node, it.url) as attachment:
        strangers = asyncio.gather(*(silent(number) for number in range(50)))
        assert (await attachment.acquire(request("r1"))).node == "n0"
        assert all(await strangers)
        assert attachment.connected
    await it.stop()
