"""GPU managers over a network: attaching, orders, reports and calls, and leaving."""

import asyncio

import pytest
from msgspec.structs import replace

from cache_manager.model.ids import GpuId, ModelId, NodeId
from gpu_manager.attachment import attachment as attaching
from gpu_manager.attachment.attachment import PendingCalls
from gpu_manager.errors import NoScheduler
from scheduler.model.actions import Dispatch, EndLease
from scheduler.model.errors import (
    EventRefused,
    ModelsTooLarge,
    RequestExpired,
    SchedulerError,
)
from scheduler.model.events import (
    GpuDraining,
    LeaseReleased,
    ModelRegistered,
    NodeSnapshot,
    SlotFreed,
)
from scheduler.model.values import GpuSpec, Placement, RequestId
from tests.kit.cores.builders import model, request
from tests.kit.virtual_time import outcome
from tests.kit.waiting import eventually
from tests.kit.worlds.cluster_in_process import ReportingNode, a_node, leases_of
from tests.unit.scheduler.service.nodes.steady_streams import a_steady_scheduler, steadily_attached

pytestmark = pytest.mark.timeout(180, func_only=True)

BERT = ModelId("bert")


async def test_request_is_placed_on_the_node_when_it_is_attached() -> None:
    it, node = await a_steady_scheduler(term=7), a_node()
    async with steadily_attached(node, it.url) as attachment:
        placement = await attachment.acquire(request("r1"))

        assert (placement.gpu, placement.node, placement.hit) == ("n0.0", "n0", False)
        assert placement.lease >> 32 == 7
        assert leases_of(it) == set(node.leases) == {placement.lease}
        attachment.release(placement.lease)
        await eventually(lambda: not leases_of(it))
        assert (await attachment.acquire(request("r2"))).hit
    assert node.wrong == []
    await it.stop()


async def test_caller_elsewhere_is_given_the_node_when_it_asks_the_scheduler() -> None:
    it, node = await a_steady_scheduler(), a_node()
    async with steadily_attached(node, it.url):
        await eventually(lambda: it.driver.status().gpus)

        placement = await it.driver.acquire(request("r1"))

        await eventually(lambda: placement.lease in node.leases)
        (order,) = node.given(Dispatch)
        assert (order.requests, order.explanation) == (("r1",), None)
    await it.stop()


async def test_manager_is_given_a_lease_of_another_node_when_its_own_is_taken() -> None:
    it, near, far = await a_steady_scheduler(), a_node("n0"), a_node("n1")
    async with steadily_attached(near, it.url) as here, steadily_attached(far, it.url):
        await eventually(lambda: len(it.driver.status().gpus) == 2)
        asked = [request("r1", "bert"), request("r2", "vit")]
        nodes = {(await here.acquire(each)).node for each in asked}
        assert nodes == {"n0", "n1"}
        assert [len(node.leases) for node in (near, far)] == [1, 1]
    await it.stop()


async def test_call_fails_as_it_would_in_one_process_when_the_scheduler_refuses() -> None:
    it, node = await a_steady_scheduler(), a_node()
    async with steadily_attached(node, it.url) as attachment:
        attachment.report(ModelRegistered(model("huge", memory_mb=9000)))
        await attachment.attached()

        refused = await outcome(attachment.acquire(request("r1", "huge")))
        assert isinstance(refused, ModelsTooLarge)
        assert refused.needed_bytes > refused.largest_bytes > 0
        unknown = await outcome(attachment.evict(BERT, GpuId("n0.9")))
        assert isinstance(unknown, EventRefused)
        assert "n0.9" in str(unknown)
        nameless = await outcome(attachment.acquire(replace(request("r2"), models=())))
        assert isinstance(nameless, EventRefused)
        strange = await outcome(attachment.acquire(replace(request("r3"), exit_rule="soon")))
        assert isinstance(strange, SchedulerError)
        assert "soon" in str(strange)
    await it.stop()


