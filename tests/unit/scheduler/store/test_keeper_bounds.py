"""No record grows without a bound, and none that cannot be written keeps another one from it."""

import asyncio
import logging

import pytest
from msgspec.structs import replace

from cache_manager.model.ids import ModelId
from scheduler.core.core import Core
from scheduler.model.errors import BadValue
from scheduler.model.events import (
    GpuSnapshot,
    ModelRegistered,
    NodeSnapshot,
    RequestArrived,
    RunFinished,
)
from scheduler.model.profiles import MOST_RUNS
from scheduler.model.values import Configuration, CoreSettings, ModelSpec, SlotId
from scheduler.store.keeper import REFUSED_AGAIN_S
from scheduler.store.recovery import recover
from scheduler.store.stored_records import stored_model
from scheduler.wire.codec import encoded
from scheduler.wire.model_records import model_record
from tests.kit.cores.builders import a_core, gpu, holding, model, request
from tests.kit.virtual_time import until, virtually
from tests.kit.worlds.kept_core import GONE, LOG, FailingStore, kept

A, B = ModelId("a"), ModelId("b")
MANY = 20_000


def one_gpu(settings: CoreSettings | None = None) -> Core:
    core = a_core(gpus=(), models=("a", "b"), settings=settings)
    core.handle(holding(gpu("g0"), "a"), 0.0)
    return core


@virtually
async def test_many_batch_sizes_of_one_model_leave_a_small_record() -> None:
    async with kept(one_gpu()) as made:
        for batch in range(1, MANY):
            made.send(RunFinished(SlotId("g0"), A, batch, batch / 1000))
        made.send(RunFinished(SlotId("g0"), B, 1, 0.125))
        await until(1.0)
        runs = (await made.read("models/a"))["run"]
        assert len(runs) == MOST_RUNS
        assert (await made.read("models/b"))["run"][-1]["run_s"] != GONE
        profiles = made.core.cluster.profiles
        assert profiles.run_s(A, MANY - 1, "any") == pytest.approx((MANY - 1) / 1000)
        assert profiles.run_s(A, 2 * MANY, "any") > profiles.run_s(A, MANY - 1, "any")
        assert made.keeper.unwritten == 0


def test_batch_that_is_used_again_and_again_is_kept() -> None:
    core = one_gpu()
    for batch in range(1, MANY):
        core.handle(RunFinished(SlotId("g0"), A, batch, 1.0), 0.0)
        core.handle(RunFinished(SlotId("g0"), A, 1, 0.25), 0.0)
    known = core.cluster.profiles.known[A]
    assert known.run_s[1, "any"] == pytest.approx(0.25)
    assert known.measured_runs <= known.run_s.keys()


def test_declaration_of_many_batches_and_features_is_cut_and_replaces_no_measurement() -> None:
    core = one_gpu()
    core.handle(RunFinished(SlotId("g0"), A, 1, 0.25), 0.0)
    spec = ModelSpec(
        A,
        run_s=tuple((batch, "any", 9.0) for batch in range(1, MANY)),
        features={f"f{number}": 1.0 for number in range(MANY)},
    )
    core.handle(ModelRegistered(spec), 0.0)
    known = core.cluster.profiles.known[A]
    assert known.run_s[1, "any"] < 9.0
    assert len(known.run_s) == MOST_RUNS
    assert len(known.features) <= MOST_RUNS


def test_large_record_of_an_older_version_is_read_within_the_bounds() -> None:
    known = one_gpu().cluster.profiles.known[A]
    known.run_s = {(batch, "any"): 1.0 for batch in range(1, MANY)}
    assert len(stored_model(encoded(model_record(known, 0))).profile.run_s) == MOST_RUNS


