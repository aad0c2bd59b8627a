"""Operators' terms in the datastore: over restarts, changes of leader and outages."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import pytest

from scheduler.features.tenants import quotas
from scheduler.features.tenants.quotas import TERMS, Quotas, TermsBook, owner_terms
from scheduler.features.tenants.tenancy import Tenancy
from scheduler.model.errors import MalformedRequest, NotLeading, StoreUnavailable
from scheduler.model.events import TermsSet
from scheduler.model.owner_terms import OwnerTerms
from scheduler.recording import RecordedStep, parsed
from scheduler.service.history.recorder import RunRecorder
from scheduler.service.leadership import election
from scheduler.service.scheduler_service import SchedulerService
from scheduler.settings import Settings
from scheduler.store.datastore import Fence, StoreLease
from scheduler.store.memory_store import MemoryStore
from scheduler.store.recovery import sound_records
from scheduler.store.stored_records import key
from tests.kit.cores.builders import a_core
from tests.kit.cores.core_world import World
from tests.kit.virtual_time import until, virtually
from tests.kit.waiting import eventually
from tests.kit.worlds.service_world import SECRET
from tests.kit.worlds.term_parts import LOG, term_parts

pytestmark = pytest.mark.timeout(180, func_only=True)

ONE, TWO = OwnerTerms(leases=1), OwnerTerms(weight=2.5, priority=-1, gpu_s=30.0, window_s=10.0)
LEADER = "leader"


class Failing(MemoryStore):
    """A datastore that may be away, or do a write whose answer is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.away = self.loses_answers = False
        self._told: Callable[[bool], None] = lambda _: None

    def on_health_change(self, callback: Callable[[bool], None]) -> Callable[[], None]:
        self._told = callback
        return lambda: None

    def back(self) -> None:
        self.away = self.loses_answers = False
        self._told(True)

    async def write(
        self,
        puts: Mapping[str, bytes],
        deletes: Iterable[str] = (),
        fence: Fence | None = None,
        lease: StoreLease | None = None,
    ) -> None:
        if not self.away:
            await super().write(puts, deletes, fence, lease)
        if self.away or self.loses_answers:
            raise StoreUnavailable("away")


def kept_in(store: MemoryStore, fence: Fence | None = None) -> tuple[Quotas, TermsBook]:
    world = World(a_core())
    kept = Quotas(term_parts(world.core, lambda: world.now, world.send, store=store, fence=fence))
    return kept, kept.book


async def stored(store: MemoryStore) -> Mapping[str, OwnerTerms]:
    return await sound_records(store, TERMS, owner_terms, LOG)


async def test_terms_are_read_back_as_they_were_set() -> None:
    store = MemoryStore()
    kept, book = kept_in(store)
    async with kept.running():
        await kept.set("team", ONE)
        await kept.set("a b/ü%", TWO)
        assert await stored(store) == {"team": ONE, "a b/ü%": TWO} == book.of_operators
        await kept.set("team", None)
        assert await stored(store) == {"a b/ü%": TWO}


async def test_bad_record_is_left_out() -> None:
    store = MemoryStore()
    for owner, value in {"a": b"[", "b": b'{"weight":0.0}', "c": b'{"leases":2}'}.items():
        await store.put(key(TERMS, owner), value)
    assert await stored(store) == {"c": OwnerTerms(leases=2)}


async def test_further_owners_are_refused_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quotas, "MOST_OWNERS", 1)
    kept, book = kept_in(MemoryStore())
    async with kept.running():
        await kept.set("team", ONE)
        with pytest.raises(MalformedRequest, match="at most 1"):
            await kept.set("other", ONE)
        await kept.set("team", TWO)
        assert book.of_operators == {"team": TWO}


async def test_nothing_is_set_by_a_leader_that_was_followed_by_another() -> None:
    store = MemoryStore()
    await store.put(LEADER, b"another")
    kept, book = kept_in(store, Fence(LEADER, 77))
    async with kept.running():
        with pytest.raises(NotLeading):
            await kept.set("team", ONE)
    assert not await stored(store)
    assert not book.of_operators


@virtually
async def test_store_holds_what_is_in_force_when_it_is_back_from_an_outage() -> None:
    store = Failing()
    kept, book = kept_in(store)
    async with kept.running():
        await kept.set("team", ONE)
        store.away = True
        with pytest.raises(StoreUnavailable):
            await kept.set("team", TWO)
        assert book.of_operators == {"team": ONE}
        await store.delete(key(TERMS, "team"))  # as a datastore that has lost its data
        await store.put(key(TERMS, "former"), b"{}")
        await until(5)
        assert await stored(store) == {"former": OwnerTerms()}
        store.back()
        await until(10)
        assert await stored(store) == {"team": ONE}


@virtually
async def test_write_is_undone_when_it_was_done_and_its_answer_lost() -> None:
    store = Failing()
    kept, book = kept_in(store)
    async with kept.running():
        store.loses_answers = True
        with pytest.raises(StoreUnavailable):
            await kept.set("team", ONE)
        assert await stored(store) == {"team": ONE}
        store.loses_answers = False
        await until(5)
        assert not await stored(store)
        assert not book.of_operators


async def test_next_leader_begins_with_the_terms_and_records_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(election, "LEASE_TTL_S", 600)  # else a hold-up ends the term
    store = MemoryStore()
    recordings = [tmp_path / "first", tmp_path / "second"]
    for number, recording in enumerate(recordings):
        recorder, name = RunRecorder(recording), f"s{number}"
        service = SchedulerService(Settings(), SECRET, name, f"http://{name}", recorder)
        running = asyncio.create_task(service.run(store))
        await eventually(partial(leads, service))
        if number == 0:
            await service.feature(Quotas).set("team", TWO)
        assert service.office().core.layer(Tenancy).owners.terms == {"team": TWO}
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        recorder.close()
    steps = [parsed(line) for line in recordings[1].read_text().splitlines()]
    events = [step.event for step in steps if isinstance(step, RecordedStep)]
    assert events[0] == TermsSet("team", TWO)


def leads(service: SchedulerService) -> bool:
    return service.health().leading
