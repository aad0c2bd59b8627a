"""Leases end with the process that acquired them, and not while it is only reconnecting."""

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator

import pytest

from scheduler.service.access import ApiRole, token
from scheduler.service.streams import callers
from tests.kit.places import ROOT
from tests.kit.waiting import eventually
from tests.kit.worlds.service_world import SECRET, World, leading

pytestmark = pytest.mark.timeout(180, func_only=True)

_WHO = {"X-Gpufaas-Caller": "one"}
_REQUEST = {"request": "r", "function": "team/reader", "models": ["bert"]}
# Programs that acquire a lease and hold it, as a gateway does and as another program does.
_OVER_A_STREAM = """
import asyncio, sys
from tests.kit.worlds.waiting_caller import WaitingCaller
from scheduler.model.values import Request, RequestId

async def main():
    async with WaitingCaller([sys.argv[1]], sys.argv[2]) as client:
        await client.acquire(Request(RequestId("r"), "team/reader", ("bert",)))
        print("acquired", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""
_OVER_HTTP = f"""
import json, sys, time, urllib.request

def post(path, body, **more):
    headers = {{"Authorization": "Bearer " + sys.argv[2], "Content-Type": "application/json"}}
    asked = urllib.request.Request(sys.argv[1] + path, json.dumps(body).encode(), headers | more)
    return urllib.request.urlopen(asked)

present = post("/presence", {{"caller": "one"}})
present.readline()
post("/acquire", {_REQUEST}, **{_WHO}).read()
print("acquired", flush=True)
time.sleep(60)
"""


def leases(world: World) -> int:
    assert world.office is not None
    return len(world.office.core.leases)


@contextlib.asynccontextmanager
async def present(world: World, *held: int) -> AsyncIterator[None]:
    """The connection of a caller, from the leader's first line on."""
    fields = {"caller": "one", "leases": held}
    async with world.session.post(f"{world.url}/presence", json=fields) as answer:
        assert answer.status == 200
        await answer.content.readany()
        yield


@pytest.mark.parametrize("program", [_OVER_A_STREAM, _OVER_HTTP], ids=["stream", "http"])
async def test_lease_ends_when_the_process_of_its_caller_is_killed(program: str) -> None:
    async with leading() as world:
        bearer = token(SECRET, ApiRole.CALLER)
        holder = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, world.url, bearer), stdout=PIPE, cwd=ROOT
        )
        assert holder.stdout is not None
        assert await holder.stdout.readline() == b"acquired\n"
        assert leases(world) == 1
        holder.send_signal(signal.SIGKILL)
        await holder.wait()
        await eventually(lambda: leases(world) == 0, "the lease has ended")


async def test_lease_stays_while_its_caller_lives_and_goes_on_without_the_request() -> None:
    async with leading() as world, present(world):
        await world.acquire("r", headers=_WHO)
        await asyncio.sleep(2 * callers.RETURN_S)
        assert leases(world) == 1


async def test_lease_stays_when_its_caller_connects_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(callers, "RETURN_S", 6.0)  # a busy machine's caller is back late
    async with leading() as world:
        async with present(world):
            await world.acquire("r", headers=_WHO)
        async with present(world):
            await asyncio.sleep(callers.RETURN_S + 1.0)
            assert leases(world) == 1
            monkeypatch.setattr(callers, "RETURN_S", 0.1)
        await eventually(lambda: leases(world) == 0, "the lease has ended")


async def test_lease_of_an_earlier_leader_ends_with_its_caller_too() -> None:
    async with leading() as world:
        lease = (await world.acquire("r")).body["lease"]
        async with present(world, lease):
            pass
        await eventually(lambda: leases(world) == 0, "the lease has ended")


async def test_lease_of_another_caller_stays() -> None:
    async with leading() as world:
        await world.acquire("r", headers={"X-Gpufaas-Caller": "two"})
        async with present(world):
            pass
        await asyncio.sleep(2 * callers.RETURN_S)
        assert leases(world) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"caller": ""},
        {"caller": "one", "leases": "1"},
        {"caller": "one", "leases": ["1"]},
        {"caller": "one", "leases": list(range(5_000))},
        {"caller": "one", "more": 1},
    ],
)
async def test_presence_is_refused_when_its_body_is_malformed(fields: dict[str, object]) -> None:
    async with leading() as world:
        answer = await world.ask("POST", "/presence", fields)
        assert (answer.status, answer.body["error"]) == (400, "bad-request")


async def test_presence_ends_with_the_leaders_term() -> None:
    async with leading() as world:
        assert world.office is not None
        async with world.session.post(f"{world.url}/presence", json={"caller": "one"}) as answer:
            await answer.content.readany()
            world.office.close()
            await answer.content.read()
