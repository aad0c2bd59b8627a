"""Leases whose call has not come, while other calls of the function wait for a GPU."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from cache_manager.model.ids import ModelId
from gpu_manager.credentials import FunctionIdentity
from gpu_manager.node.leases import Lease, LeaseTimes
from gpu_manager.sessions.acquiring import Acquiring
from gpu_manager.sessions.sessions import ClientSession, session_key
from scheduler.api import LeaseTokens, Placement, Request, RequestId
from tests.kit.virtual_time import until, virtually
from tests.kit.worlds.gpu_node import OWNER, World, world
from torch_shim.wire.messages import Acquire, Release

SECRET = b"s" * 32
# With the usual second it would not show who waited for what.
PATIENT = LeaseTimes(claim_s=60.0)


def session(name: str, owner: FunctionIdentity = OWNER) -> ClientSession:
    return ClientSession(session_key(owner, name), owner)


@dataclass(slots=True)
class Stage:
    """A node whose sessions acquire leases of one model."""

    it: World
    acquiring: Acquiring
    model: ModelId

    @classmethod
    def of(cls, it: World) -> "Stage":
        tokens = LeaseTokens(SECRET)
        acquiring = Acquiring(it.node, it.driver, it.library, tokens, None)
        return cls(it, acquiring, it.add(16))

    def given(self, name: str) -> asyncio.Task[Placement]:
        """A lease that a gateway asks for on behalf of one call of the function."""
        request = Request(RequestId(name), str(OWNER), (self.model,), caller="gateway")
        return asyncio.ensure_future(self.it.driver.acquire(request))

    async def acquire(self, who: ClientSession) -> dict[str, Any]:
        """The answer to a session that asks for a lease by itself."""
        asked = Acquire([self.it.model(self.model).digest], 1, [])
        found, _ = await self.acquiring.acquire(who, asked, local=False)
        return found

    def held(self, lease: int) -> Lease:
        (found,) = [each for each in self.it.node.leases if each.id == lease]
        return found

    async def computing(self, name: str, run_s: float = 5.0) -> asyncio.Task[object]:
        """A call of the function that has a lease, and computes."""
        placement = await self.given(name)
        workers = await self.it.node.leases.when_loaded(placement)
        key = session(name).key
        assert self.it.node.leases.claim(placement.lease, key, workers.values(), given=True)
        return asyncio.create_task(self.it.runtime.of(self.model).call(placement.lease, run_s))

    @property
    def waiting(self) -> int:
        """How many requests wait at the scheduler."""
        status = self.it.driver.status()
        return status.waiting + status.waiting_locally


@virtually
async def test_session_takes_over_a_lease_of_its_function_that_nobody_claims() -> None:
    async with world(times=PATIENT) as it:
        stage = Stage.of(it)
        placement = await stage.given("r")
        await until(2.0)

        answer = await stage.acquire(session("a"))

        assert answer["lease"] == placement.lease
        assert stage.held(placement.lease).holders == {"team/function/a"}
        await it.runtime.of(stage.model).call(placement.lease)
        assert stage.waiting == 0


@virtually
async def test_session_that_waits_takes_over_what_is_granted_to_its_function_meanwhile() -> None:
    async with world(times=PATIENT) as it:
        stage = Stage.of(it)
        computing = await stage.computing("first")
        second = stage.given("second")
        asking = asyncio.create_task(stage.acquire(session("a")))
        await until(4.0)
        assert not asking.done()

        await computing

        assert (await asking)["lease"] == (await second).lease
        assert stage.waiting == 0


@virtually
async def test_calls_that_have_threads_compute_while_leases_of_others_are_unclaimed() -> None:
    async with world(times=LeaseTimes(claim_s=1.0)) as it:
        stage, streaming = Stage.of(it), session("a")
        without_thread = [stage.given(f"r{number}") for number in range(20)]
        await without_thread[0]
        await until(2.0)
        began_s = asyncio.get_running_loop().time()

        for _ in range(10):  # pieces of a stream, whose lease ends after each of them
            answer = await stage.acquire(streaming)
            await it.runtime.of(stage.model).call(answer["lease"], run_s=0.05)
            stage.acquiring.release(streaming, Release(answer["lease"]))

        # Behind twenty leases of which nobody makes use it would be twenty seconds.
        assert asyncio.get_running_loop().time() - began_s < 2.0
        for each in without_thread:
            each.cancel()


@virtually
async def test_call_that_comes_at_once_has_its_lease_although_a_session_waits() -> None:
    async with world(times=PATIENT) as it:
        stage = Stage.of(it)
        computing = await stage.computing("first")
        second = stage.given("second")
        asking = asyncio.create_task(stage.acquire(session("a")))
        await computing
        placement = await second
        await asyncio.sleep(PATIENT.pass_on_s / 2)
        workers = await it.node.leases.when_loaded(placement)
        own = session("own").key
        assert it.node.leases.claim(placement.lease, own, workers.values(), given=True)

        await asyncio.sleep(2 * PATIENT.pass_on_s)
        assert not asking.done()
        it.driver.release(placement.lease)
        assert (await asking)["lease"] > placement.lease


@virtually
async def test_lease_of_another_function_is_not_taken_over() -> None:
    async with world(times=PATIENT) as it:
        stage, stranger = Stage.of(it), FunctionIdentity("team", "stranger")
        placement = await stage.given("r")
        assert it.add(16, owner=stranger) == stage.model
        await until(2.0)
        answer = await stage.acquire(session("s", stranger))
        assert answer["lease"] > placement.lease


@virtually
async def test_lease_for_other_models_is_not_taken_over() -> None:
    async with world(times=PATIENT) as it:
        stage = Stage.of(it)
        placement = await stage.given("r")
        await until(2.0)
        stage.model = it.add(17)
        answer = await stage.acquire(session("a"))
        assert answer["lease"] > placement.lease


@virtually
async def test_call_under_a_lease_that_was_taken_over_goes_on_when_its_caller_ends_it() -> None:
    async with world(times=PATIENT) as it:
        stage = Stage.of(it)
        placement = await stage.given("r")
        await until(2.0)
        await stage.acquire(session("a"))
        worker = it.runtime.of(stage.model)
        calling = asyncio.create_task(worker.call(placement.lease, run_s=30.0))
        await asyncio.sleep(1.0)

        it.driver.release(placement.lease)

        await calling
        await asyncio.sleep(0.1)
        assert not worker.closed.done()
        assert it.idle()


@virtually
async def test_session_that_ends_while_it_waits_leaves_nothing() -> None:
    async with world(times=PATIENT) as it:
        stage = Stage.of(it)
        computing = await stage.computing("first")
        asking = asyncio.create_task(stage.acquire(session("a")))
        await until(4.0)
        assert stage.waiting == 1

        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.sleep(0.1)
        assert stage.waiting == 0
        await computing
        await asyncio.sleep(10.0)
        assert it.idle()
