"""What is left of calls: nothing, also before the garbage collector runs."""

import asyncio
import gc
import logging
import sys
from collections.abc import Iterator

import pytest

from gateway_ext.calls.exchange import Exchange, InvokeSettings, RequestBody
from gateway_ext.calls.invoke import close_body
from gateway_ext.calls.passed_headers import RequestHeaders
from gateway_ext.errors import GatewayError
from tests.kit.fakes.fake_function import Got, a_function, echoes, writes
from tests.kit.waiting import eventually
from tests.kit.without_collector import without_collector
from tests.kit.worlds.calling import Gateway, a_deployment, a_gateway

pytestmark = pytest.mark.timeout(180, func_only=True)

BODY_BYTES = 1 << 14  # comes with its head: the time of a call that hangs ends behind both
TIMES = 10


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Nor a log: pytest keeps the errors that were logged."""
    with without_collector():
        logging.disable()
        yield
        logging.disable(logging.NOTSET)


def exchanges() -> int:
    # `isinstance` would ask objects of other modules for their class, and some warn then.
    return sum(type(each) is Exchange for each in gc.get_objects())


async def hangs(got: Got, writer: asyncio.StreamWriter) -> None:
    del got
    while not writer.is_closing():
        await asyncio.sleep(0.01)


async def test_nothing_is_left_of_a_call_that_was_answered() -> None:
    async with a_gateway() as gateway, a_function(echoes) as fake:
        gateway.deploy(a_deployment(), fake)
        for _ in range(3):
            assert (await gateway.call(body=bytes(BODY_BYTES))).status == 200
            direct = await gateway.invoke.direct("POST", b"/function/echo", b"", [], b"x")
            await close_body(direct.body)

        await eventually(lambda: exchanges() == 0, "the exchanges are freed")


@pytest.mark.parametrize("breaks", [True, False], ids=["breaks off", "hangs"])
async def test_nothing_is_left_of_a_call_whose_function_fails(*, breaks: bool) -> None:
    behave = writes(close=True) if breaks else hangs
    async with a_gateway() as gateway, a_function(behave) as fake:
        gateway.deploy(a_deployment("20s" if breaks else "100ms"), fake)
        for _ in range(3):
            assert (await gateway.call(body=bytes(BODY_BYTES))).status == (502 if breaks else 504)

        await eventually(lambda: exchanges() == 0, "the exchanges are freed")


@pytest.mark.parametrize("breaks", [True, False], ids=["breaks off", "hangs"])
async def test_body_of_a_call_from_inside_is_freed_when_its_function_fails(*, breaks: bool) -> None:
    behave = writes(close=True) if breaks else hangs
    async with a_gateway() as gateway, a_function(behave) as fake:
        gateway.deploy(a_deployment("20s" if breaks else "100ms"), fake)
        body = bytearray(BODY_BYTES).hex().encode()
        before = sys.getrefcount(body)
        failure = await failed(gateway, body)

        assert failure == ("Unreachable" if breaks else "TimedOut")
        await eventually(lambda: sys.getrefcount(body) == before, "nobody has the body any more")


async def test_nothing_is_left_of_a_body_that_was_still_awaited() -> None:
    async def receive() -> dict[str, object]:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(), "more_body": True}
        await asyncio.Event().wait()
        return {}

    async def begin() -> None:
        pieces.append(b"x")
        body = RequestBody(RequestHeaders(length=2), receive, InvokeSettings(), lambda _: None)
        await body.begin()
        await asyncio.sleep(0)
        body.close()

    pieces: list[bytes] = []
    gc.collect()
    for _ in range(TIMES):
        await begin()
        await asyncio.sleep(0)
    assert gc.collect() < TIMES


async def failed(gateway: Gateway, body: bytes) -> str:
    """The kind of the failure; its traceback is gone with this call."""
    try:
        await gateway.invoke.direct("POST", b"/function/echo", b"", [], body)
    except GatewayError as error:
        return type(error).__name__
    return ""
