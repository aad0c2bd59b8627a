"""Whole answers that a call's thread sends itself: their order, their ends, and what follows."""

import asyncio
import random
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from gateway_ext.runtime import connection
from gateway_ext.runtime.calls import LoopMailbox
from gateway_ext.runtime.connection import ConnectionSite, RequestHead, ServerConnection
from gateway_ext.runtime.handler_values import HandlerResponse
from tests.kit.processes.runtime_process import Running, Unix, runtime
from tests.kit.waiting import eventually

pytestmark = pytest.mark.timeout(180, func_only=True)

ECHO = """
import time
def handle(event, context):
    time.sleep(float(event.query.get("s", 0)))
    return event.body * int(event.query.get("n", 1))
"""


@pytest.fixture(scope="module")
def function() -> Iterator[Running]:
    with runtime(ECHO) as running:
        yield running


def request(body: bytes, target: str = "/", more: str = "") -> bytes:
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def read_answer(sock: socket.socket, size: int) -> bytes:
    """The body of one answer, behind which nothing may come."""
    got = b""
    while len(got.partition(b"\r\n\r\n")[2]) < size or b"\r\n\r\n" not in got:
        part = sock.recv(1 << 20)
        assert part, got[-200:]
        got += part
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: %d\r\n" % size in head + b"\r\n"
    assert len(body) == size
    return body


def test_answers_are_whole_and_in_order_however_the_requests_arrive(function: Running) -> None:
    chance = random.Random(7)
    bodies = [b"<%d>" % number + b"x" * chance.randrange(200) for number in range(400)]
    sent = b"".join(map(request, bodies))
    with function.socket() as sock:

        def send() -> None:
            begin = 0
            while begin < len(sent):
                end = begin + chance.choice((1, 30, 100, 300, 1000))
                sock.sendall(sent[begin:end])
                begin = end
                time.sleep(chance.choice((0, 0, 0.0002, 0.001)))

        sender = threading.Thread(target=send)
        sender.start()
        got, missing = b"", len(b"".join(bodies))
        while missing:
            head, found, rest = got.partition(b"\r\n\r\n")
            size = int(head.rpartition(b"Content-Length: ")[2]) if found else 0
            if not found or len(rest) < size:
                part = sock.recv(65536)
                assert part
                got += part
                continue
            assert rest[:size] == bodies.pop(0)
            got, missing = rest[size:], missing - size
        sender.join()


def test_large_answer_is_whole_when_it_is_read_slowly(function: Running) -> None:
    for size in (60 << 10, 64 << 10, 70 << 10, 4 << 20):
        with function.socket() as sock:
            for _ in range(2):
                sock.sendall(request(b"y", f"/?n={size}"))
                time.sleep(0.05)
                assert read_answer(sock, size) == b"y" * size


def test_answers_that_nobody_reads_are_kept_in_order_until_somebody_does(
    function: Running,
) -> None:
    """They fill the socket, so that a thread can send only a part, or nothing."""
    times, numbers = 10 << 10, range(40)
    sent = b"".join(request(b"(%02d)" % number, f"/?n={times}") for number in numbers[:-1])
    last = request(b"(%02d)" % numbers[-1], f"/?n={times}", "Connection: close\r\n")
    with function.socket() as sock:
        sock.sendall(sent + last)
        time.sleep(0.3)
        got = b"".join(iter(lambda: sock.recv(1 << 20), b""))
    bodies = [answer.partition(b"\r\n\r\n")[2] for answer in got.split(b"HTTP/1.1 200 OK\r\n")]
    assert bodies[1:] == [b"(%02d)" % number * times for number in numbers]


def test_connection_closes_behind_the_answer_when_it_is_asked_to(function: Running) -> None:
    got = function.raw(request(b"last", more="Connection: close\r\n"))
    assert got.endswith(b"\r\nConnection: close\r\n\r\nlast")
    assert function.raw(b"POST / HTTP/1.0\r\nContent-Length: 3\r\n\r\nold").endswith(b"\r\n\r\nold")


def test_process_ends_though_a_connection_is_kept_when_it_has_been_answered() -> None:
    with runtime(ECHO, write_timeout="1h") as running:  # so long it would wait for a call
        connection = Unix(running.path)
        connection.request("POST", "/", b"kept")
        assert connection.getresponse().read() == b"kept"
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait() == 0
        connection.close()


def test_call_is_no_longer_counted_once_its_client_has_the_answer() -> None:
    with runtime(ECHO, max_inflight="1", GPUFAAS_THREADS="1") as running:
        connection = Unix(running.path)
        for _ in range(200):
            connection.request("POST", "/", b"a")
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (200, b"a")
        connection.close()


