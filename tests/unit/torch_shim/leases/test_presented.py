"""The lease that a request was given: when it goes back, and where the request gets another one."""

import asyncio
import base64
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpu_manager.api import FunctionIdentity
from gpu_manager.node.leases import LeaseTimes
from scheduler.model.events import LeaseReleased
from scheduler.model.values import LeaseId
from tests.kit.nodes.manager_client import SealedWeights
from tests.kit.waiting import eventually
from tests.kit.worlds.callers_leases import given, token, uploaded
from tests.kit.worlds.cluster_in_process import Scheduler, a_scheduler, leases_of
from tests.kit.worlds.joined_manager import Joined, joined
from torch_shim.leases import request_context
from torch_shim.leases.leasing import (
    ENOUGH,
    ClaimedLease,
    Habits,
    PresentedLease,
    ProcessLeases,
    SessionLease,
)
from torch_shim.leases.managers import Nodes
from torch_shim.weights import ModelImage
from torch_shim.wire.manager_session import ManagerSession
from torch_shim.wire.protocol import FrameKind

pytestmark = [pytest.mark.timeout(180, func_only=True), pytest.mark.usefixtures("patient_streams")]

LINGERING = LeaseTimes(linger_s=120.0)  # a lease is not idle because a test is held up


@dataclass
class Function:
    """One request of a function that is known to make one call of its model."""

    presented: PresentedLease
    nodes: Nodes
    habits: Habits
    image: SealedWeights

    async def call_lease(self) -> SessionLease | None:
        return await asyncio.to_thread(self.presented.lease_for, 1, self.bring)

    async def call(self) -> SessionLease:
        """A call that is answered."""
        call_lease = await self.call_lease()
        assert call_lease is not None
        call_lease.begin_call()
        call_lease.end_call(answered=True)
        return call_lease

    def bring(self, session: ManagerSession) -> ModelImage:
        session.control.ask(FrameKind.UPLOAD, self.image.offer, (), [self.image.descriptor])
        return ModelImage(self.image.digest, {})


@contextmanager
def request(
    it: Joined, image: SealedWeights, shown: str, *, sure: bool = True
) -> Iterator[Function]:
    """A request that shows this token; `sure` says whether the function has its habits."""
    nodes = Nodes(
        str(it.manager.addresses[0]),
        it.manager.credentials.issue(FunctionIdentity("team", "function")),
    )
    habits = Habits()
    for _ in range(ENOUGH if sure else 0):
        habits.finished([image.digest], 1)
    with request_context.given(nodes.own.address, shown):
        found = request_context.current()
        assert found is not None
        presented = PresentedLease(found, nodes, habits, ClaimedLease())
        found.at_end(presented.request_ended)
        yield Function(presented, nodes, habits, image)
    nodes.close()


def returned(it: Scheduler) -> list[int]:
    """The leases that were given back early."""
    events = [event for event in it.events if isinstance(event, LeaseReleased)]
    return [event.lease for event in events if event.may_return]


async def test_lease_goes_back_when_the_last_call_was_answered(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=LINGERING) as node:
        _, image = await uploaded(node)
        lease = await given(it, image)
        with request(node, image, token(lease)) as function:
            call_lease = await function.call()
            assert call_lease.lease.over
            await eventually(lambda: not leases_of(it))
            assert returned(it) == [lease.lease]
        assert function.habits.calls([image.digest]) == 1
        image.close()
    await it.stop()


def test_nothing_is_kept_of_requests_that_are_over() -> None:
    nodes = Nodes("unix:@gpufaas-nobody", "")
    leasing, kept = ProcessLeases(nodes), []
    for _ in range(3):
        with request_context.given("tcp:a:1", "x"):
            found = request_context.current()
            assert found is not None
            kept.append(weakref.ref(leasing.presented_by(found)))  # as a call does
            del found
    gc.collect()
    assert not any(reference() for reference in kept)  # it must not grow for ever