async def test_model_is_pinned_and_evicted_when_the_manager_asks_for_it() -> None:
    it, node = await a_steady_scheduler(), a_node()
    async with steadily_attached(node, it.url) as attachment:
        await attachment.attached()
        await attachment.pin(BERT, GpuId("n0.0"))
        (gpu,) = (await attachment.survey()).gpus
        assert [(found.model, found.pinned) for found in gpu.residents] == [("bert", True)]
        await eventually(lambda: not leases_of(it))
        await attachment.unpin(BERT)
        await attachment.evict(BERT)
        await eventually(lambda: not node.residents[GpuId("n0.0")])
    await it.stop()


async def test_survey_shows_this_nodes_gpus_alone_when_there_are_others() -> None:
    it, node, other = await a_steady_scheduler(), a_node("n0"), a_node("n1")
    async with steadily_attached(node, it.url) as attachment, steadily_attached(other, it.url):
        await eventually(lambda: len(it.driver.status().gpus) == 2)
        status = await attachment.survey()
        assert [gpu.id for gpu in status.gpus] == ["n0.0"]
        assert set(status.nodes) == {"n0", "n1"}
    await it.stop()


async def test_orders_for_people_fail_at_once_when_no_scheduler_is_reached() -> None:
    async with steadily_attached(a_node(), "http://127.0.0.1:1") as attachment:
        with pytest.raises(NoScheduler):
            await attachment.evict(BERT)


async def test_orders_for_people_fail_after_some_time_when_the_scheduler_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it, node = await a_steady_scheduler(), a_node()
    async with steadily_attached(node, it.url) as attachment:
        await attachment.attached()
        monkeypatch.setattr(attaching, "_ANSWERED_S", 0.2)
        monkeypatch.setattr(PendingCalls, "set_answer", lambda *_: None)
        with pytest.raises(NoScheduler, match=r"not answered within .* an order may still be"):
            await attachment.unpin(BERT)
    await it.stop()


# -- waiting callers ----------------------------------------------------------------------------


async def test_waiting_request_is_cancelled_when_its_caller_goes_away() -> None:
    it, node = await a_steady_scheduler(), a_node()
    async with steadily_attached(node, it.url) as attachment:
        held = await attachment.acquire(request("r1"))
        waiting = asyncio.ensure_future(attachment.acquire(request("r2")))
        await eventually(lambda: it.driver.status().waiting)

        waiting.cancel()

        await eventually(lambda: not it.driver.status().waiting)
        attachment.release(held.lease)
        await eventually(lambda: not leases_of(it))
        assert len(node.given(Dispatch)) == 1
    await it.stop()


class Hasty(ReportingNode):
    """Makes a caller go away at the moment in which its lease is granted."""

    caller: asyncio.Task[Placement]

    def grant(self, order: Dispatch) -> None:
        super().grant(order)
        asyncio.get_running_loop().call_soon(self.caller.cancel)


async def test_lease_ends_when_its_caller_goes_away_as_it_is_given() -> None:
    it, node = await a_steady_scheduler(), Hasty(*_parts(a_node()))
    async with steadily_attached(node, it.url) as attachment:
        node.caller = asyncio.ensure_future(attachment.acquire(request("r1")))

        assert isinstance(await outcome(node.caller), asyncio.CancelledError)

        await eventually(lambda: node.given(EndLease) and not leases_of(it))
        assert not node.leases
    await it.stop()


def _parts(node: ReportingNode) -> tuple[NodeId, tuple[GpuSpec, ...], float]:
    return node.name, node.specs, node.load_s


async def test_other_caller_keeps_the_request_when_one_of_two_goes_away() -> None:
    it, node = await a_steady_scheduler(), a_node()
    async with steadily_attached(node, it.url) as attachment:
        held = await attachment.acquire(request("r1"))
        one, two = (asyncio.ensure_future(attachment.acquire(request("r2"))) for _ in range(2))
        await eventually(lambda: it.driver.status().waiting)
        await asyncio.sleep(0.05)

        one.cancel()
        attachment.release(held.lease)

        assert (await two).lease > held.lease
        assert leases_of(it) == {(await two).lease}
    await it.stop()


async def test_request_expires_when_its_deadline_passes_in_the_queue() -> None:
    it, node = await a_steady_scheduler(), a_node()
    async with steadily_attached(node, it.url) as attachment:
        await attachment.acquire(request("r1"))
        now_s = asyncio.get_running_loop().time()
        late = await outcome(attachment.acquire(request("r2", deadline_s=now_s + 0.05)))
        assert isinstance(late, RequestExpired)
        await eventually(lambda: it.driver.status().waiting == 0)
    await it.stop()


