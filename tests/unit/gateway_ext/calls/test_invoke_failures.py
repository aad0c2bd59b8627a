"""Calls that go wrong: functions that break off, hang or talk nonsense, and callers that leave."""

import asyncio
import time

import pytest

from gateway_ext.errors import TimedOut, Unreachable
from gateway_ext.model import Endpoint
from tests.kit.fakes.fake_function import FakeFunction, Got, a_function, echoes, says, writes
from tests.kit.network.kept_connections import kept_connections
from tests.kit.waiting import eventually
from tests.kit.worlds.calling import a_deployment, a_gateway, answer_of, chunk_of, head_of

pytestmark = pytest.mark.timeout(180, func_only=True)

GET = b"GET /function/echo HTTP/1.1\r\nhost: x\r\n\r\n"
BEGUN = b"HTTP/1.1 200 X\r\ncontent-length: 5\r\n\r\nab"
NOWHERE = FakeFunction(Endpoint("nowhere", "unix:/nonexistent/s"))


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200",
        b"HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 700 X\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 X\r\nx: " + bytes(70_000).replace(b"\0", b"a") + b"\r\n\r\n",
        b"HTTP/1.1 200 X\r\n" + 9_000 * b"x: abcdefgh\r\n" + b"\r\n",
        b"HTTP/1.1 200 X\r\nx: " + bytes(70_000).replace(b"\0", b"a"),
        9_000 * b"HTTP/1.1 100 X\r\n\r\n",
        b"HTTP/1.1 200 X\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
    ids=lambda wire: str(wire[:24]),
)
async def test_call_answers_502_when_function_does_not_answer_in_http(wire: bytes) -> None:
    async with a_gateway() as gateway, a_function(writes(wire, close=True)) as fake:
        function = gateway.deploy(a_deployment(), fake)
        result = await gateway.call()
        assert result.status == 502
        assert result.header("x-call-id")
        assert len(fake.got) == 1
        assert (function.inflight, kept_connections(gateway.client)) == (0, 0)


async def test_call_answers_502_when_instance_cannot_be_reached() -> None:
    async with a_gateway() as gateway:
        gateway.deploy(a_deployment(), NOWHERE)
        assert (await gateway.call()).status == 502


async def test_call_goes_to_another_instance_when_one_cannot_be_reached() -> None:
    async with a_gateway() as gateway, a_function(says()) as fake:
        gateway.deploy(a_deployment(), NOWHERE, fake)
        for _ in range(4):
            assert (await gateway.call(body=b"x")).status == 200
        assert [got.body for got in fake.got] == [b"x"] * 4
        assert b'gpufaas_gateway_retries_total{function_name="echo.openfaas-fn"}' in (
            gateway.meters.text()
        )


async def test_call_whose_body_is_still_coming_goes_to_another_instance() -> None:
    async with a_gateway() as gateway, a_function(echoes) as fake:
        gateway.deploy(a_deployment(), NOWHERE, fake)
        for _ in range(2):
            reader, writer = await gateway.connect()
            writer.write(b"POST /function/echo HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab")
            await asyncio.sleep(0.03)
            writer.write(b"cd")
            assert (await answer_of(reader)).body == b"abcd"


async def test_call_that_may_have_begun_is_repeated_only_if_declared_repeatable() -> None:
    answers = [writes(close=True), says(b"second")]

    async def behave(got: Got, writer: asyncio.StreamWriter) -> None:
        await answers[len(fake.got) - 1](got, writer)

    async with a_gateway() as gateway, a_function(behave) as fake:
        gateway.deploy(a_deployment(), fake)
        assert (await gateway.call(body=b"x")).status == 502
        fake.got.clear()
        gateway.deploy(a_deployment(retry="idempotent"), fake)
        assert (await gateway.call(body=b"x")).body == b"second"
        assert [got.body for got in fake.got] == [b"x", b"x"]


async def test_call_behind_a_broken_one_is_repeated_elsewhere_if_the_instance_has_ended() -> None:
    async with (
        a_gateway() as gateway,
        a_function(writes(close=True)) as ended,
        a_function(says(b"second"), "i1") as second,
    ):
        ended.health = writes(close=True)  # as of a process whose listening socket closes last
        gateway.deploy(a_deployment(), ended)
        assert (await gateway.call()).status == 502
        gateway.deploy(a_deployment(), ended, second)
        assert [(await gateway.call()).body for _ in range(4)] == [b"second"] * 4
        assert len(ended.got) == 1