@pytest.mark.parametrize("why", ["not sure", "no answer", "another call runs", "another asks"])
async def test_lease_is_kept_when_a_further_call_may_come(tmp_path: Path, why: str) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=LINGERING) as node:
        _, image = await uploaded(node)
        lease = await given(it, image)
        with request(node, image, token(lease), sure=why != "not sure") as function:
            call_lease = await function.call_lease()
            assert call_lease is not None
            call_lease.begin_call()
            if why == "another call runs":
                call_lease.begin_call()
            if why == "another asks":
                function.presented.asking.acquire()  # as a call that waits
            call_lease.end_call(answered=why != "no answer")
            assert not call_lease.lease.over
            assert leases_of(it) == {lease.lease}
        image.close()
    assert returned(it) == []
    await it.stop()


async def test_request_learns_how_many_calls_it_made_when_it_ends(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=LINGERING) as node:
        _, image = await uploaded(node)
        lease = await given(it, image)
        with request(node, image, token(lease), sure=False) as function:
            for _ in range(3):
                await function.call()
            for _ in range(ENOUGH - 1):
                function.habits.finished([image.digest], 3)
            assert function.habits.calls([image.digest]) is None
        assert function.habits.calls([image.digest]) == 3
        image.close()
    await it.stop()


async def test_request_gets_another_lease_when_it_makes_a_further_call(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=LINGERING) as node:
        _, image = await uploaded(node)
        lease = await given(it, image)
        with request(node, image, token(lease)) as function:
            await function.call()
            second, third = await function.call(), await function.call()
            assert second.lease is third.lease
            assert second.lease.number > lease.lease
            assert leases_of(it) == {second.lease.number}
            assert function.habits.calls([image.digest]) is None
        it.driver.release(lease.lease)
        await eventually(lambda: not leases_of(it))
        assert returned(it) == [lease.lease]
        assert it.driver.status().counts.finished == {"completed": 1}
        image.close()
    await it.stop()


@pytest.mark.parametrize("reached", [True, False])
async def test_request_goes_to_another_node_when_its_own_is_busy(
    tmp_path: Path, *, reached: bool
) -> None:
    it = await a_scheduler()
    more: dict[str, Any] = {} if reached else {"advertise": ("unix:@gpufaas-nobody",)}
    async with joined(tmp_path, it.url, leases=LINGERING) as near:
        _, image = await uploaded(near)
        lease = await given(it, image)
        with request(near, image, token(lease)) as function:
            await function.call()
            await given(it, image, "gateway/2")
            async with joined(tmp_path, it.url, name="n1", leases=LINGERING, **more):
                await eventually(lambda: len(it.driver.status().gpus) == 2)
                call_lease = await function.call_lease()
                if reached:
                    assert call_lease is not None
                    assert call_lease.lease.session.node == "n1"
                    assert (await function.call()).lease is call_lease.lease
                    it.driver.release(lease.lease)
                else:  # it asks by itself from now on
                    assert call_lease is None
                    assert await function.call_lease() is None
                await eventually(lambda: len(leases_of(it)) == 1)
                assert it.driver.status().counts.finished == {"completed": 1}
        image.close()
    await it.stop()


async def test_request_asks_by_itself_when_its_caller_has_ended_it(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=LINGERING) as node:
        _, image = await uploaded(node)
        lease = await given(it, image)
        with request(node, image, token(lease)) as function:
            await function.call()
            it.driver.release(lease.lease)
            assert await function.call_lease() is None
        assert it.driver.status().counts.finished == {"completed": 1}
        image.close()
    await it.stop()


async def test_answer_stands_when_the_manager_is_gone_before_the_lease_goes_back(
    tmp_path: Path,
) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=LINGERING) as node:
        _, image = await uploaded(node)
        lease = await given(it, image)
        with request(node, image, token(lease)) as function:
            call_lease = await function.call_lease()
            assert call_lease is not None
            call_lease.begin_call()
            call_lease.lease.session.control.wire.socket.close()
            call_lease.end_call(answered=True)
            assert call_lease.lease.over
        image.close()
    await it.stop()


