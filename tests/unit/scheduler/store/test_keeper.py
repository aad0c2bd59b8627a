"""What is kept in the datastore of a running core, and how a new leader restores it."""

import time

import pytest
from msgspec.structs import asdict, replace

from cache_manager.model.ids import MIB, GpuId, ModelId, Tier
from scheduler.core.core import Core
from scheduler.model.events import (
    GpuLost,
    ModelLoaded,
    ModelRegistered,
    NodeSnapshot,
    PinAsked,
    RequestArrived,
    RunFinished,
    SlotFreed,
)
from scheduler.model.values import Configuration, CoreSettings, SlotId
from scheduler.store.keeper import RETURN_S
from scheduler.store.memory_store import MemoryStore
from scheduler.store.recovery import Recovered, recover
from scheduler.store.stored_records import HOUR_S, key
from scheduler.wire.codec import encoded
from scheduler.wire.model_records import model_record
from tests.kit.cores.builders import a_core, gpu, holding, model, request
from tests.kit.virtual_time import until, virtually
from tests.kit.worlds.kept_core import GONE, LOG, FailingStore, kept

DAY_S = 86_400


def two_gpus() -> Core:
    core = a_core(gpus=(), models=("a", "b", "c"))
    core.handle(holding(gpu("g0"), "a", "b"), 0.0)
    return core


def until_an_hour_begins_s() -> float:
    """So long until an hour of the calendar has begun a minute ago: none ends in a short test."""
    return -time.time() % HOUR_S + 60.0


@virtually
async def test_keeper_writes_status_order_and_finish_when_a_gpu_is_there() -> None:
    async with kept(two_gpus()) as made:
        await until(0.05)
        status = await made.read("gpus/g0")
        assert (status["status"], status["used_bytes"]) == ("idle", 2048 * MIB)
        order = [each["model"] for each in (await made.read("lru/g0"))["models"]]
        assert order == ["a", "b"]
        (finish,) = (await made.read("finish/g0"))["slots"]
        assert finish["slot"] == "g0"


@virtually
async def test_keeper_is_at_most_50_ms_behind_when_something_happens() -> None:
    async with kept(two_gpus()) as made:
        await until(1.0)
        free_s = (await made.read("finish/g0"))["slots"][0]["free_unix_s"]
        made.send(RequestArrived(request("r", "a")))
        await until(1.05)
        assert (await made.read("gpus/g0"))["status"] == "busy"
        assert [m["model"] for m in (await made.read("lru/g0"))["models"]] == ["b", "a"]
        later_s = (await made.read("finish/g0"))["slots"][0]["free_unix_s"]
        assert round(later_s - free_s, 3) == 2.0  # at 1.0 a run of 1 s began
        assert made.keeper.behind_s == 0.0


@virtually
async def test_keeper_writes_many_changes_at_once_and_nothing_when_nothing_differs() -> None:
    async with kept(two_gpus()) as made:
        made.clock.ahead_s = until_an_hour_begins_s()
        await until(1.0)
        before = made.store.writes
        for number in range(10):
            made.send(RequestArrived(request(f"r{number}", "a")))
        await until(1.1)
        assert made.store.writes == before + 1
        made.keeper.touched()
        await until(1.2)
        assert made.store.writes == before + 1


@virtually
async def test_keeper_writes_what_happens_while_it_writes() -> None:
    async with kept(two_gpus()) as made:
        for at_ms in range(10, 100, 7):
            await until(at_ms / 1000)
            made.send(RunFinished(SlotId("g0"), ModelId("a"), 1, at_ms / 1000))
        await until(0.2)
        known_s = made.core.cluster.profiles.usual_run_s(ModelId("a"))
        assert (await made.read("models/a"))["usual_run_s"] == known_s