async def test_answer_says_how_the_process_ended_and_where_its_log_is_when_a_call_breaks_off() -> (
    None
):
    exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def die(got: Got, writer: asyncio.StreamWriter) -> None:
        asyncio.get_running_loop().call_later(0.02, exited.set_result, "was ended by SIGSEGV")
        await writes(close=True)(got, writer)

    async with a_gateway() as gateway, a_function(die) as fake:
        fake.endpoint = fake.endpoint._replace(exited=exited)
        gateway.deploy(a_deployment(), fake)
        said = await gateway.call()
        assert (said.status, said.body.decode()) == (
            502,
            "echo.openfaas-fn was ended by SIGSEGV while it answered; its log: faas-cli logs echo,"
            f" call {said.header('x-call-id')}",
        )


async def test_answer_says_that_an_instance_broke_off_when_its_process_lives() -> None:
    async with a_gateway() as gateway, a_function(writes(close=True)) as fake:
        lives: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        fake.endpoint = fake.endpoint._replace(exited=lives)
        gateway.deploy(a_deployment(), fake)
        said = await gateway.call()
        assert said.body.decode() == (
            "echo.openfaas-fn broke off: it closed the connection; its log: faas-cli logs echo,"
            f" call {said.header('x-call-id')}"
        )


async def test_instance_that_lives_gets_the_calls_behind_a_broken_one() -> None:
    answers = [writes(close=True), says(b"second"), says(b"third")]

    async def behave(got: Got, writer: asyncio.StreamWriter) -> None:
        await answers[len(fake.got) - 1](got, writer)

    async with a_gateway() as gateway, a_function(behave) as fake:
        function = gateway.deploy(a_deployment(), fake)
        assert (await gateway.call()).status == 502
        assert function.instances[0].doubted_since_s
        assert (await gateway.call()).body == b"second"
        assert not function.instances[0].doubted_since_s
        fake.health = writes(close=True)  # it is not asked again
        assert (await gateway.call()).body == b"third"
        assert fake.connections == 2  # the health request's connection is kept


async def test_health_answer_without_end_holds_up_no_call() -> None:
    answers = [writes(close=True), says(b"second")]

    async def behave(got: Got, writer: asyncio.StreamWriter) -> None:
        await answers[len(fake.got) - 1](got, writer)

    async with a_gateway() as gateway, a_function(behave) as fake:
        begun = b"HTTP/1.1 200 X\r\ncontent-length: 9000000\r\n\r\n" + bytes(1 << 20)
        fake.health = writes(begun, 30.0)
        gateway.deploy(a_deployment(timeout="20s"), fake)
        assert (await gateway.call()).status == 502
        assert (await gateway.call()).body == b"second"


async def test_kept_connection_that_was_closed_is_not_used() -> None:
    async with a_gateway() as gateway, a_function(says()) as fake:
        gateway.deploy(a_deployment(), fake)
        await gateway.call()
        for writer in list(fake.writers):
            writer.close()
        await eventually(lambda: kept_connections(gateway.client) == 0)
        assert (await gateway.call()).status == 200
        assert fake.connections == 2


async def test_kept_connection_is_closed_when_it_speaks_unasked_or_is_long_unused() -> None:
    async with a_gateway() as gateway, a_function(says()) as fake:
        gateway.deploy(a_deployment(), fake)
        await gateway.call()
        for writer in list(fake.writers):
            writer.write(b"HTTP/1.1 200 X\r\n\r\n")
        await eventually(lambda: kept_connections(gateway.client) == 0)
        assert (await gateway.call()).body == b"ok"
        assert kept_connections(gateway.client) == 1
    async with a_gateway(idle_s=0.2) as gateway, a_function(says()) as fake:
        gateway.deploy(a_deployment(), fake)
        assert (await gateway.call()).body == b"ok"
        await eventually(lambda: kept_connections(gateway.client) == 0 and not fake.writers)


