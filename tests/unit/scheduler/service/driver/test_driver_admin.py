"""What people ask of a running scheduler, and what it shows of itself."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from cache_manager.model.ids import GpuId, ModelId, Tier
from scheduler.model.actions import Demote, Prepare
from scheduler.model.errors import EventRefused, RequestWithdrawn
from scheduler.model.events import EvictAsked, GpuDraining, ModelDemoted
from scheduler.model.values import CoreSettings, LeaseId, Request, RequestId
from scheduler.wire.cluster_status import DecisionCounts, LeaseStatus, ResidentStatus, SlotStatus
from tests.kit.cores.builders import GIB, a_core, gpu, model, request
from tests.kit.nodes.fake_node import FakeNode, fake_node
from tests.kit.virtual_time import outcome, until, virtually
from tests.kit.worlds.driver_stage import Stage, a_stage

BERT, T5 = ModelId("bert"), ModelId("t5")
G0 = GpuId("g0")


async def serve(stage: Stage, name: str, *models: str) -> None:
    """One request from its arrival to its end, a second later."""
    placement = await stage.driver.acquire(request(name, *models))
    await asyncio.sleep(1.0)
    stage.driver.release(placement.lease)
    await until(0.0)


# -- asked for ----------------------------------------------------------------------------------


@virtually
async def test_prefetched_model_is_a_hit_when_it_was_loaded() -> None:
    stage = a_stage()
    await stage.driver.prefetch(BERT)
    assert [order.prefetch for order in stage.nodes[0].given(Prepare)] == [True]
    await until(2.0)
    assert (await stage.driver.acquire(request("r0"))).hit
    assert stage.driver.status().counts.prefetches == 1


@virtually
async def test_request_waits_when_its_gpu_loads_ahead() -> None:
    stage = a_stage(fake_node("n0", gpu("g0", node="n0"), load_s=3.0))
    await stage.driver.prefetch(BERT)
    waiting = stage.ask(request("r0"))
    await until(2.9)
    assert not waiting.done()
    await until(3.0)
    assert waiting.result().hit


@virtually
async def test_prefetch_is_refused_when_the_gpu_is_not_idle() -> None:
    stage = a_stage(models=("bert", "t5"))
    await stage.driver.acquire(request("r0"))
    error = await outcome(stage.driver.prefetch(T5, G0))
    assert isinstance(error, EventRefused)
    assert error.reason == "that GPU is not idle"


@virtually
async def test_pinned_model_stays_when_room_is_needed_until_it_is_unpinned() -> None:
    stage = a_stage(
        fake_node("n0", gpu("g0", memory_mb=2048, node="n0")), models=("bert", "t5", "vgg")
    )
    await stage.driver.pin(BERT, G0)
    await until(2.0)
    await serve(stage, "r0", "t5")
    await serve(stage, "r1", "vgg")
    assert list(stage.nodes[0].residents[G0]) == ["bert", "vgg"]
    await stage.driver.unpin(BERT)
    await serve(stage, "r2", "t5")
    assert list(stage.nodes[0].residents[G0]) == ["vgg", "t5"]
    assert stage.nodes[0].wrong == []


@virtually
async def test_evicted_model_leaves_its_gpu() -> None:
    stage = a_stage()
    await serve(stage, "r0")
    await stage.driver.evict(BERT)
    assert stage.nodes[0].given(Demote) == [Demote(G0, BERT, "asked for")]
    assert stage.driver.status().gpus[0].residents == ()
    assert not (await stage.driver.acquire(request("r1"))).hit


@virtually
async def test_evict_is_refused_when_the_model_is_in_use() -> None:
    stage = a_stage()
    await stage.driver.acquire(request("r0"))
    error = await outcome(stage.driver.evict(BERT))
    assert isinstance(error, EventRefused)
    assert error.event == EvictAsked(BERT)
    assert "in use" in error.reason
    assert stage.nodes[0].given(Demote) == []


@virtually
async def test_unpin_is_refused_when_no_gpu_holds_the_model() -> None:
    stage = a_stage()
    assert isinstance(await outcome(stage.driver.unpin(BERT)), EventRefused)


@virtually
async def test_new_policy_places_the_requests_that_wait() -> None:
    stage = a_stage(core=a_core("lb", gpus=()))
    await stage.driver.acquire(request("r0"))
    waiting = stage.ask(request("r1"))
    await stage.driver.set_policy("lalbo3", {"o3_limit": 3})
    assert stage.driver.status().policy == "lalbo3"
    await until(1.0)
    stage.driver.release(LeaseId(1))
    await until(1.0)
    assert waiting.result().hit


@pytest.mark.parametrize(("policy", "parameters"), [("none", {}), ("lalbo3", {"o3_limit": -1})])
@virtually
async def test_policy_stays_when_another_one_is_refused(
    policy: str, parameters: dict[str, float]
) -> None:
    stage = a_stage()
    assert isinstance(await outcome(stage.driver.set_policy(policy, parameters)), EventRefused)
    assert stage.driver.status().policy == "lalbo3"


@virtually
async def test_order_is_refused_when_the_driver_is_closed() -> None:
    stage = a_stage()
    stage.driver.close()
    assert isinstance(await outcome(stage.driver.evict(BERT)), EventRefused)


class Interrupted(FakeNode):
    """Somebody asks for something while this node takes an order to load."""

    ask: Callable[[], Coroutine[object, None, object]]
    asking: Coroutine[object, None, object]
    answer: object = None

    def prepare(self, order: Prepare) -> None:
        super().prepare(order)
        self.asking = self.ask()
        self.answer = self.asking.send(None)


@virtually
async def test_order_is_carried_out_later_when_it_comes_in_the_middle_of_another_step() -> None:
    spec = gpu("g0", node="n0")
    node = Interrupted(spec.node, (spec,))
    stage = a_stage(node)
    node.ask = lambda: stage.driver.evict(BERT)
    assert (await stage.driver.acquire(request("r0"))).models == (BERT,)
    with pytest.raises(EventRefused, match="in use"):
        node.asking.send(None)


class Closing(Interrupted):
    """Somebody asks, and then the driver is closed."""

    close: Callable[[], None]

    def prepare(self, order: Prepare) -> None:
        super().prepare(order)
        self.close()


@virtually
async def test_order_is_refused_when_the_driver_is_closed_before_it_comes_to_it() -> None:
    spec = gpu("g0", node="n0")
    node = Closing(spec.node, (spec,))
    stage = a_stage(node)
    node.ask = lambda: stage.driver.evict(BERT)
    node.close = stage.driver.close
    assert isinstance(await outcome(stage.driver.acquire(request("r0"))), RequestWithdrawn)
    with pytest.raises(EventRefused, match="stopping"):
        node.asking.send(None)


class Impatient(Interrupted):
    """The caller gives up at once."""

    def prepare(self, order: Prepare) -> None:
        super().prepare(order)
        assert isinstance(self.answer, asyncio.Future)
        self.answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            self.asking.send(None)


@pytest.mark.parametrize("what", ["evict", "acquire"])
@virtually
async def test_driver_continues_when_no_caller_waits_for_a_refusal_any_more(what: str) -> None:
    spec = gpu("g0", node="n0")
    node = Impatient(spec.node, (spec,))
    stage = a_stage(node)
    if what == "evict":
        node.ask = lambda: stage.driver.evict(T5)
    else:
        node.ask = lambda: stage.driver.acquire(Request(RequestId("r1"), "function", ()))
    assert (await stage.driver.acquire(request("r0"))).gpu == "g0"
    assert stage.driver.status().counts.refusals == 1


# -- shown --------------------------------------------------------------------------------------


@virtually
async def test_status_shows_gpus_leases_queues_and_counts() -> None:
    stage = a_stage(core=a_core("rr", gpus=(), models=("bert", model("t5", memory_mb=2048))))
    await serve(stage, "r0", "t5")
    await stage.driver.acquire(request("r1"))
    stage.ask(request("r2"))
    await asyncio.sleep(0.5)
    status = stage.driver.status()
    assert (status.now_s, status.policy, status.nodes) == (1.5, "rr", ("n0",))
    assert (status.waiting, status.waiting_locally) == (0, 1)
    (shown,) = status.gpus
    assert (shown.id, shown.node, shown.gpu_type, shown.draining) == ("g0", "n0", "any", False)
    assert (shown.memory_bytes, shown.used_bytes, shown.withheld_bytes) == (8 * GIB, 3 * GIB, 0)
    assert shown.residents == (
        ResidentStatus(T5, 2 * GIB, used_s=0.0, leases=0, waiting=0, pinned=False),
        ResidentStatus(
            BERT, GIB, used_s=1.0, leases=1, waiting=1, pinned=False, runtime=None, process_models=0
        ),  # it is being loaded
    )
    lease = LeaseStatus(LeaseId(2), (BERT,), (RequestId("r1"),), (BERT,), released=False)
    assert shown.slots == (SlotStatus(shown.slots[0].id, 1, (lease,), (RequestId("r2"),), 3),)
    finished = {each.value: count for each, count in status.counts.finished.items()}
    assert finished == {"completed": 1}
    assert status.counts == DecisionCounts(misses=2, finished=status.counts.finished)


@virtually
async def test_status_shows_what_waits_globally_when_no_gpu_takes_it() -> None:
    stage = a_stage()
    stage.driver.detach(stage.nodes[0].name)
    stage.ask(request("r0"))
    await until(1.0)
    status = stage.driver.status()
    assert (status.waiting, status.waiting_locally, status.gpus, status.nodes) == (1, 0, (), ())


@virtually
async def test_status_shows_a_gpu_that_drains_until_its_lease_ends() -> None:
    stage = a_stage()
    held = await stage.driver.acquire(request("r0"))
    stage.driver.report(GpuDraining(G0))
    assert [shown.draining for shown in stage.driver.status().gpus] == [True]
    stage.driver.release(held.lease)
    await until(2.0)
    assert stage.driver.status().gpus == ()


@virtually
async def test_explained_request_is_logged_with_its_reasons(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    watched = CoreSettings(explain=frozenset({RequestId("r1")}))
    stage = a_stage(core=a_core("rr", gpus=(), settings=watched))
    await stage.driver.acquire(request("r0"))
    assert "Explanation" not in caplog.text
    stage.ask(request("r1"))
    await until(0.0)
    assert "Explanation(request='r1'" in caplog.text


@virtually
async def test_load_comes_from_host_memory_when_the_node_demoted_the_model_there() -> None:
    stage = a_stage()
    await serve(stage, "r0")
    await stage.driver.evict(BERT)
    await until(2.0)
    assert [event for _, event in stage.events if isinstance(event, ModelDemoted)] != []
    await stage.driver.acquire(request("r1"))
    sources = [load.source for order in stage.nodes[0].given(Prepare) for load in order.loads]
    assert sources == [Tier.ABSENT, Tier.HOST]
