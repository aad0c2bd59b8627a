"""Calls from inside whose bodies are read while they are sent."""

from collections.abc import AsyncIterator

import pytest

from gateway_ext.calls.invoke import Streamed
from gateway_ext.errors import BadRequest, QueueFailed
from tests.kit.fakes.fake_function import a_function, echoes
from tests.kit.network.kept_connections import kept_connections
from tests.kit.waiting import eventually
from tests.kit.worlds.calling import Gateway, a_deployment, a_gateway

pytestmark = pytest.mark.timeout(180, func_only=True)

PIECE = bytes(range(256)) * 1024


async def pieces(count: int, error: Exception | None = None) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield PIECE
    if error is not None:
        raise error


async def read_all(gateway: Gateway, body: Streamed) -> bytes:
    answer = await gateway.invoke.direct("POST", b"/function/echo", b"", [], body)
    return b"".join([piece async for piece in answer.body])


async def test_streamed_body_arrives_whole_and_the_connection_is_kept() -> None:
    async with a_gateway() as gateway, a_function(echoes) as fake:
        function = gateway.deploy(a_deployment(), fake)
        body = Streamed(12 * len(PIECE), pieces(12))
        assert await read_all(gateway, body) == PIECE * 12
        assert fake.got[0].header("content-length") == str(12 * len(PIECE))
        assert (function.inflight, kept_connections(gateway.client)) == (0, 1)


@pytest.mark.parametrize("error", [QueueFailed("its body cannot be read"), None])
async def test_body_that_breaks_off_breaks_the_call_off(error: Exception | None) -> None:
    async with a_gateway() as gateway, a_function(echoes) as fake:
        function = gateway.deploy(a_deployment(), fake)
        body = Streamed(12 * len(PIECE), pieces(7, error))
        with pytest.raises(BadRequest if error is None else QueueFailed, match="body"):
            await read_all(gateway, body)
        await eventually(lambda: not fake.writers)
        assert (function.inflight, kept_connections(gateway.client)) == (0, 0)


async def test_call_whose_body_fails_unforeseen_is_counted_as_ended() -> None:
    async with a_gateway() as gateway, a_function(echoes) as fake:
        gateway.deploy(a_deployment(), fake)
        with pytest.raises(OSError, match="the disk"):
            await read_all(gateway, Streamed(12, pieces(0, OSError("the disk"))))
        ended = 'gateway_function_invocation_total{code="500",function_name="echo.openfaas-fn"} 1.0'
        assert ended in gateway.meters.text().decode()
