"""A manager with more models than any queue takes: it attaches, attaches again, and forgets."""

import asyncio
from functools import partial

import pytest
from msgspec.structs import replace

from cache_manager.model.ids import ModelId, NodeId, Tier
from gpu_manager.attachment.attachment import Attachment
from scheduler.model.events import ModelDemoted, ModelRegistered, NodeSnapshot
from scheduler.model.values import ModelSpec
from tests.kit.cores.builders import gpu, model, request
from tests.kit.waiting import eventually
from tests.kit.worlds.cluster_in_process import (
    ReportingNode,
    Scheduler,
    Wire,
    a_node,
    a_scheduler,
    attached,
)

pytestmark = pytest.mark.timeout(180, func_only=True)

MANY = 50_000
_WITHIN_S = 120


def name_of(number: int) -> ModelId:
    return ModelId(f"tenant/sha256:{number:064x}")


def register(attachment: Attachment, first: int, count: int) -> None:
    for number in range(first, first + count):
        spec = ModelSpec(name_of(number), 1 << 20)
        attachment.report(ModelRegistered(spec))


def registered_before_the_snapshot(scheduler: Scheduler) -> int:
    """How many models the scheduler knew when it learned of the node."""
    kinds = [type(event) for event in scheduler.events]
    return kinds[: kinds.index(NodeSnapshot)].count(ModelRegistered)


def more_than(scheduler: Scheduler, events: int) -> bool:
    return len(scheduler.events) > events


async def until_attached(scheduler: Scheduler) -> None:
    await eventually(lambda: scheduler.driver.status().gpus, "the node", within_s=_WITHIN_S)


async def another_leads(first: Scheduler, wire: Wire) -> Scheduler:
    """End the first scheduler; the manager attaches to the next one, over the same wire."""
    wire.down()
    await first.stop()
    second = await a_scheduler(term=2)
    host, _, port = second.url.removeprefix("http://").partition(":")
    wire.target = host, int(port)
    wire.heal()
    await until_attached(second)
    return second


async def test_manager_with_50000_models_attaches_and_attaches_again() -> None:
    first, node = await a_scheduler(term=1), a_node()
    async with Wire.to(first.url) as wire, attached(node, wire.url) as attachment:
        register(attachment, 0, MANY)
        await until_attached(first)
        assert registered_before_the_snapshot(first) == MANY
        held = await attachment.acquire(request("r1"))

        second = await another_leads(first, wire)
        assert registered_before_the_snapshot(second) == MANY
        attachment.release(held.lease)
        assert (await attachment.acquire(request("r2"))).node == "n0"
    await second.stop()


async def test_stream_that_breaks_between_pages_goes_on_where_it_was() -> None:
    it, node = await a_scheduler(), a_node()
    async with Wire.to(it.url) as wire, attached(node, wire.url) as attachment:
        register(attachment, 0, 10_000)
        for least in (1, 3000, 6000):
            await eventually(partial(more_than, it, least), "a page", within_s=20)
            wire.cut()
        await until_attached(it)
        assert registered_before_the_snapshot(it) == 10_000
    await it.stop()


async def test_what_happens_while_pages_are_sent_is_not_lost() -> None:
    it, node = await a_scheduler(), a_node()
    async with attached(node, it.url) as attachment:
        register(attachment, 0, 5000)
        asking = asyncio.create_task(attachment.acquire(request("r1")))
        await eventually(lambda: len(it.events) > 0, "a page", within_s=20)
        register(attachment, 5000, 10)
        attachment.report(ModelRegistered(model("late", memory_mb=77)))
        assert (await asking).node == "n0"
        assert registered_before_the_snapshot(it) == 5011
    await it.stop()


async def test_model_whose_weights_have_left_the_node_is_not_registered_again() -> None:
    first, node = await a_scheduler(term=1), a_node()
    async with Wire.to(first.url) as wire, attached(node, wire.url) as attachment:
        register(attachment, 0, 10)
        await until_attached(first)
        for number in range(9):
            attachment.report(ModelDemoted(NodeId("n0"), None, name_of(number), Tier.ABSENT))
        second = await another_leads(first, wire)
        assert registered_before_the_snapshot(second) == 1
    await second.stop()


async def test_node_that_leaves_while_pages_are_sent_is_gone_at_once() -> None:
    it, node = await a_scheduler(), a_node()
    async with attached(node, it.url) as attachment:
        register(attachment, 0, 3000)
        await eventually(lambda: len(it.events) > 0, "a page", within_s=20)
    await eventually(lambda: it.nodes == {}, "the node's end")
    await it.stop()


class FullNode(ReportingNode):
    """A node that has the weights of many models on its disk."""

    def whole_state(self) -> list[NodeSnapshot]:
        stored = tuple((name_of(number), Tier.DISK) for number in range(12_000))
        return [replace(each, stored=stored) for each in super().whole_state()]


async def test_stored_models_beyond_one_message_follow_the_snapshot() -> None:
    it = await a_scheduler()
    node = FullNode(NodeId("n0"), (gpu("n0.0", node="n0"),))
    async with attached(node, it.url) as attachment:
        await until_attached(it)
        gone = name_of(11_999)
        attachment.report(ModelDemoted(NodeId("n0"), None, gone, Tier.ABSENT))
        index = it.core.cluster.index
        last_but_one = name_of(11_998)
        await eventually(lambda: index.tier(NodeId("n0"), last_but_one) is Tier.DISK, within_s=30)
        assert index.tier(NodeId("n0"), name_of(0)) is Tier.DISK
        assert index.tier(NodeId("n0"), gone) is Tier.ABSENT
        (snapshot,) = (each for each in it.events if isinstance(each, NodeSnapshot) and each.gpus)
        assert len(snapshot.stored) < 12_000
        for report in node.whole_state():  # as after a doubt of the node's
            attachment.report(report)
        await eventually(lambda: index.tier(NodeId("n0"), gone) is Tier.DISK, within_s=30)
    await it.stop()


async def test_what_was_measured_of_a_model_is_registered_again_with_it() -> None:
    """And a function that registers the model once more does not undo it."""
    first, node = await a_scheduler(term=1), a_node()
    async with Wire.to(first.url) as wire, attached(node, wire.url) as attachment:
        register(attachment, 0, 1)
        attachment.report(ModelRegistered(ModelSpec(name_of(0), features={"ipc": 2.0})))
        register(attachment, 0, 1)
        await until_attached(first)
        second = await another_leads(first, wire)
    (registered,) = [event for event in second.events if isinstance(event, ModelRegistered)]
    assert registered.model == ModelSpec(name_of(0), 1 << 20, features={"ipc": 2.0})
    await second.stop()