def test_times_by_configuration_are_bounded_and_never_absurd() -> None:
    core = one_gpu()
    for batch in range(1, 200):
        given = Configuration(batch, 1, 2)
        core.handle(RunFinished(SlotId("g0"), A, batch, 0.25, configuration=given), 0.0)
    known = core.cluster.profiles.known[A]
    assert [key.batch for key, _ in known.configured_s] == [*range(200 - MOST_RUNS, 200)]
    record = model_record(known, 0)
    assert stored_model(encoded(record)).profile.configured_s == known.configured_s
    many = tuple(replace(run, vcpus=n) for run in record.configured for n in (1, 2))
    wide = stored_model(encoded(replace(record, configured=many)))
    assert len(wide.profile.configured_s) == MOST_RUNS
    none = replace(record, configured=(replace(many[0], vgpus=0),))
    with pytest.raises(BadValue):
        stored_model(encoded(none))


@virtually
async def test_record_that_the_store_refuses_keeps_no_other_from_being_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FailingStore()
    store.refused = {"models/a"}
    async with kept(one_gpu(), store) as made:
        await until(1.0)
        assert await made.read("models/a") == GONE
        assert await made.read("models/b") != GONE
        assert (await made.read("gpus/g0"))["status"] == "idle"
        made.send(RequestArrived(request("r", "a")))
        await until(2.0)
        assert (await made.read("gpus/g0"))["status"] == "busy"
        assert made.keeper.unwritten == 1
        assert made.keeper.behind_s == 0.0
        assert caplog.text.count("models/a is not written") == 1
        store.refused.clear()
        made.send(RunFinished(SlotId("g0"), A, 1, 0.5))
        await until(3.0)
        assert await made.read("models/a") != GONE
        assert made.keeper.unwritten == 0


@virtually
async def test_refused_record_is_tried_again_after_a_minute_although_it_did_not_change() -> None:
    store = FailingStore()
    store.refused = {"models/a", "models/b", "gpus/g0"}
    async with kept(one_gpu(), store) as made:
        await until(1.0)
        assert made.keeper.unwritten == 3
        store.refused.clear()
        for second in range(2, 2 + round(REFUSED_AGAIN_S) + 2):
            made.keeper.touched()
            await until(second)
        assert made.keeper.unwritten == 0
        assert await made.read("models/a") != GONE


@virtually
async def test_record_that_is_too_large_is_not_sent_and_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = one_gpu()
    huge = {f"f{number}-{'x' * 100_000}": 1.0 for number in range(60)}
    async with kept(core) as made:
        with caplog.at_level(logging.ERROR):
            made.send(ModelRegistered(ModelSpec(A, features=huge)))
            made.send(RunFinished(SlotId("g0"), B, 1, 0.5))
            await until(1.0)
        assert await made.read("models/b") != GONE
        assert await made.read("models/a") == GONE
        assert made.keeper.unwritten == 1
        assert "models/a is not written" in caplog.text


@virtually
async def test_order_of_many_residents_is_cut_and_the_rest_counts_as_older() -> None:
    core = a_core(gpus=(), models=())
    spec = gpu("g0", memory_mb=80 * 1024)
    residents = tuple((ModelId(f"m{number}"), 1 << 20) for number in range(5000))
    core.handle(NodeSnapshot(spec.node, (GpuSnapshot(spec, residents),)), 0.0)
    async with kept(core) as made:
        await until(1.0)
        record = await made.read("lru/g0")
        assert len(record["models"]) + record["older"] == 5000
        found = await recover(made.store, LOG)
    shuffled = tuple(sorted(residents))
    (restored,) = found.take(NodeSnapshot(spec.node, (GpuSnapshot(spec, shuffled),)))
    assert isinstance(restored, NodeSnapshot)
    listed = len(record["models"])
    assert restored.gpus[0].residents[-listed:] == residents[-listed:]


@virtually
async def test_forgotten_models_leave_the_store_and_the_latest_are_recovered() -> None:
    async with kept(one_gpu(CoreSettings(most_models=10))) as made:
        for number in range(300):
            made.send(ModelRegistered(model(f"m{number:03}")))
            if number % 50 == 0:
                await asyncio.sleep(0.1)
        await until(10.0)
        stored = (await made.store.list("models/")).values
        assert len(stored) <= 12
        assert "models/m299" in stored
        assert "models/a" in stored  # it is resident
        assert made.keeper.unwritten == 0
        found = await recover(made.store, LOG)
        assert len(found.profiles) == len(stored)