@virtually
async def test_keeper_takes_away_what_it_wrote_when_a_gpu_is_lost() -> None:
    async with kept(two_gpus()) as made:
        await until(1.0)
        made.send(GpuLost(GpuId("g0")))
        await until(1.1)
        for kind in ("gpus", "lru", "finish"):
            assert await made.read(f"{kind}/g0") == GONE
        assert await made.read("models/a") != GONE


@virtually
async def test_keeper_leaves_gpus_of_an_earlier_leader_some_time_to_come_back() -> None:
    store = FailingStore()
    await store.put("lru/g9", b'{"models":[]}')
    async with kept(two_gpus(), store) as made:
        await until(RETURN_S - 1)
        made.send(RequestArrived(request("r1", "a")))
        await until(RETURN_S - 0.5)
        assert await made.read("lru/g9") != GONE
        await until(RETURN_S + 1)
        made.send(RequestArrived(request("r2", "a")))
        await until(RETURN_S + 1.5)
        assert await made.read("lru/g9") == GONE


@virtually
async def test_keeper_writes_everything_back_when_the_store_was_away_and_lost_it_all() -> None:
    async with kept(two_gpus()) as made:
        await until(1.0)
        made.store.away = True
        made.send(RequestArrived(request("r", "a")))
        await until(10.0)
        assert made.keeper.behind_s > 8
        for stored_key in (await made.store.list("")).values:
            if stored_key != "leader":
                await made.store.delete(stored_key)
        made.store.away = False
        await until(11.0)
        assert (await made.read("gpus/g0"))["status"] == "busy"
        assert await made.read("models/b") != GONE
        assert made.keeper.behind_s == 0.0


@virtually
async def test_keeper_writes_everything_back_when_the_store_is_back_and_nothing_happens() -> None:
    async with kept(two_gpus()) as made:
        await until(1.0)
        made.store.away = True
        await until(2.0)
        await made.store.delete("models/b")
        made.store.comes_back()
        await until(3.0)
        assert await made.read("models/b") != GONE
    assert made.store.callbacks == []


@virtually
async def test_keeper_writes_nothing_and_reports_it_when_it_is_fenced_off() -> None:
    async with kept(two_gpus()) as made:
        await until(1.0)
        stale = made.fence
        await made.elect()
        made.fence = stale
        made.send(RequestArrived(request("r", "a")))
        await until(2.0)
        assert made.fenced_off
        assert (await made.read("gpus/g0"))["status"] == "idle"
        await made.elect()
        await until(3.0)
        assert (await made.read("gpus/g0"))["status"] == "busy"


@virtually
async def test_keeper_writes_once_more_when_it_ends() -> None:
    async with kept(two_gpus()) as made:
        await until(1.0)
        made.send(RequestArrived(request("r", "a")))
    assert (await made.read("gpus/g0"))["status"] == "busy"


@virtually
async def test_keeper_writes_more_models_than_one_write_takes() -> None:
    core = two_gpus()
    for number in range(250):
        core.handle(ModelRegistered(model(f"m/{number}")), 0.0)
    async with kept(core) as made:
        await until(1.0)
        assert len((await made.store.list("models/")).values) == 253


@virtually
async def test_a_new_core_estimates_as_the_old_one_when_it_was_recovered() -> None:
    old = two_gpus()
    odd = ModelId("org/model v1%")
    async with kept(old) as made:
        made.send(ModelRegistered(model(odd, memory_mb=3, run_s={(4, "H200"): 0.25})))
        made.send(ModelLoaded(GpuId("g0"), ModelId("a"), 7.0, Tier.HOST, 99 * MIB))
        made.send(RunFinished(SlotId("g0"), ModelId("a"), 2, 0.5, 77 * MIB))
        for sizes in (Configuration(4, 2, 3), Configuration(2, 1, 1)):
            made.send(RunFinished(SlotId("g0"), ModelId("b"), 2, 0.5, configuration=sizes))
        await until(0.1)
        found = await recover(made.store, LOG)
    new = a_core(gpus=(), models=())
    found.restore(new)
    before, after = old.cluster.profiles, new.cluster.profiles
    for each in (ModelId("a"), ModelId("b"), odd):
        again, known = (model_record(them.known[each], 0) for them in (after, before))
        assert again == known
    configured = after.known[ModelId("b")].configured_s
    assert len(configured) == 2
    configured_before = before.known[ModelId("b")].configured_s  # the oldest leaves first
    assert list(configured) == list(configured_before)
    new.handle(ModelRegistered(model("a", memory_mb=1, run_s={(2, "any"): 99.0})), 0.0)
    assert after.known[ModelId("a")].memory_bytes == 1024 * MIB  # what was measured stays
    assert after.run_s(ModelId("a"), 2, "any") == 0.5


