"""Calls that go well, and those that never reach a function."""

import asyncio

import pytest

from tests.kit.fakes.fake_function import Got, a_function, echoes, says, writes
from tests.kit.network.kept_connections import kept_connections
from tests.kit.waiting import eventually
from tests.kit.worlds.calling import a_deployment, a_gateway, answer_of, chunk_of, head_of

pytestmark = pytest.mark.timeout(180, func_only=True)


async def test_call_passes_on_method_path_query_headers_and_body() -> None:
    async with a_gateway() as gateway, a_function(says(b"hi", 201, "x-own: 1\r\n")) as fake:
        gateway.deploy(a_deployment(), fake)
        path = "/function/echo/a%2Fb/c;d?x=%20&y"
        answer = await gateway.call(path, b"body", method="PUT", headers=["X-Mine: 2"])
        assert (answer.status, answer.body, answer.header("x-own")) == (201, b"hi", "1")
        got = fake.got[0]
        assert (got.method, got.target, got.body) == ("PUT", "/a%2Fb/c;d?x=%20&y", b"body")
        assert got.header("x-mine") == "2"
        assert got.header("content-length") == "4"
        assert got.header("host") == "gw"


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/function/echo", "/"),
        ("/function/echo/", "/"),
        ("/function/echo?q", "/?q"),
        ("/function/echo.openfaas-fn/x", "/x"),
        ("/function/echo//x", "//x"),
    ],
)
async def test_call_finds_function_by_either_name(path: str, target: str) -> None:
    async with a_gateway() as gateway, a_function(says()) as fake:
        gateway.deploy(a_deployment(), fake)
        assert (await gateway.call(path)).status == 200
        assert fake.got[0].target == target


async def test_call_goes_below_prefix_over_tcp() -> None:
    async with a_gateway() as gateway, a_function(says(), tcp=True, prefix="/function/x") as fake:
        gateway.deploy(a_deployment(), fake)
        assert (await gateway.call("/function/echo/a")).body == b"ok"
        assert fake.got[0].target == "/function/x/a"


async def test_namespaces_are_apart() -> None:
    async with a_gateway() as gateway, a_function(says(b"of x")) as fake:
        gateway.deploy(a_deployment(namespace="x"), fake)
        assert (await gateway.call("/function/echo.x")).body == b"of x"
        assert (await gateway.call("/function/echo")).status == 404


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/function/", [], 400),
        ("POST", "/%66unction/n/echo", [], 400),
        ("POST", "/function/nobody", [], 404),
        ("POST", "/function/nobody.there", [], 404),
        ("TRACE", "/function/echo", [], 405),
        ("POST", "/function/echo", ["Upgrade: websocket", "Connection: upgrade"], 501),
    ],
)
async def test_call_is_refused(method: str, path: str, headers: list[str], status: int) -> None:
    async with a_gateway() as gateway, a_function(says()) as fake:
        gateway.deploy(a_deployment(), fake)
        answer = await gateway.call(path, method=method, headers=headers)
        assert answer.status == status
        assert answer.header("content-type") == "text/plain; charset=utf-8"
        assert answer.body
        assert not fake.got


async def test_headers_of_a_hop_stay_there_both_ways() -> None:
    back = "connection: x-named\r\nx-named: 1\r\nkeep-alive: 5\r\nx-gpu-secret: 1\r\nx-kept: 1\r\n"
    async with a_gateway() as gateway, a_function(says(headers=back)) as fake:
        gateway.deploy(a_deployment(), fake)
        sent = [
            *("Connection: x-secret, close", "X-Secret: 1", "TE: trailers", "Keep-Alive: 3"),
            *("Proxy-Authorization: x", "X-Gpu-Lease: stolen", "Authorization: mine"),
        ]
        answer = await gateway.call(headers=sent)
        hidden = {
            "x-secret",
            "te",
            "keep-alive",
            "proxy-authorization",
            "x-gpu-lease",
            "connection",
        }
        assert not hidden & {name for name, _ in fake.got[0].headers}
        assert fake.got[0].header("authorization") == "mine"
        assert answer.header("x-kept") == "1"
        assert not {"x-named", "keep-alive", "x-gpu-secret"} & {name for name, _ in answer.headers}


async def test_call_is_named_timed_and_forwarded() -> None:
    async with a_gateway() as gateway, a_function(says()) as fake:
        gateway.deploy(a_deployment(), fake)
        answer = await gateway.call(headers=["X-Forwarded-For: 1.2.3.4", "X-Forwarded-Host: front"])
        got = fake.got[0]
        assert answer.header("x-call-id") == got.header("x-call-id")
        assert len(answer.header("x-call-id") or "") == 36
        assert answer.header("x-start-time") == got.header("x-start-time")
        assert float(answer.header("x-duration-seconds") or "-1") >= 0
        assert got.header("x-forwarded-for") == "1.2.3.4, 127.0.0.1"
        assert got.header("x-forwarded-host") == "front"
        own = await gateway.call(headers=["X-Call-Id: mine"])
        assert own.header("x-call-id") == fake.got[1].header("x-call-id") == "mine"
        assert fake.got[1].header("x-forwarded-host") == "gw"


@pytest.mark.parametrize(
    ("sent", "kept"),  # sent as UTF-8, and read as Latin-1
    [("a\x9b2Jb", "aÂ2Jb"), ("é\x85\xad", "Ã©ÂÂ"), ("a" * 300, "a" * 256)],
)
async def test_clients_id_of_a_call_holds_nothing_that_a_terminal_obeys(
    sent: str, kept: str
) -> None:
    async with a_gateway() as gateway, a_function(says()) as fake:
        gateway.deploy(a_deployment(), fake)
        answer = await gateway.call(headers=[f"X-Call-Id: {sent}"])
        assert answer.header("x-call-id") == fake.got[0].header("x-call-id") == kept