async def test_call_times_out_before_the_answer() -> None:
    async with a_gateway() as gateway, a_function(says(delay_s=30)) as fake:
        function = gateway.deploy(a_deployment(timeout="50ms"), fake)
        began_s = time.monotonic()
        result = await gateway.call()
        assert (result.status, result.body.decode()) == (
            504,
            "echo.openfaas-fn did not answer within 0.05 s; its log: faas-cli logs echo,"
            f" call {result.header('x-call-id')}",
        )
        assert 0.04 < time.monotonic() - began_s < 20
        assert function.inflight == 0
        gateway.deploy(a_deployment("5ms"), fake)
        assert (await gateway.call()).status == 504


async def test_answer_is_cut_when_time_is_over_or_function_breaks_off() -> None:
    async with a_gateway() as gateway, a_function(writes(BEGUN, 30.0)) as fake:
        gateway.deploy(a_deployment(timeout="6s"), fake)
        with pytest.raises(asyncio.IncompleteReadError):
            await gateway.call()
        fake_too = a_function(writes(BEGUN, 0.02, close=True), "i1")
        async with fake_too as broken:
            gateway.deploy(a_deployment(), broken)
            with pytest.raises(asyncio.IncompleteReadError):
                await gateway.call()
        text = gateway.meters.text().decode()
        assert (
            'gateway_cut_answers_total{function_name="echo.openfaas-fn",why="TimedOut"} 1.0' in text
        )
        assert 'function_name="echo.openfaas-fn",why="Unreachable"} 1.0' in text


async def test_function_is_left_when_its_caller_leaves() -> None:
    async with a_gateway() as gateway, a_function(writes(BEGUN, 30.0)) as fake:
        function = gateway.deploy(a_deployment(), fake)
        reader, writer = await gateway.connect()
        writer.write(GET)
        await head_of(reader)
        assert function.inflight == 1
        writer.close()
        await eventually(lambda: function.inflight == 0 and not fake.writers)
        assert b'code="499",function_name="echo.openfaas-fn"' in gateway.meters.text()


async def test_function_is_left_when_its_caller_leaves_whose_body_came_late() -> None:
    async with a_gateway() as gateway, a_function(writes(BEGUN, 30.0)) as fake:
        function = gateway.deploy(a_deployment(), fake)
        reader, writer = await gateway.connect()
        writer.write(b"POST /function/echo HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n")
        await asyncio.sleep(0.1)  # as behind `Expect: 100-continue`
        writer.write(b"ab")
        await head_of(reader)
        writer.close()
        await eventually(lambda: function.inflight == 0 and not fake.writers)


async def test_function_is_left_when_its_caller_leaves_in_the_middle_of_the_body() -> None:
    async with a_gateway() as gateway, a_function(echoes) as fake:
        function = gateway.deploy(a_deployment(), fake)
        reader, writer = await gateway.connect()
        writer.write(b"POST /function/echo HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nab")
        await head_of(reader)
        assert await chunk_of(reader) == b"ab"
        writer.close()
        await eventually(lambda: function.inflight == 0 and not fake.writers)


async def test_body_beyond_the_limit_is_refused() -> None:
    async with a_gateway(max_body_bytes=100_000) as gateway, a_function(echoes) as fake:
        function = gateway.deploy(a_deployment(), fake)
        assert (await gateway.call(body=bytes(100_001))).status == 413
        assert not fake.got
        piece = b"%x\r\n%b\r\n" % (60_000, bytes(60_000))
        chunked = await gateway.call(
            headers=["Transfer-Encoding: chunked"], raw_body=piece + b"0\r\n\r\n"
        )
        assert (chunked.status, len(chunked.body)) == (200, 60_000)
        assert function.inflight == 0


