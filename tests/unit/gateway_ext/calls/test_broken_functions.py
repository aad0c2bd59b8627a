"""Calls of a function that does not start are refused at once; those of a slow one wait."""

import asyncio
import logging

import pytest

from gateway_ext.model import SlowStart, Troubles
from tests.kit.fakes.fake_function import a_function, says, writes
from tests.kit.waiting import eventually
from tests.kit.worlds.calling import a_deployment, a_gateway

pytestmark = pytest.mark.timeout(180, func_only=True)

BROKEN = Troubles(start="its handler cannot be imported: SyntaxError: expected ':'")
SHOWN = a_deployment(**{"show-errors": "true"})


async def test_call_is_refused_at_once_with_the_cause_and_the_log_when_nothing_can_start() -> None:
    async with a_gateway() as gateway:
        gateway.deploy(SHOWN, troubles=BROKEN)
        said = await gateway.call()
        assert said.status == 503
        assert BROKEN.start in said.body.decode()
        assert "faas-cli logs echo" in said.body.decode()


async def test_cause_is_not_told_to_strangers() -> None:
    async with a_gateway() as gateway:
        gateway.deploy(a_deployment(), troubles=BROKEN)
        said = await gateway.call()
        assert (said.status, "SyntaxError" in said.body.decode()) == (503, False)
        assert "it does not start; its log: faas-cli logs echo" in said.body.decode()


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        ("was killed: it took 412 MiB of memory, its limit is 400 MiB", "was killed while"),
        ("was ended by SIGSEGV: /var/lib/secret: failed", "was ended by SIGSEGV while"),
        ("exited with status 3: /var/lib/secret: failed", "exited with status 3 while"),
        ("No such container: secret", "broke off: it closed the connection;"),
    ],
)
async def test_cause_of_an_end_is_for_the_log_and_not_for_strangers(
    ended: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    exited.set_result(ended)
    async with a_gateway() as gateway, a_function(writes(close=True)) as fake:
        fake.endpoint = fake.endpoint._replace(exited=exited)
        gateway.deploy(a_deployment(), fake)
        answer = await gateway.call()
        said = answer.body.decode()
        assert said.startswith(f"echo.openfaas-fn {told}")
        assert (ended in said, ended in caplog.text) == (False, True)
        spans = gateway.invoke.tracer.spans(answer.header("x-call-id") or "")
        errors = [span.error for span in spans if span.error]
        assert errors
        assert all(ended in error for error in errors)
        gateway.deploy(SHOWN, fake)
        assert ended in (await gateway.call()).body.decode()


async def test_calls_that_wait_are_refused_as_soon_as_nothing_can_start() -> None:
    async with a_gateway() as gateway:
        function = gateway.deploy(SHOWN)
        calls = [asyncio.create_task(gateway.call()) for _ in range(2)]
        await eventually(lambda: function.waiting == len(calls), "slow starts are waited for")
        gateway.deploy(SHOWN, troubles=BROKEN)
        assert [(await call).status for call in calls] == [503, 503]


async def test_answer_says_what_a_start_takes_long_for_and_where_the_log_is() -> None:
    async with a_gateway(wake_s=0.01) as gateway:
        began_s = asyncio.get_running_loop().time() - 74.0
        gateway.deploy(SHOWN, troubles=Troubles(slow=SlowStart("its module is imported", began_s)))
        said = (await gateway.call()).body.decode()
        assert "is ready: none came within 0.01 s: its module is imported, for 7" in said
        assert said.endswith(" s; its log: faas-cli logs echo")


async def test_call_waits_and_is_served_when_the_function_was_mended() -> None:
    async with a_gateway() as gateway, a_function(says(b"well")) as instance:
        gateway.deploy(SHOWN, troubles=BROKEN)
        function = gateway.deploy(SHOWN)  # deployed again: it starts
        call = asyncio.create_task(gateway.call())
        await eventually(lambda: function.waiting == 1, "the call waits")
        gateway.deploy(SHOWN, instance)
        assert (await call).body == b"well"


async def test_calls_are_served_by_what_still_runs_when_a_newer_version_does_not_start() -> None:
    async with a_gateway() as gateway, a_function(says(b"old")) as instance:
        gateway.deploy(SHOWN, instance, troubles=BROKEN)
        assert (await gateway.call()).body == b"old"


async def test_strangers_calls_fill_no_log_when_nothing_can_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "gateway_ext")
    async with a_gateway() as gateway:
        gateway.deploy(SHOWN, troubles=BROKEN)
        for _ in range(20):
            assert (await gateway.call()).status == 503
    (line,) = caplog.messages
    assert BROKEN.start in line
