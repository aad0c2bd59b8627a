"""Sessions of one function that share a lease of several requests, each with a part of its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from scheduler.model.events import LeaseReleased, ModelRegistered
from scheduler.model.values import LeaseId, ModelSpec, Placement, RequestId
from tests.kit.nodes.in_memory_runtime import InMemoryHosted
from tests.kit.nodes.manager_client import ManagerClient, ManagerRefused, SealedWeights
from tests.kit.waiting import eventually
from tests.kit.worlds.callers_leases import given, token, uploaded
from tests.kit.worlds.cluster_in_process import Scheduler, a_scheduler, leases_of
from tests.kit.worlds.joined_manager import PATIENT, Joined, joined, model_of
from torch_shim.wire.protocol import FrameKind

pytestmark = [pytest.mark.timeout(180, func_only=True), pytest.mark.usefixtures("patient_streams")]

NAMES = ("gateway/1", "gateway/2")
# Two requests take no longer than one.
RUN_S = tuple((batch, "any", 0.5) for batch in (1, 2))


@dataclass
class Shared:
    """A lease of two requests of one function."""

    it: Scheduler
    node: Joined
    image: SealedWeights
    placement: Placement

    async def session(self, request: str, name: str) -> ManagerClient:
        """A session of this name, which has claimed the part of this request."""
        client = await self.node.client(session=name)
        await self.claim(client, request)
        return client

    async def claim(self, client: ManagerClient, request: str) -> int:
        shown = token(self.placement, request=request)
        answer, ends = await client.acquire(self.image.digest, token=shown)
        for end in ends:
            end.close()
        return int(answer["lease"])

    @property
    def hosted(self) -> InMemoryHosted:
        (found,) = self.node.runtime.hosted
        return found

    async def calls(self, client: str) -> None:
        await self.hosted.call(self.placement.lease, session=f"team/function/{client}")

    def in_force(self) -> bool:
        held = self.node.manager.node.leases.get(self.placement.lease)
        return held is not None and held.ending is None


@asynccontextmanager
async def shared(folder: Path) -> AsyncIterator[Shared]:
    """Two requests waited for a busy GPU, and togo gave them one lease."""
    it = await a_scheduler(policy="togo")
    async with joined(folder, it.url, leases=PATIENT) as node:
        _, image = await uploaded(node)
        first = await given(it, image, "gateway/0")
        it.driver.report(ModelRegistered(ModelSpec(model_of(image), run_s=RUN_S)))
        waiting = [given(it, image, name) for name in NAMES]
        await eventually(lambda: it.driver.status().waiting == len(waiting))
        it.driver.release(first.lease)
        one, other = [await each for each in waiting]
        assert one == other
        yield Shared(it, node, image, one)
        image.close()
    await it.stop()


def known(shared: Shared) -> set[RequestId]:
    return set(shared.it.core.requests)


async def test_each_session_gives_its_own_part_back(tmp_path: Path) -> None:
    async with shared(tmp_path) as it:
        one, two = await it.session(NAMES[0], "a"), await it.session(NAMES[1], "b")
        await it.calls("a")
        lease = it.placement.lease
        back = {"lease": lease, "may_return": True}
        await one.tell(FrameKind.RELEASE, back | {"request": NAMES[0]})
        await one.tell(FrameKind.RELEASE, back | {"request": NAMES[1]})  # that is not its own
        early = LeaseReleased(lease, may_return=True, request=RequestId(NAMES[0]))
        await eventually(lambda: early in it.it.events)
        await it.calls("b")
        assert it.in_force()
        it.it.driver.release(lease, RequestId(NAMES[0]))  # its caller, at the end of its call
        assert known(it) == {NAMES[1]}
        await two.tell(FrameKind.RELEASE, back)  # it names no request: all that the session has
        await eventually(lambda: not leases_of(it.it))
        it.it.driver.release(lease, RequestId(NAMES[1]))
        assert not known(it)


async def test_session_that_dies_leaves_the_lease_to_the_other_one(tmp_path: Path) -> None:
    async with shared(tmp_path) as it:
        one, two = await it.session(NAMES[0], "a"), await it.session(NAMES[1], "b")
        one.close()
        await eventually(lambda: known(it) == {NAMES[1]})
        await it.calls("b")
        assert it.in_force()
        two.close()
        await eventually(lambda: not known(it) and not leases_of(it.it))


async def test_callers_alone_end_a_lease_that_no_session_gives_back(tmp_path: Path) -> None:
    async with shared(tmp_path) as it:
        await it.session(NAMES[0], "a")
        it.it.driver.release(it.placement.lease, RequestId(NAMES[0]))
        it.it.driver.release(it.placement.lease, RequestId(NAMES[0]))  # repeated after a break
        assert known(it) == {NAMES[1]}
        assert it.in_force()
        it.it.driver.cancel(RequestId(NAMES[1]))
        await eventually(lambda: not leases_of(it.it))


async def test_part_of_a_request_is_one_session_s_alone(tmp_path: Path) -> None:
    async with shared(tmp_path) as it:
        await it.session(NAMES[0], "a")
        late = await it.node.client(session="c")
        with pytest.raises(ManagerRefused):
            await it.claim(late, NAMES[0])
        with pytest.raises(ManagerRefused):
            await it.claim(late, "gateway/9")
        assert await it.claim(late, NAMES[1]) == it.placement.lease
        stranger = await it.node.client("other", "d")
        with pytest.raises(ManagerRefused):
            await it.claim(stranger, NAMES[1])


async def test_both_requests_fail_when_their_worker_dies(tmp_path: Path) -> None:
    async with shared(tmp_path) as it:
        await it.session(NAMES[0], "a")
        await it.session(NAMES[1], "b")
        it.hosted.die()
        await eventually(lambda: not known(it) and not leases_of(it.it))
        counts = it.it.driver.status().counts.finished
        assert {str(outcome): count for outcome, count in counts.items()} == {
            "completed": 1,
            "failed": 2,
        }


async def test_two_calls_of_one_session_are_two_parts(tmp_path: Path) -> None:
    async with shared(tmp_path) as it:
        client = await it.session(NAMES[0], "a")
        await it.claim(client, NAMES[1])
        await client.tell(FrameKind.RELEASE, {"lease": it.placement.lease, "request": NAMES[0]})
        await eventually(lambda: known(it) == {NAMES[1]})
        assert it.in_force()
        client.close()
        await eventually(lambda: not known(it) and not leases_of(it.it))


async def test_next_leader_learns_who_has_the_lease_still(tmp_path: Path) -> None:
    async with shared(tmp_path) as it:
        one = await it.session(NAMES[0], "a")
        await one.tell(FrameKind.RELEASE, {"lease": it.placement.lease, "request": NAMES[0]})
        await eventually(lambda: known(it) == {NAMES[1]})
        (found,) = it.node.manager.node.snapshot().gpus
        assert [each.requests for each in found.leases] == [(NAMES[1],)]
        assert LeaseId(it.placement.lease) == found.leases[0].lease