@virtually
async def test_keeper_takes_away_models_that_were_not_used_for_too_long() -> None:
    async with kept(two_gpus()) as made:  # a and b are resident, c was registered
        await until(1.0)
        assert (await made.read("models/c"))["used_unix_s"] % 3600 == 0
        made.clock.ahead_s = 29 * DAY_S
        made.send(RunFinished(SlotId("g0"), ModelId("a"), 1, 0.5))
        await until(2.0)
        assert await made.read("models/c") != GONE
        made.send(GpuLost(GpuId("g0")))
        made.clock.ahead_s = 31 * DAY_S
        made.keeper.touched()
        await until(3.0)
        assert await made.read("models/c") == GONE
        assert GONE not in (await made.read("models/a"), await made.read("models/b"))
        made.store.comes_back()  # nor does it come back with a survey
        await until(4.0)
        assert await made.read("models/c") == GONE
        made.send(ModelRegistered(model("c")))
        await until(5.0)
        assert await made.read("models/c") != GONE


@virtually
async def test_keeper_keeps_models_in_use_when_they_are_kept_for_less_than_an_hour() -> None:
    async with kept(two_gpus(), keep_s=60.0) as made:
        until_hour_s = -time.time() % HOUR_S
        made.clock.ahead_s = until_hour_s + 1.0
        made.send(RunFinished(SlotId("g0"), ModelId("a"), 1, 0.5))
        await until(1.0)
        made.clock.ahead_s = until_hour_s + 3000.0  # in the same hour
        made.send(RunFinished(SlotId("g0"), ModelId("a"), 1, 0.7))
        await until(2.0)
        assert (await made.read("models/a"))["run"][0]["run_s"] > 0.5
        found = await recover(made.store, LOG, time.time() + made.clock.ahead_s - 60.0)
        assert ModelId("a") in found.profiles


@virtually
async def test_keeper_writes_a_models_use_once_an_hour_when_nothing_else_changes() -> None:
    async with kept(two_gpus()) as made:
        made.clock.ahead_s = until_an_hour_begins_s()
        await until(1.0)
        before = await made.read("models/b")
        made.clock.ahead_s += 2 * HOUR_S
        made.keeper.touched()
        await until(2.0)
        writes = made.store.writes
        after = await made.read("models/b")
        assert after["used_unix_s"] - before["used_unix_s"] == 2 * HOUR_S
        made.keeper.touched()
        await until(3.0)
        assert made.store.writes == writes


@virtually
async def test_models_of_an_earlier_leader_are_forgotten_when_they_are_too_old() -> None:
    store, now_s = FailingStore(), int(time.time())
    known = two_gpus().cluster.profiles.known[ModelId("a")]
    record = model_record(known, now_s - 40 * DAY_S)
    await store.put("models/old", encoded(record))
    await store.put("models/new", encoded(replace(record, used_unix_s=now_s - DAY_S)))
    found = await recover(store, LOG, now_s - 30 * DAY_S)
    assert list(found.profiles) == ["new"]
    core = a_core(gpus=(), models=())
    found.restore(core)
    async with kept(core, store) as made:
        await until(1.0)
        assert await made.read("models/old") == GONE
        assert (await made.read("models/new"))["used_unix_s"] == now_s - DAY_S


