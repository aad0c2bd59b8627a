"""Nodes through the driver: attached, lost, notified of contention, reporting inside an order."""

import logging
from collections.abc import Callable

import pytest

from cache_manager.model.ids import GpuId, ModelId
from scheduler.model.actions import Dispatch, EndLease, Prepare
from scheduler.model.errors import RequestWithdrawn
from scheduler.model.events import GpuJoined, GpuLost, MemoryPressure, ModelRegistered, SlotFreed
from scheduler.model.values import AfterLoss, RequestOutcome
from tests.kit.cores.builders import a_core, gpu, model, request
from tests.kit.nodes.fake_node import FakeNode, fake_node
from tests.kit.virtual_time import outcome, until, virtually
from tests.kit.worlds.driver_stage import a_stage

BERT = ModelId("bert")


def reported(node: FakeNode) -> list[tuple[float, bool]]:
    """The node's notices of contention, with their times to the millisecond."""
    return [(round(at_s, 3), waiting) for at_s, waiting in node.contentions]


def two_nodes() -> tuple[FakeNode, FakeNode]:
    """Each with one GPU; the least used one comes first by its name."""
    return fake_node("n0", gpu("g0", node="n0")), fake_node("n1", gpu("g1", node="n1"))


# -- losing nodes -------------------------------------------------------------------------------


@virtually
async def test_waiting_request_goes_elsewhere_when_its_node_is_detached() -> None:
    stage = a_stage(*two_nodes())
    held = [await stage.driver.acquire(request(name)) for name in ("r0", "r1")]
    waiting = stage.ask(request("r2"))
    await until(1.0)
    stage.driver.detach(held[0].node)
    await until(1.0)
    assert [gpu_now.id for gpu_now in stage.driver.status().gpus] == ["g1"]
    assert stage.driver.status().counts.finished == {RequestOutcome.FAILED: 1}
    stage.driver.release(held[1].lease)
    await until(2.0)
    assert waiting.result().node == "n1"


@virtually
async def test_orders_go_to_the_new_link_when_a_node_attaches_again() -> None:
    node = fake_node("n0", gpu("g0", node="n0"))
    stage = a_stage(node)
    await stage.driver.acquire(request("r0"))
    fresh = fake_node("n0", gpu("g0", node="n0"))
    stage.attach(fresh)
    assert stage.driver.status().counts.finished == {RequestOutcome.FAILED: 1}
    await stage.driver.acquire(request("r1"))
    assert [order.requests for order in fresh.given(Dispatch)] == [("r1",)]
    assert len(node.given(Dispatch)) == 1


@virtually
async def test_lease_lives_on_when_its_node_attaches_again_with_it() -> None:
    stage = a_stage()
    held = await stage.driver.acquire(request("r0"))
    stage.attach(stage.nodes[0])
    assert stage.driver.status().gpus[0].slots[0].leases[0].id == held.lease
    assert stage.driver.status().counts.finished == {}


@virtually
async def test_gpus_are_refused_when_their_node_is_not_attached() -> None:
    stage = a_stage()
    stranger = fake_node("n1", gpu("g1", node="n1"))
    stage.driver.report(stranger.snapshot())
    stage.driver.report(GpuJoined(stranger.specs[0]))
    assert [gpu_now.id for gpu_now in stage.driver.status().gpus] == ["g0"]
    assert stage.driver.status().counts.refusals == 2


@virtually
async def test_late_reports_change_nothing_when_their_node_is_lost() -> None:
    node = fake_node("n0", gpu("g0", node="n0"))
    stage = a_stage(node)
    held = await stage.driver.acquire(request("r0"))
    stage.driver.detach(node.name)
    node.end(held.lease)
    await until(3.0)
    assert stage.driver.status().gpus == ()
    assert stage.driver.status().counts.finished == {RequestOutcome.FAILED: 1}


# -- links that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["prepare", "grant"])
@virtually
async def test_caller_is_placed_elsewhere_when_the_link_fails_at_its_order(broken: str) -> None:
    nodes = two_nodes()
    nodes[0].breaks.add(broken)
    stage = a_stage(*nodes)
    placement = await stage.driver.acquire(request("r0"))
    assert placement.node == "n1"
    assert stage.driver.status().nodes == ("n1",)
    assert [gpu_now.id for gpu_now in stage.driver.status().gpus] == ["g1"]


@virtually
async def test_caller_waits_when_the_link_fails_and_there_is_no_other_node() -> None:
    node = fake_node("n0", gpu("g0", node="n0"), breaks="grant")
    stage = a_stage(node)
    waiting = stage.ask(request("r0"))
    await until(5.0)
    assert not waiting.done()
    node.breaks.clear()
    node.crash()
    stage.attach(node)
    await until(6.0)
    assert waiting.result().node == "n0"