async def test_request_expires_when_no_scheduler_is_reached_in_time() -> None:
    async with steadily_attached(a_node(), "http://127.0.0.1:1") as attachment:
        now_s = asyncio.get_running_loop().time()
        late = await outcome(attachment.acquire(request("r1", deadline_s=now_s - 0.95)))
        assert isinstance(late, RequestExpired)


async def test_request_comes_to_the_front_when_it_gave_its_lease_back_early() -> None:
    it, node = await a_steady_scheduler(), a_node()
    async with steadily_attached(node, it.url) as attachment:
        first = await attachment.acquire(request("r1"))
        attachment.release(first.lease, may_return=True)
        await eventually(lambda: not leases_of(it))
        second = await attachment.acquire(request("r2"))
        waiting = asyncio.ensure_future(attachment.acquire(request("r3")))
        again = asyncio.ensure_future(attachment.wanted(RequestId("r1")))
        await eventually(lambda: it.driver.status().waiting == 2)

        attachment.release(second.lease)

        assert (await again).lease > second.lease
        assert not waiting.done()
        waiting.cancel()
    await it.stop()


# -- orders and reports that cross --------------------------------------------------------------


async def test_lease_lives_when_a_snapshot_crosses_its_grant() -> None:
    it, node = await a_steady_scheduler(), a_node()
    async with steadily_attached(node, it.url) as attachment:
        await attachment.attached()
        await eventually(lambda: it.driver.status().gpus)
        asking = asyncio.ensure_future(it.driver.acquire(request("r1")))
        attachment.report(node.snapshot())  # it goes up while the grant comes down
        await asyncio.sleep(0)

        placement = await asking

        await eventually(lambda: len([e for e in it.events if isinstance(e, NodeSnapshot)]) == 2)
        await eventually(lambda: placement.lease in node.leases)
        assert leases_of(it) == {placement.lease}
        (gpu,) = it.driver.status().gpus
        assert [found.model for found in gpu.residents] == list(node.residents[GpuId("n0.0")])
        assert it.driver.status().counts.finished == {}
    await it.stop()


async def test_lease_does_not_come_back_when_its_grant_is_repeated_after_its_end() -> None:
    it, node = await a_steady_scheduler(), a_node()
    async with steadily_attached(node, it.url) as attachment:
        placement = await attachment.acquire(request("r1"))
        (grant,) = node.given(Dispatch)
        node.end(placement.lease)
        await eventually(lambda: not node.leases)

        again = it.streams.attached[node.name]  # as the driver would repeat it
        again.grant(grant)

        await eventually(lambda: sum(isinstance(event, SlotFreed) for event in it.events) == 2)
        assert not node.leases
        assert not leases_of(it)
    await it.stop()


# -- leaving ------------------------------------------------------------------------------------


async def test_gpus_are_gone_at_once_when_the_manager_leaves() -> None:
    it, node = await a_steady_scheduler(), a_node()
    async with steadily_attached(node, it.url) as attachment:
        placement = await attachment.acquire(request("r1"))
        attachment.report(GpuDraining(GpuId("n0.0")))
        node.end(placement.lease)
        await eventually(lambda: not node.leases)
    assert it.driver.status().nodes == ()
    assert it.nodes == {}
    assert any(isinstance(event, SlotFreed) for event in it.events)
    await it.stop()


async def test_draining_gpu_takes_no_request_when_it_still_holds_a_lease() -> None:
    it, node = await a_steady_scheduler(), a_node()
    async with steadily_attached(node, it.url) as attachment:
        held = await attachment.acquire(request("r1"))
        attachment.report(GpuDraining(GpuId("n0.0")))
        waiting = asyncio.ensure_future(attachment.acquire(request("r2")))
        await eventually(lambda: it.driver.status().waiting)
        attachment.report(LeaseReleased(held.lease))
        await eventually(lambda: node.given(EndLease) and not node.leases)
        await eventually(lambda: not it.driver.status().gpus)
        assert not waiting.done()
        waiting.cancel()
    await it.stop()