@dataclass
class StandingRequests:
    """Requests of one process that show the token of one lease that stands, one after the other."""

    it: Scheduler
    leasing: ProcessLeases
    nodes: Nodes
    image: SealedWeights
    lease: int
    shown: str

    @asynccontextmanager
    async def next(self) -> AsyncIterator[Function]:
        with request_context.given(self.nodes.own.address, self.shown):
            given_lease = request_context.current()
            assert given_lease is not None
            presented = self.leasing.presented_by(given_lease)
            yield Function(presented, self.nodes, Habits(), self.image)


@asynccontextmanager
async def standing_requests(tmp_path: Path) -> AsyncIterator[StandingRequests]:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=LINGERING) as node:
        _, image = await uploaded(node)
        lease = await given(it, image, caller="gateway")
        address = str(node.manager.addresses[0])
        nodes = Nodes(address, node.manager.credentials.issue(FunctionIdentity("team", "function")))
        yield StandingRequests(it, ProcessLeases(nodes), nodes, image, lease.lease, token(lease))
        nodes.close()
        image.close()
    await it.stop()


async def test_requests_with_one_token_share_what_the_first_one_claimed(tmp_path: Path) -> None:
    async with standing_requests(tmp_path) as requests:
        found = []
        for _ in range(ENOUGH + 3):  # more than after which a lease for one request goes back early
            async with requests.next() as function:
                found.append((await function.call()).lease)
        assert all(each is found[0] for each in found)
        assert returned(requests.it) == []
        assert leases_of(requests.it) == {requests.lease}


async def test_request_asks_by_itself_when_the_lease_that_stood_has_ended(tmp_path: Path) -> None:
    async with standing_requests(tmp_path) as requests:
        found = []
        for _ in range(2):
            async with requests.next() as function:
                found.append(await function.call_lease())
            requests.it.driver.release(LeaseId(requests.lease))
            await eventually(lambda: not leases_of(requests.it))
            assert found[0] is not None
            found[0].lease.over = True  # as a call does that the worker refuses
        assert found[1] is None


async def test_lease_is_used_without_asking_where_the_last_one_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    acquire = ManagerSession.acquire

    def counted(session: ManagerSession, digest: str, batch: int, token: Any, **more: Any) -> Any:
        asked.append(token)
        return acquire(session, digest, batch, token, **more)

    monkeypatch.setattr(ManagerSession, "acquire", counted)
    async with standing_requests(tmp_path) as requests:
        async with requests.next() as function:
            first = await function.call()
        requests.it.driver.release(LeaseId(requests.lease))
        await eventually(lambda: not leases_of(requests.it))
        lease = await given(requests.it, requests.image, "gateway/2", caller="gateway")
        known, requests.shown = requests.shown, token(lease, ahead=True)
        async with requests.next() as function:
            second = await function.call()
            assert asked == [known]
            assert (second.lease.number, second.lease.peer) == (lease.lease, first.lease.peer)
            second.lease.over = True  # as a call does that the worker refuses
            third = await function.call()
        assert asked == [known, requests.shown]
        assert (third.lease.number, third.lease.peer) == (lease.lease, first.lease.peer)


def test_few_claims_are_kept_whatever_tokens_come() -> None:
    leasing = ProcessLeases(Nodes("unix:@gpufaas-nobody", ""))
    first = leasing.claimed_by("first")
    assert leasing.claimed_by("first") is first
    for number in range(100):
        leasing.claimed_by(f"token {number}")
    assert leasing.claimed_by("first") is not first


@pytest.mark.parametrize("stands", ["true", "1", "null", "[]", '"yes"', "{}"])
def test_only_a_plain_truth_makes_a_lease_stand(stands: str) -> None:
    body = base64.urlsafe_b64encode(f'{{"node":"n0","stands":{stands}}}'.encode()).decode()
    assert request_context.claims_of(f"{body}.mac").stands is (stands == "true")


@pytest.mark.parametrize("lease", ["0", "-1", "true", '"7"', "1.5", str(1 << 62), "[7]"])
def test_only_a_lease_number_names_a_lease(lease: str) -> None:
    body = base64.urlsafe_b64encode(
        f'{{"node":"n0","gpu":"g","ahead":true,"lease":{lease}}}'.encode()
    ).decode()
    claims = request_context.claims_of(f"{body}.mac")
    assert (claims.node, claims.lease, claims.gpu) == ("n0", 0, "")