@virtually
async def test_holders_fail_and_the_newcomer_waits_when_a_link_fails() -> None:
    """Only a caller that received a lease may have used it."""
    node = fake_node("n0", gpu("g0", node="n0", leases=2))
    stage = a_stage(node)
    await stage.driver.acquire(request("r0"))
    node.breaks.add("grant")
    newcomer = stage.ask(request("r1"))
    await until(1.0)
    assert not newcomer.done()
    assert list(stage.core.requests) == ["r1"]
    assert stage.driver.status().counts.finished == {RequestOutcome.FAILED: 1}


@virtually
async def test_newcomer_waits_when_the_link_fails_at_several_leases_in_one_step() -> None:
    """The failed holder's slot has room for another lease, on a node that is lost already."""
    node = fake_node("n0", gpu("g0", node="n0", leases=3), gpu("g1", node="n0", leases=2))
    stage = a_stage(node)
    await stage.driver.acquire(request("r0"))
    node.breaks.add("grant")
    newcomers = [stage.ask(request(f"r{number}")) for number in range(1, 6)]
    await until(1.0)
    assert not any(newcomer.done() for newcomer in newcomers)
    assert sorted(stage.core.requests) == ["r1", "r2", "r3", "r4", "r5"]
    stage.attach(fake_node("n1", gpu("g9", node="n1", leases=5)))
    await until(2.0)
    assert {newcomer.result().node for newcomer in newcomers} == {"n1"}


