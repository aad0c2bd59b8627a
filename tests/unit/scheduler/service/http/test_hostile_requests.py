"""Who has no credential of ours and sends what it likes to the scheduler's port."""

import asyncio
import socket
from struct import pack
from urllib.parse import urlsplit

import pytest

from common.telemetry.process_metrics import page
from common.time_limits import time_limit
from scheduler.service.access import ApiRole, token
from tests.kit.network.hostile_requests import ask, statuses_behind_an_upgrade
from tests.kit.network.raw_line import UPGRADE, framed, raw_line
from tests.kit.worlds.service_world import SECRET, World, leading

pytestmark = pytest.mark.timeout(180, func_only=True)

MIB = 1 << 20


def address_of(world: World) -> tuple[str, int]:
    parts = urlsplit(world.url)
    assert parts.hostname
    assert parts.port
    return parts.hostname, parts.port


def resident_bytes() -> int:
    """The memory of this process, in which the scheduler runs."""
    (line,) = (each for each in page().splitlines() if each.startswith(b"process_resident"))
    return int(float(line.split()[1]))


def sent_until_cut_off(
    address: tuple[str, int], begin: bytes, piece: bytes, most_bytes: int
) -> tuple[int, bytes]:
    """How much a blocking client can send before it is cut off, and what answers it."""
    sent_bytes = 0
    with socket.create_connection(address, timeout=20) as peer:
        try:
            peer.sendall(begin)
            while sent_bytes < most_bytes:
                peer.sendall(piece)
                sent_bytes += len(piece)
        except OSError:
            pass  # the server reads no more
        return sent_bytes, peer.recv(MIB)


# That ambiguous requests are refused is common.http's work, and tested at the gateway's port.


async def test_request_behind_an_unknown_upgrade_is_answered() -> None:
    async with leading() as world:
        found = await statuses_behind_an_upgrade(address_of(world), b"GET /healthz")
        assert found == [200, 200]


@pytest.mark.parametrize("piece", [b"a: b\r\n" * 10_000, b"x" * 60_000], ids=["many", "long"])
async def test_header_of_120_mib_is_cut_off_while_requests_are_served(piece: bytes) -> None:
    async with leading() as world:
        before_bytes = resident_bytes()
        begin = b"POST /acquire HTTP/1.1\r\nhost: x\r\nx-a: "
        flood = asyncio.to_thread(sent_until_cut_off, address_of(world), begin, piece, 120 * MIB)
        flooding = asyncio.create_task(flood)
        while not flooding.done():
            async with time_limit(30):
                assert (await world.get("/readyz")).status == 200
        sent_bytes, answer = await flooding
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert sent_bytes < 32 * MIB
        assert resident_bytes() - before_bytes < 32 * MIB


async def test_120_mib_of_small_requests_at_once_take_no_memory() -> None:
    async with leading() as world:
        before_bytes = resident_bytes()
        piece = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" * 1000
        sent_bytes, _ = await asyncio.to_thread(
            sent_until_cut_off, address_of(world), b"", piece, 120 * MIB
        )
        assert sent_bytes < 32 * MIB
        assert resident_bytes() - before_bytes < 32 * MIB


@pytest.mark.parametrize("path", ["/acquire", "/policy", "/models/bert/pin", "/nothing"])
@pytest.mark.parametrize(
    "length",
    [b"content-length: 1000000000000", b"transfer-encoding: chunked"],
    ids=["length", "chunks"],
)
async def test_body_without_credentials_is_not_awaited(path: str, length: bytes) -> None:
    async with leading() as world:
        head = b"POST %b HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n" % (path.encode(), length)
        answer = await ask(address_of(world), head)  # no byte of the body is sent
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"\r\nconnection: close\r\n" in answer


async def test_body_without_credentials_is_not_read() -> None:
    async with leading() as world:
        begin = b"PUT /policy HTTP/1.1\r\nhost: x\r\ncontent-length: 200000000\r\n\r\n"
        sent_bytes, answer = await asyncio.to_thread(
            sent_until_cut_off, address_of(world), begin, bytes(60_000), 120 * MIB
        )
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert sent_bytes < 32 * MIB


@pytest.mark.parametrize("path", ["/acquire", "/policy"])
@pytest.mark.parametrize(
    "length",
    [b"content-length: 200000000", b"transfer-encoding: chunked"],
    ids=["length", "chunks"],
)
async def test_body_of_a_known_caller_is_read_up_to_a_bound(path: str, length: bytes) -> None:
    async with leading() as world:
        bearer = token(SECRET, ApiRole.ADMIN).encode()
        begin = b"POST %b HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n%b\r\n\r\n"
        sent_bytes, answer = await asyncio.to_thread(
            sent_until_cut_off,
            address_of(world),
            begin % (path.encode(), bearer, length),
            b"ffff\r\n" + bytes(0xFFFF) + b"\r\n",
            120 * MIB,
        )
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert sent_bytes < 32 * MIB


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json", "/metrics", "/cluster"])
async def test_nothing_but_health_is_shown_without_credentials(path: str) -> None:
    async with leading() as world:
        assert (await world.get(path, headers={"Authorization": ""})).status == 401
        assert (await world.get(path)).status == 200


async def test_frame_of_an_unknown_manager_is_bounded() -> None:
    async with leading() as world, raw_line(world.url, "/nodes/n9/stream") as stranger:
        await stranger.receive()
        before_bytes = resident_bytes()
        stranger.send_bytes(pack(">I", 17 << 10))  # the announcement alone ends the line
        assert await stranger.hung_up()
        assert resident_bytes() - before_bytes < 8 * MIB


async def test_120_mib_behind_the_head_of_a_stream_take_no_memory() -> None:
    async with leading() as world:
        before_bytes = resident_bytes()
        sent_bytes, _ = await asyncio.to_thread(
            sent_until_cut_off,
            address_of(world),
            b"GET /nodes/n9/stream HTTP/1.1\r\n" + UPGRADE,
            framed(bytes(16 << 10)) * 64,
            120 * MIB,
        )
        assert sent_bytes < 32 * MIB
        assert resident_bytes() - before_bytes < 32 * MIB


async def test_name_that_could_forge_a_log_line_is_no_node() -> None:
    async with leading() as world:
        head = b"GET /nodes/n9%0aERROR/stream HTTP/1.1\r\n" + UPGRADE
        assert (await ask(address_of(world), head)).startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c", b""])
async def test_manager_that_asks_for_no_frames_is_told_to(upgrade: bytes) -> None:
    async with leading() as world:
        head = b"GET /nodes/n9/stream HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\n"
        answer = await ask(address_of(world), head + b"Upgrade: %b\r\n\r\n" % upgrade)
        assert answer.startswith(b"HTTP/1.1 426 ")
        assert b"\r\nupgrade: gpufaas-frames\r\n" in answer
        assert b"send `Upgrade: gpufaas-frames`" in answer