async def test_streamed_body_beyond_the_limit_is_refused_before_the_answer() -> None:
    async with a_gateway(max_body_bytes=100_000) as gateway, a_function(says()) as fake:
        gateway.deploy(a_deployment(), fake)
        piece = b"%x\r\n%b\r\n" % (60_000, bytes(60_000))
        reader, writer = await gateway.connect()
        writer.write(
            b"POST /function/echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        writer.write(piece)
        await eventually(lambda: len(fake.got) == 1)
        writer.write(piece)
        assert (await answer_of(reader)).status == 413
        await eventually(lambda: not fake.writers)


async def test_function_that_answers_before_the_body_has_come_is_used() -> None:
    early = b"HTTP/1.1 403 X\r\ncontent-length: 2\r\n\r\nno"

    async def behave(got: Got, writer: asyncio.StreamWriter) -> None:
        assert got.method == "POST"
        writer.write(early)
        await writer.drain()
        while await got.reader.read(9):
            pass
        raise ConnectionResetError

    async with a_gateway() as gateway, a_function(behave) as fake:
        gateway.deploy(a_deployment(), fake)
        reader, writer = await gateway.connect()
        writer.write(b"POST /function/echo HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\nab")
        result = await answer_of(reader)
        assert (result.status, result.body) == (403, b"no")
        await eventually(lambda: not fake.writers)
        assert kept_connections(gateway.client) == 0


async def test_direct_call_answers_streams_and_fails() -> None:
    async with a_gateway() as gateway, a_function(echoes) as fake:
        function = gateway.deploy(a_deployment(), fake)
        headers = [(b"content-length", b"99"), (b"x-call-id", b"job")]
        answer = await gateway.invoke.direct("POST", b"/function/echo/p", b"q=1", headers, b"body")
        assert answer.status == 200
        assert (b"x-call-id", b"job") in answer.headers
        assert b"".join([piece async for piece in answer.body]) == b"body"
        assert (fake.got[0].target, fake.got[0].header("content-length")) == ("/p?q=1", "4")
        assert (function.inflight, kept_connections(gateway.client)) == (0, 1)
        gateway.deploy(a_deployment(), NOWHERE)
        with pytest.raises(Unreachable):
            await gateway.invoke.direct("POST", b"/function/echo", b"", [], b"")
        assert function.inflight == 0


async def test_direct_call_times_out_before_and_in_the_answer() -> None:
    async with a_gateway() as gateway, a_function(says(delay_s=30)) as slow:
        function = gateway.deploy(a_deployment(timeout="50ms"), slow)
        with pytest.raises(TimedOut):
            await gateway.invoke.direct("POST", b"/function/echo", b"", [], b"")
        async with a_function(writes(BEGUN, 30.0), "i1") as stuck:
            gateway.deploy(a_deployment(timeout="6s"), stuck)
            answer = await gateway.invoke.direct("POST", b"/function/echo", b"", [], b"")
            assert await anext(answer.body) == b"ab"
            await eventually(lambda: not function.inflight, "although the response is not read")
            with pytest.raises(TimedOut):
                await anext(answer.body)


async def test_direct_call_ends_with_its_caller_that_is_cancelled_twice() -> None:
    async with a_gateway() as gateway, a_function(says(delay_s=30)) as slow:
        function = gateway.deploy(a_deployment(), slow)
        calling = asyncio.create_task(
            gateway.invoke.direct("POST", b"/function/echo", b"", [], b"")
        )
        await eventually(lambda: bool(slow.got))
        calling.cancel()
        await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await eventually(lambda: not function.inflight)
        assert 'code="499"' in gateway.meters.text().decode()  # it was not answered


async def test_direct_call_ends_with_its_caller_and_its_end_is_recorded() -> None:
    async with a_gateway() as gateway, a_function(says(delay_s=30)) as slow:
        function = gateway.deploy(a_deployment(), slow)

        async def call() -> None:
            await gateway.invoke.direct("POST", b"/function/echo", b"", [], b"")

        for begins in (False, True):
            calling = asyncio.create_task(call())
            await asyncio.sleep(0)
            if begins:
                await eventually(lambda: len(slow.got) == 1)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            assert function.inflight == 0
        counted = b'{code="499",function_name="echo.openfaas-fn"} 2.0'
        assert b"gateway_function_invocation_total" + counted in gateway.meters.text()


async def test_connection_waits_when_the_backlog_is_full() -> None:
    """The kernel lets two wait for the function; 50 come at once."""
    async with a_gateway(connect_s=20.0) as gateway, a_function(says(), backlog=1) as fake:
        gateway.deploy(a_deployment(), fake)
        result = await asyncio.gather(*(gateway.call() for _ in range(50)))
        assert {one.status for one in result} == {200}


@pytest.mark.parametrize("status", [204, 304])
async def test_length_of_an_answer_without_a_body_breaks_nothing(status: int) -> None:
    wire = b"HTTP/1.1 %d X\r\ncontent-length: 5\r\n\r\n" % status
    async with a_gateway() as gateway, a_function(writes(wire)) as fake:
        function = gateway.deploy(a_deployment(), fake)
        result = await gateway.call()
        assert (result.status, result.header("content-length"), result.body) == (status, None, b"")
        assert gateway.meters.invocations_of(function.label) == 1