@pytest.mark.parametrize("broken", ["end_lease", "demote", "contended"])
@virtually
async def test_node_is_lost_and_others_serve_when_its_link_fails(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = two_nodes()
    stage = a_stage(*nodes)
    held = await stage.driver.acquire(request("r0"))
    await until(2.0)
    nodes[0].breaks.add(broken)
    if broken == "end_lease":
        stage.driver.release(held.lease)
    elif broken == "demote":
        stage.driver.report(SlotFreed(held.slot, held.lease))
        await stage.driver.evict(BERT)
    else:
        stage.ask(request("r1"))
        stage.ask(request("r2"))
    await until(2.0)
    assert stage.driver.status().nodes == ("n1",)
    assert "node n0 is lost" in caplog.text
    assert (await stage.driver.acquire(request("r1"))).node == "n1"


@virtually
async def test_holder_that_released_is_done_when_the_link_fails_at_that_order() -> None:
    node = fake_node("n0", gpu("g0", node="n0"), breaks="end_lease")
    stage = a_stage(node)
    held = await stage.driver.acquire(request("r0"))
    stage.driver.release(held.lease)
    assert stage.driver.status().counts.finished == {RequestOutcome.COMPLETED: 1}


# -- contention ---------------------------------------------------------------------------------


@virtually
async def test_nodes_are_notified_of_contention_once_a_change_and_again_while_it_lasts() -> None:
    nodes = two_nodes()
    stage = a_stage(*nodes)
    held = [await stage.driver.acquire(request(name)) for name in ("r0", "r1")]
    await until(2.0)
    stage.ask(request("r2"))
    stage.ask(request("r3"))
    await until(2.25)
    for placement in held:
        stage.driver.release(placement.lease)
    await until(9.0)
    for node in nodes:
        assert reported(node) == [(2.0, True), (2.1, True), (2.2, True), (2.25, False)]


@virtually
async def test_no_node_is_notified_of_contention_when_every_request_is_placed_at_once() -> None:
    stage = a_stage()
    held = await stage.driver.acquire(request("r0"))
    stage.driver.release(held.lease)
    await until(5.0)
    assert stage.nodes[0].contentions == []


@virtually
async def test_node_is_notified_of_contention_when_it_attaches_while_requests_wait() -> None:
    stage = a_stage()
    await stage.driver.acquire(request("r0"))
    stage.ask(request("r1", "bert"))
    stage.ask(request("r2", "bert"))
    await until(1.05)
    small = fake_node("n1", gpu("g1", memory_mb=512, node="n1"))
    stage.attach(small)
    assert reported(small) == [(1.05, True)]
    await until(1.15)
    assert reported(small) == [(1.05, True), (1.1, True)]


# -- reports in the middle of orders --------------------------------------------------------------


class Hasty(FakeNode):
    """Ends a lease inside the order to end it, and loses its GPU inside a grant if set to."""

    loses_at_grant: bool = False

    def end_lease(self, order: EndLease) -> None:
        assert self.reports is not None
        before = len(self.orders)
        self.leases.pop(order.lease, None)
        self.reports.report(SlotFreed(order.slot, order.lease))
        self.wrong += ["nested"] * (len(self.orders) > before)

    def grant(self, order: Dispatch) -> None:
        super().grant(order)
        if self.loses_at_grant:
            assert self.reports is not None
            self.reports.report(GpuLost(order.gpu, AfterLoss.FAIL))


@virtually
async def test_reports_are_handled_later_when_they_come_in_the_middle_of_an_order() -> None:
    spec = gpu("g0", node="n0")
    node = Hasty(spec.node, (spec,))
    stage = a_stage(node)
    held = await stage.driver.acquire(request("r0"))
    stage.ask(request("r1"))
    await until(2.0)
    stage.driver.release(held.lease)
    await until(2.0)
    assert stage.placed() == {"r1": ("g0", True)}
    assert node.wrong == []
    kinds = [type(event).__name__ for _, event in stage.events[-2:]]
    assert kinds == ["LeaseReleased", "SlotFreed"]


@virtually
async def test_caller_gets_its_lease_first_when_its_gpu_is_lost_inside_the_grant() -> None:
    spec = gpu("g0", node="n0")
    node = Hasty(spec.node, (spec,))
    node.loses_at_grant = True
    stage = a_stage(node)
    placement = await stage.driver.acquire(request("r0"))
    assert placement.gpu == "g0"
    assert stage.driver.status().gpus == ()
    assert stage.driver.status().counts.finished == {RequestOutcome.FAILED: 1}


class Leaving(FakeNode):
    """Detaches itself inside the order to prepare."""

    leave: Callable[[], None] = staticmethod(lambda: None)

    def prepare(self, order: Prepare) -> None:
        super().prepare(order)
        self.leave()


@virtually
async def test_caller_is_placed_elsewhere_when_the_node_detaches_inside_an_order() -> None:
    spec = gpu("g0", node="n0")
    node, other = Leaving(spec.node, (spec,)), fake_node("n1", gpu("g1", node="n1"))
    stage = a_stage(node, other)
    node.leave = lambda: stage.driver.detach(spec.node)
    placement = await stage.driver.acquire(request("r0"))
    assert placement.node == "n1"


@virtually
async def test_gpu_is_lost_when_the_core_knows_it_but_no_link_leads_there() -> None:
    stage = a_stage(core=a_core(gpus=("a-gpu",)))
    assert (await stage.driver.acquire(request("r0"))).gpu == "g0"
    assert [shown.id for shown in stage.driver.status().gpus] == ["g0"]


@virtually
async def test_nothing_follows_when_the_driver_is_closed_inside_an_order() -> None:
    spec = gpu("g0", node="n0")
    node = Leaving(spec.node, (spec,))
    stage = a_stage(node, models=("bert", "t5"))
    held = await stage.driver.acquire(request("r0"))
    waiting = stage.ask(request("r1", "t5"))
    await until(1.0)
    node.leave = stage.driver.close
    stage.driver.release(held.lease)
    await until(2.0)
    assert isinstance(await outcome(waiting), RequestWithdrawn)
    assert reported(node) == [(0.0, True)] + [(round(at / 10, 1), True) for at in range(1, 11)]
    assert stage.clock.pending == 0


@virtually
async def test_acquire_starts_again_when_the_request_of_that_id_has_failed() -> None:
    stage = a_stage()
    await stage.driver.acquire(request("r0"))
    stage.driver.report(GpuLost(GpuId("g0")))
    again = stage.ask(request("r0"))
    await until(1.0)
    assert not again.done()
    assert list(stage.core.requests) == ["r0"]


# -- what is logged -----------------------------------------------------------------------------


@virtually
async def test_driver_logs_what_was_decided(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    stage = a_stage(models=("bert", model("large", memory_mb=7500)))
    held = await stage.driver.acquire(request("r0"))
    stage.ask(request("r1", "large", deadline_s=4.0))
    stage.driver.report(MemoryPressure(GpuId("g0"), 1))
    stage.driver.report(ModelRegistered(model("bert")))
    stage.driver.release(held.lease)
    await until(5.0)
    text = caplog.text
    assert "requests ('r0',): lease 1 on g0, miss" in text
    assert "g0 loads ['large'], evicts ('bert',)" in text
    assert "request r1: expired its deadline passed" in text
    assert any(
        record.levelno == logging.WARNING and "MemoryPressure" in record.getMessage()
        for record in caplog.records
    )