async def test_connections_to_instances_are_used_again() -> None:
    async with a_gateway() as gateway, a_function(says()) as fake:
        gateway.deploy(a_deployment(), fake)
        for method in ("POST", "HEAD", "GET", "DELETE"):
            assert (await gateway.call(method=method)).status == 200
        assert (len(fake.got), fake.connections, kept_connections(gateway.client)) == (4, 1, 1)


async def test_head_has_the_length_and_no_body() -> None:
    async with a_gateway() as gateway, a_function(says(b"12345")) as fake:
        gateway.deploy(a_deployment(), fake)
        answer = await gateway.call(method="HEAD")
        assert (answer.status, answer.header("content-length"), answer.body) == (200, "5", b"")


@pytest.mark.parametrize(
    ("wire", "status", "body"),
    [
        (b"HTTP/1.1 204 X\r\n\r\n", 204, b""),
        (b"HTTP/1.1 304 X\r\netag: 1\r\n\r\n", 304, b""),
        (
            b"HTTP/1.1 103 X\r\nlink: 1\r\n\r\nHTTP/1.1 200 X\r\ncontent-length: 1\r\n\r\na",
            200,
            b"a",
        ),
        (
            b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nt: 1\r\n\r\n",
            200,
            b"a",
        ),
        (b"HTTP/1.1 302 X\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n", 302, b""),
    ],
)
async def test_answer_of_any_form_is_passed_on(wire: bytes, status: int, body: bytes) -> None:
    async with a_gateway() as gateway, a_function(writes(wire)) as fake:
        gateway.deploy(a_deployment(), fake)
        for _ in range(2):
            answer = await gateway.call()
            assert (answer.status, answer.body) == (status, body)
            assert answer.header("link") is None
            assert answer.header("t") is None
        assert fake.connections == 1


async def test_answer_that_ends_with_its_connection_is_whole() -> None:
    wire = writes(b"HTTP/1.1 200 X\r\n\r\nab", 0.02, b"cd", close=True)
    async with a_gateway() as gateway, a_function(wire) as fake:
        gateway.deploy(a_deployment(), fake)
        assert (await gateway.call()).body == b"abcd"
        assert kept_connections(gateway.client) == 0


async def test_answer_is_flushed_as_it_comes() -> None:
    go = asyncio.Event()

    async def behave(got: Got, writer: asyncio.StreamWriter) -> None:
        await got.whole()
        writer.write(b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        await go.wait()
        writer.write(b"1\r\nb\r\n0\r\n\r\n")

    async with a_gateway() as gateway, a_function(behave) as fake:
        gateway.deploy(a_deployment(), fake)
        reader, writer = await gateway.connect()
        writer.write(b"GET /function/echo HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await head_of(reader)).status == 200
        assert await chunk_of(reader) == b"a"
        go.set()
        assert await chunk_of(reader) == b"b"
        assert await chunk_of(reader) == b""


async def test_body_streams_both_ways_at_once() -> None:
    async with a_gateway() as gateway, a_function(echoes) as fake:
        gateway.deploy(a_deployment(), fake)
        reader, writer = await gateway.connect()
        writer.write(
            b"POST /function/echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for piece in (b"one", b"two", b"three"):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            if piece == b"one":
                assert (await head_of(reader)).status == 200
            assert await chunk_of(reader) == piece
        writer.write(b"0\r\n\r\n")
        assert await chunk_of(reader) == b""
        assert fake.got[0].header("transfer-encoding") == "chunked"
        await eventually(lambda: kept_connections(gateway.client) == 1)


async def test_large_body_of_known_length_arrives_whole() -> None:
    body = bytes(range(256)) * 40_000
    async with a_gateway() as gateway, a_function(echoes) as fake:
        gateway.deploy(a_deployment(), fake)
        reader, writer = await gateway.connect()
        head = f"POST /function/echo HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        assert (await answer_of(reader)).body == body
        assert fake.got[0].header("content-length") == str(len(body))


async def test_slow_reader_holds_the_function_back() -> None:
    sent = 0

    async def behave(got: Got, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await got.whole()
        writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 104857600\r\n\r\n")
        for _ in range(1600):
            writer.write(bytes(65536))
            await writer.drain()
            sent += 65536

    async with a_gateway() as gateway, a_function(behave) as fake:
        gateway.deploy(a_deployment(), fake)
        reader, writer = await gateway.connect()
        writer.write(b"GET /function/echo HTTP/1.1\r\nhost: x\r\n\r\n")
        await head_of(reader)
        await asyncio.sleep(0.5)
        assert 0 < sent < 30_000_000
        assert len(await reader.readexactly(104857600)) == 104857600
        await eventually(lambda: sent == 104857600)


async def test_expected_continue_is_answered_by_the_gateway() -> None:
    async with a_gateway() as gateway, a_function(says()) as fake:
        gateway.deploy(a_deployment(), fake)
        reader, writer = await gateway.connect()
        writer.write(
            b"POST /function/echo HTTP/1.1\r\nhost: x\r\n"
            b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n"
        )
        assert (await head_of(reader)).status == 100
        writer.write(b"hi")
        assert (await answer_of(reader)).status == 200
        assert (fake.got[0].body, fake.got[0].header("expect")) == (b"hi", None)