def test_nothing_is_sent_to_another_client_when_one_leaves_before_its_answer() -> None:
    """A descriptor is used again as soon as a connection is closed."""
    with runtime(ECHO, GPUFAAS_THREADS="8") as running:
        for number in range(150):
            with running.socket() as sock:
                sock.sendall(request(b"gone", f"/?s={0.002 * (number % 3)}"))
                time.sleep(0.001 * (number % 4))
            with running.socket() as sock:
                time.sleep(0.001)
                body = b"mine %d" % number
                sock.sendall(request(body))
                assert read_answer(sock, len(body)) == body


class Site:
    """Answers every request from a thread; the loop learns of it only when it looks."""

    def __init__(self, max_connections: int = 4) -> None:
        self.shared = ConnectionSite(
            self.begin,
            self.catch_up,
            max_connections=max_connections,
            max_body_bytes=1000,
            read_timeout_s=0.0,
        )
        self.mailbox = LoopMailbox(asyncio.get_running_loop())
        self.threads: list[threading.Thread] = []

    def begin(self, head: RequestHead, body: bytes, connection: ServerConnection) -> None:
        del head
        self.threads.append(threading.Thread(target=self._answer, args=(body, connection)))
        self.threads[-1].start()

    async def threads_end(self) -> None:
        """Wait until all that they do is done: a client has its answer before that."""
        for thread in self.threads:
            await asyncio.to_thread(thread.join)

    def catch_up(self) -> None:
        self.mailbox.catch_up()

    def _answer(self, body: bytes, connection: ServerConnection) -> None:
        encoded = connection.encoded(HandlerResponse(200, [], body))
        assert connection.answer_from_thread(encoded)
        self.mailbox.leave(connection.answered)
        if connection.has_read_ahead:  # it came before the step was left: nobody else looks
            self.mailbox.wake()


@asynccontextmanager
async def connection_to(
    site: Site,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: ServerConnection(site.shared), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.close()
        await site.threads_end()


async def test_requests_follow_an_answer_that_the_loop_has_not_heard_of() -> None:
    async with connection_to(Site()) as (reader, writer):
        for number in range(20):
            body = b"%d" % number
            writer.write(request(body))
            answer = await reader.readuntil(b"\r\n\r\n" + body)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            await asyncio.sleep(0.002)


class LateSite(Site):
    """Its thread answers, as far as the loop can tell, just after the loop has looked."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[bytes] = []
        self.waiting: list[tuple[bytes, ServerConnection]] = []

    def begin(self, head: RequestHead, body: bytes, connection: ServerConnection) -> None:
        del head
        self.begun.append(body)
        self.waiting.append((body, connection))

    def catch_up(self) -> None:
        super().catch_up()
        if self.waiting:
            body, connection = self.waiting.pop()
            self._answer(body, connection)
            assert not connection.has_read_ahead


async def test_request_is_not_forgotten_when_the_answer_before_it_is_sent_meanwhile() -> None:
    site = LateSite()
    async with connection_to(site) as (reader, writer):
        writer.write(request(b"a"))
        await eventually(lambda: site.begun == [b"a"], "the first one")
        writer.write(request(b"b"))
        await reader.readuntil(b"\r\n\r\na")
        await eventually(lambda: site.begun == [b"a", b"b"], "the second one")


class SlowSite(Site):
    """Answers once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def _answer(self, body: bytes, connection: ServerConnection) -> None:
        self.go_on.wait()
        encoded = connection.encoded(HandlerResponse(200, [], body))
        connection.answer_from_thread(encoded)
        self.mailbox.post(connection.answered)


async def test_connection_stays_lost_when_its_answer_comes_later() -> None:
    site = SlowSite()
    async with connection_to(site) as (_, writer):
        try:
            writer.write(request(b"a"))
            await eventually(lambda: site.threads, "the call")
            assert len(site.shared.connections) == 1
            writer.close()
            await eventually(lambda: not site.shared.connections, "the end of its connection")
        finally:
            site.go_on.set()
        await site.threads_end()
        await asyncio.sleep(0.02)
        assert not site.shared.connections


async def test_unused_connection_is_closed_when_its_last_answer_came_from_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, ahead_s, limit_s = asyncio.get_running_loop(), 0.0, connection._IDLE_S  # noqa: SLF001 - of the clock that is set forward
    monkeypatch.setattr(loop, "time", lambda: time.monotonic() + ahead_s)
    site = Site()
    async with connection_to(site) as (reader, writer):
        for _ in range(4):  # used, it lasts for longer than its limit
            writer.write(request(b"a"))
            await reader.readuntil(b"\r\n\r\na")
            await site.threads_end()
            ahead_s += limit_s / 2
            await asyncio.sleep(0.01)
        assert not reader.at_eof()
        ahead_s += limit_s
        assert await reader.read() == b""


async def test_answered_connection_makes_room_though_the_loop_has_not_heard_of_it() -> None:
    site = Site(max_connections=1)
    async with connection_to(site) as (reader, writer):
        writer.write(request(b"a"))
        await reader.readuntil(b"\r\n\r\na")
        await site.threads_end()
        _, other = await asyncio.open_connection(*writer.get_extra_info("peername"))
        assert await reader.read() == b""
        other.close()
