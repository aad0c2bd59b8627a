"""The policy that is chosen in the datastore, and the leader that follows it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from scheduler.model.errors import BadParameter, EventRefused, UnknownPolicy
from scheduler.model.events import PolicySet
from scheduler.recording import RecordedStep, parsed
from scheduler.service.history.recorder import RunRecorder
from scheduler.service.leadership import election
from scheduler.service.leadership.policy_in_force import (
    PolicyInForce,
    Written,
    set_policy,
)
from scheduler.service.scheduler_service import SchedulerService
from scheduler.settings import Settings
from scheduler.store.datastore import Fence, StoreLease
from scheduler.store.memory_store import MemoryStore
from scheduler.store.recovery import recover
from scheduler.store.stored_records import (
    ADMINISTRATOR,
    CONFIGURATION,
    POLICY,
    PolicyChoice,
    policy_choice,
)
from tests.kit.virtual_time import until, virtually
from tests.kit.waiting import eventually
from tests.kit.worlds.service_world import SECRET

pytestmark = pytest.mark.timeout(180, func_only=True)

LOG = logging.getLogger("tests.policy")
LALBO3 = PolicyChoice("lalbo3", {}, CONFIGURATION)


class Follower:
    """A leader that applies what is chosen, unless it is set to refuse."""

    def __init__(self, fence: Fence | None = None) -> None:
        self.fence = fence
        self.applied: list[tuple[str, dict[str, float]]] = []
        self.refuses = False

    async def apply(self, choice: PolicyChoice) -> None:
        if self.refuses:
            raise EventRefused(choice, "set to refuse")
        self.applied.append((choice.name, dict(choice.parameters)))

    def made(self, store: MemoryStore, begun_with: PolicyChoice = LALBO3) -> PolicyInForce:
        return PolicyInForce(begun_with, self.apply, store, lambda: self.fence, LOG)

    @asynccontextmanager
    async def follows(self, store: MemoryStore, begun_with: PolicyChoice) -> AsyncIterator[None]:
        self.in_force = self.made(store, begun_with)
        following = asyncio.create_task(self.in_force.follow())
        await asyncio.sleep(0.01)
        yield
        assert not following.done()
        following.cancel()


async def stored(store: MemoryStore) -> PolicyChoice | None:
    value = await store.get(POLICY)
    return None if value is None else policy_choice(value)


@virtually
async def test_a_policy_is_applied_with_its_parameters_when_it_is_set() -> None:
    store, follower = MemoryStore(), Follower()
    async with follower.follows(store, LALBO3):
        await set_policy(store, "lb", {})
        await set_policy(store, "lalbo3", {"o3_limit": 3})
        await until(1)
        assert follower.applied == [("lb", {}), ("lalbo3", {"o3_limit": 3.0})]


@virtually
async def test_a_policy_is_applied_once_when_its_writer_and_the_datastore_both_report_it() -> None:
    store, follower = MemoryStore(), Follower()
    async with follower.follows(store, LALBO3):
        await follower.in_force.take(await set_policy(store, "lb", {}))
        await until(1)
        await follower.in_force.take(await set_policy(store, "rr", {}))
        assert follower.applied == [("lb", {}), ("rr", {})]


@virtually
async def test_the_last_policy_that_was_written_wins_when_its_writer_was_faster() -> None:
    store, follower = MemoryStore(), Follower()
    async with follower.follows(store, LALBO3):
        first = await set_policy(store, "lb", {})
        second = await set_policy(store, "rr", {})
        await follower.in_force.take(second)
        await follower.in_force.take(first)  # its writer was held up in between
        await until(1)
        assert follower.applied == [("rr", {})]
        assert (
            await stored(store) == follower.in_force.choice == PolicyChoice("rr", {}, ADMINISTRATOR)
        )


class SlowStore(MemoryStore):
    """A write takes a second to get there."""

    async def write(
        self,
        puts: Mapping[str, bytes],
        deletes: Iterable[str] = (),
        fence: Fence | None = None,
        lease: StoreLease | None = None,
    ) -> None:
        await asyncio.sleep(1.0)
        await super().write(puts, deletes, fence, lease)


class LosingStore(MemoryStore):
    """Its data may be lost, with its revisions."""

    def lose(self) -> None:
        vars(self).update(vars(MemoryStore()))


@virtually
async def test_administrators_choice_stays_when_the_leader_stores_its_own_at_that_moment() -> None:
    store, follower = SlowStore(), Follower()
    async with follower.follows(store, LALBO3):  # nothing is stored: it writes what is in force
        await follower.in_force.choose("rr", {})
        await until(5)
        assert follower.applied == [("rr", {})]
        assert await stored(store) == PolicyChoice("rr", {}, ADMINISTRATOR)


@virtually
async def test_policies_are_stored_and_applied_when_the_datastore_lost_its_data() -> None:
    store, follower = LosingStore(), Follower()
    in_force = follower.made(store)
    for _ in range(9):
        await store.put("heartbeat", b"")
    await in_force.choose("rr", {})
    store.lose()
    await in_force.reconcile(Written(None, 0))
    assert await stored(store) == PolicyChoice("rr", {}, ADMINISTRATOR)
    await in_force.reconcile(await set_policy(store, "lb", {}))
    await in_force.choose("lalb", {})
    assert follower.applied == [("rr", {}), ("lb", {}), ("lalb", {})]


@virtually
async def test_an_older_choice_is_ignored_when_it_arrives_late() -> None:
    store, follower = MemoryStore(), Follower()
    in_force = follower.made(store)
    older = await set_policy(store, "lb", {})
    await in_force.choose("rr", {})
    await in_force.reconcile(older)
    assert follower.applied == [("rr", {})]


@virtually
async def test_nothing_is_applied_when_the_policy_is_in_force_already() -> None:
    follower = Follower()
    in_force = follower.made(MemoryStore())
    await in_force.take(Written(LALBO3, 7))
    await in_force.take(Written(None, 8))
    assert follower.applied == []


@virtually
async def test_nothing_is_stored_when_the_policy_or_a_parameter_does_not_exist() -> None:
    store = MemoryStore()
    with pytest.raises(UnknownPolicy):
        await set_policy(store, "best", {})
    with pytest.raises(BadParameter):
        await set_policy(store, "lalbo3", {"limit": 3})
    assert await stored(store) is None


@virtually
async def test_an_administrators_choice_outlives_the_leader_when_the_next_is_configured_else() -> (
    None
):
    store = MemoryStore()
    await set_policy(store, "lb", {})
    chosen = (await recover(store, LOG)).begin_with(LALBO3)
    assert chosen == PolicyChoice("lb", {}, ADMINISTRATOR)
    async with Follower().follows(store, chosen):
        assert await stored(store) == chosen


@virtually
async def test_a_configured_policy_is_stored_and_gives_way_to_the_next_configuration() -> None:
    store, follower = MemoryStore(), Follower()
    async with Follower().follows(store, PolicyChoice("lb", {}, CONFIGURATION)):
        assert await stored(store) == PolicyChoice("lb", {}, CONFIGURATION)
    assert (await recover(store, LOG)).begin_with(LALBO3) == LALBO3
    async with follower.follows(store, LALBO3):
        assert await stored(store) == LALBO3
        assert follower.applied == []


@virtually
async def test_the_policy_in_force_is_stored_again_when_it_was_deleted_or_is_nonsense() -> None:
    store = MemoryStore()
    async with Follower().follows(store, LALBO3):
        await set_policy(store, "lb", {})
        await until(1)
        for spoilt in (b"nonsense", b'{"name":"best","parameters":{},"chosen_by":"me"}'):
            await store.put(POLICY, spoilt)
            await until(asyncio.get_running_loop().time() + 1)
            assert await stored(store) == PolicyChoice("lb", {}, ADMINISTRATOR)
        await store.delete(POLICY)
        await until(asyncio.get_running_loop().time() + 1)
        assert await stored(store) == PolicyChoice("lb", {}, ADMINISTRATOR)


@virtually
async def test_a_policy_that_is_refused_is_applied_when_it_is_set_again() -> None:
    store, follower = MemoryStore(), Follower()
    async with follower.follows(store, LALBO3):
        follower.refuses = True
        await set_policy(store, "lb", {})
        await until(1)
        follower.refuses = False
        await set_policy(store, "lb", {})
        await until(2)
        assert follower.applied == [("lb", {})]


@virtually
async def test_a_leader_that_was_fenced_off_stores_nothing() -> None:
    store = MemoryStore()
    async with Follower(Fence("leader", 99)).follows(store, LALBO3):
        assert await stored(store) is None


async def test_every_change_of_a_whole_scheduler_is_one_event_when_many_come_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the service, and past it through the datastore; the one written last is in force."""
    monkeypatch.setattr(election, "LEASE_TTL_S", 600)  # else a hold-up ends the term
    recorder = RunRecorder(tmp_path / "recording")
    service = SchedulerService(Settings(), SECRET, "s0", "http://127.0.0.1:1", recorder)
    store = MemoryStore()
    leading = asyncio.create_task(service.run(store))
    await eventually(lambda: service.health().leading)
    await service.set_policy("lb", {})
    await service.set_policy("lb", {})
    names = ("rr", "lalb", "rro3", "lb", "rr")
    await asyncio.gather(*(service.set_policy(name, {}) for name in names))
    await set_policy(store, "netgain", {})
    office = service.office()
    await eventually(lambda: office.core.placer.policy_name == "netgain")
    leading.cancel()
    recorder.close()
    lines = (tmp_path / "recording").read_text().splitlines()
    steps = [step for step in map(parsed, lines) if isinstance(step, RecordedStep)]
    assert [step.event for step in steps] == [PolicySet(name) for name in ("lb", *names, "netgain")]