@virtually
async def test_residents_come_back_in_the_order_of_their_use_and_pinned_when_recovered() -> None:
    async with kept(two_gpus()) as made:
        made.send(RequestArrived(request("r", "a")))
        made.send(PinAsked(ModelId("b"), GpuId("g0")))
        await until(0.1)
        found = await recover(made.store, LOG)
    snapshot, *pins = found.take(holding(gpu("g0"), "c", "a", "b"))
    assert isinstance(snapshot, NodeSnapshot)
    assert [m for m, _ in snapshot.gpus[0].residents] == ["b", "a", "c"]
    assert pins == [PinAsked(ModelId("b"), GpuId("g0"))]
    again = holding(gpu("g0"), "a", "b")
    assert found.take(again) == [again]


@virtually
async def test_recovery_passes_over_what_makes_no_sense() -> None:
    store = MemoryStore()
    for value in (b"", b"7", b"{}", b'{"memory_bytes":-1}', b"\xff"):
        for stored_key in ("models/a", "lru/g0", "policy"):
            await store.put(stored_key, value)
        assert await recover(store, LOG) == Recovered()
    await store.put("policy", b'{"name":"nonsense","parameters":{},"chosen_by":"administrator"}')
    assert (await recover(store, LOG)).policy is None


def test_keys_differ_for_any_two_names() -> None:
    names = ["a/b", "a%2Fb", "a b", "ä", "sha256:0f", ""]
    keys = {key("models/", each) for each in names}
    assert len(keys) == len(names)
    assert key("models/", "sha256:0f") == "models/sha256:0f"


def with_gaps(*gaps_s: float) -> Core:
    """A core of which a model was idle for these times between its uses."""
    settings = CoreSettings(exit_rule="adaptive")
    core = a_core(models=("a",), settings=settings)
    now = 0.0
    for number, gap_s in enumerate((*gaps_s, 0.0)):
        core.handle(RequestArrived(request(f"r{number}", "a")), now)
        core.handle(RunFinished(SlotId("g0"), ModelId("a"), 1, 0.5), now + 0.9)
        core.handle(SlotFreed(SlotId("g0"), max(core.leases)), now + 1.0)
        now += 1.0 + gap_s
    return core


@virtually
async def test_gaps_between_uses_are_known_to_the_next_leader() -> None:
    core = with_gaps(3.0, 3.0, 100.0)
    async with kept(core) as made:
        await until(1.0)
        found = await recover(made.store, LOG)
    later = a_core(models=(), settings=CoreSettings(exit_rule="adaptive"))
    found.restore(later)
    gaps = later.cluster.profiles.known[ModelId("a")].gaps
    assert len(gaps.counts) == 2
    for (kind, count), (known, counted) in zip(
        gaps.counts, core.cluster.profiles.known[ModelId("a")].gaps.counts, strict=True
    ):
        assert kind == known
        assert abs(count - counted) < 1e-4


@virtually
async def test_nothing_is_kept_of_gaps_where_models_never_leave() -> None:
    async with kept(two_gpus()) as made:
        await until(1.0)
        assert "gaps" not in await made.read("models/a")


@pytest.mark.parametrize(
    "gaps", [[[60, 1.0]], [[-1, 1.0]], [[1, 1e9]], [[1, "inf"]], [[1, 0]], [[1]], 7, {"1": 2}]
)
@virtually
async def test_record_is_passed_over_when_nobody_can_have_seen_its_gaps(gaps: object) -> None:
    store = FailingStore()
    known = two_gpus().cluster.profiles.known[ModelId("a")]
    record = model_record(known, int(time.time()))
    await store.put("models/a", encoded(asdict(record) | {"gaps": gaps}))
    found = await recover(store, LOG)
    assert found.profiles == {}
