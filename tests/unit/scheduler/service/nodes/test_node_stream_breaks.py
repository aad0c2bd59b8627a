"""Node streams that break: nothing is lost or done twice; a node that stays away is given up."""

import asyncio
from dataclasses import replace
from itertools import count
from random import Random

import pytest

from cache_manager.model.ids import GpuId, ModelId
from scheduler.model.actions import Demote, Dispatch, Prepare
from scheduler.model.errors import RequestFailed
from scheduler.model.events import ModelLoaded, NodeSnapshot, SlotFreed
from scheduler.wire.node_stream import MAX_GREETING_BYTES
from tests.kit.cores.builders import request
from tests.kit.virtual_time import outcome
from tests.kit.waiting import eventually
from tests.kit.worlds.cluster_in_process import (
    TIMES,
    Wire,
    a_node,
    a_scheduler,
    attached,
    leases_of,
)
from tests.unit.scheduler.service.nodes.steady_streams import STEADY

pytestmark = pytest.mark.timeout(180, func_only=True)

PATIENT = replace(STEADY, grace_s=60.0)


def snapshots(events: list[object]) -> int:
    return sum(isinstance(event, NodeSnapshot) for event in events)


async def test_stream_continues_without_a_snapshot_when_it_was_cut() -> None:
    it, node = await a_scheduler(times=PATIENT), a_node()
    async with Wire.to(it.url) as wire, attached(node, wire.url, times=PATIENT) as attachment:
        held = await attachment.acquire(request("r1"))
        wire.cut()
        await eventually(lambda: not attachment.connected)
        await eventually(lambda: attachment.connected)

        assert leases_of(it) == set(node.leases) == {held.lease}
        attachment.release(held.lease)
        await eventually(lambda: not leases_of(it))
        assert snapshots([*it.events]) == 1
        assert it.driver.status().counts.finished == {"completed": 1}
    await it.stop()


async def test_orders_arrive_once_and_in_their_order_when_a_break_was_not_noticed_yet() -> None:
    it, node = await a_scheduler(times=PATIENT), a_node(gpus=3)
    async with Wire.to(it.url) as wire, attached(node, wire.url, times=PATIENT) as attachment:
        await eventually(lambda: it.driver.status().gpus)
        wire.freeze()
        placements = [await it.driver.acquire(request(f"r{n}", f"model{n}")) for n in range(3)]
        await asyncio.sleep(0.05)
        wire.down()
        await eventually(lambda: not any(it.nodes.values()))
        assert node.orders == []

        wire.thaw()
        wire.heal()

        await eventually(lambda: len(node.orders) == 6)
        assert [type(order) for order in node.orders] == [Prepare, Dispatch] * 3
        assert [order.lease for order in node.given(Dispatch)] == [p.lease for p in placements]
        await eventually(lambda: sum(isinstance(event, ModelLoaded) for event in it.events) == 3)
        await eventually(lambda: attachment.connected)
        assert node.wrong == []
    await it.stop()


async def test_large_orders_arrive_right_behind_the_greeting_when_they_were_kept() -> None:
    it, node = await a_scheduler(times=PATIENT), a_node()
    async with Wire.to(it.url) as wire, attached(node, wire.url, times=PATIENT):
        await eventually(lambda: it.driver.status().gpus)
        wire.down()
        await eventually(lambda: not any(it.nodes.values()))
        order = Demote(GpuId("n0.0"), ModelId("bert"), "x" * MAX_GREETING_BYTES)
        for _ in range(20):
            it.streams.attached[node.name].demote(order)

        wire.heal()

        await eventually(lambda: node.given(Demote) == [order] * 20)
    await it.stop()


async def test_reports_arrive_once_when_they_were_made_during_a_break() -> None:
    it, node = await a_scheduler(times=PATIENT), a_node(load_s=0.05)
    async with Wire.to(it.url) as wire, attached(node, wire.url, times=PATIENT) as attachment:
        held = await attachment.acquire(request("r1"))
        wire.down()
        await eventually(lambda: not attachment.connected)
        await eventually(lambda: not node.loading)  # the load ended meanwhile
        node.end(held.lease)
        await eventually(lambda: not node.leases)
        assert leases_of(it) == {held.lease}

        wire.heal()

        await eventually(lambda: not leases_of(it))
        kinds = [type(event) for event in it.events]
        assert (kinds.count(ModelLoaded), kinds.count(SlotFreed)) == (1, 1)
    await it.stop()


async def test_waiting_request_keeps_its_place_when_the_stream_is_cut() -> None:
    it, node = await a_scheduler(times=PATIENT), a_node()
    async with Wire.to(it.url) as wire, attached(node, wire.url, times=PATIENT) as attachment:
        held = await attachment.acquire(request("r1"))
        waiting = [asyncio.ensure_future(attachment.acquire(request(f"w{n}"))) for n in range(2)]
        await eventually(lambda: it.driver.status().waiting == 2)
        wire.cut()
        await eventually(lambda: not attachment.connected)
        await eventually(lambda: attachment.connected)

        attachment.release(held.lease)

        first = await waiting[0]
        assert not waiting[1].done()
        attachment.release(first.lease)
        await waiting[1]
        assert it.driver.status().counts.finished == {"completed": 2}
    await it.stop()


async def test_request_is_placed_when_it_was_asked_for_during_a_break() -> None:
    it, node = await a_scheduler(times=PATIENT), a_node()
    async with Wire.to(it.url) as wire, attached(node, wire.url, times=PATIENT) as attachment:
        await attachment.attached()
        wire.down()
        await eventually(lambda: not attachment.connected)
        asking = asyncio.ensure_future(attachment.acquire(request("r1")))
        await asyncio.sleep(0.05)
        wire.heal()
        assert (await asking).lease in node.leases
    await it.stop()


async def test_request_goes_to_another_node_when_the_first_is_broken_off() -> None:
    it, nodes = await a_scheduler(times=PATIENT), [a_node("n0"), a_node("n1")]
    async with (
        Wire.to(it.url) as wire,
        attached(nodes[0], wire.url, times=PATIENT),
        attached(nodes[1], it.url, times=PATIENT) as there,
    ):
        await eventually(lambda: len(it.driver.status().gpus) == 2)
        held = [await it.driver.acquire(request(f"h{n}", f"m{n}")) for n in range(2)]
        (lease,) = [each.lease for each in held if each.node == "n0"]
        wire.down()
        await eventually(lambda: it.nodes == {"n0": False, "n1": True})
        assert [gpu.silent for gpu in it.driver.status().gpus] == [
            gpu.node == "n0" for gpu in it.driver.status().gpus
        ]
        waiting = asyncio.ensure_future(it.driver.acquire(request("r0", "m0")))
        for each in held:
            it.driver.release(each.lease)  # the silent node gets the order later

        placement = await waiting

        assert placement.node == "n1"
        assert lease in leases_of(it)
        wire.heal()
        await eventually(lambda: leases_of(it) == {placement.lease})
        await eventually(lambda: not any(gpu.silent for gpu in it.driver.status().gpus))
        assert it.driver.status().counts.finished == {"completed": 2}
        there.release(placement.lease)
    assert [node.wrong for node in nodes] == [[], []]
    await it.stop()


async def test_request_waits_when_the_only_node_is_broken_off_and_is_placed_when_it_is_back() -> (
    None
):
    it, node = await a_scheduler(times=PATIENT), a_node()
    async with Wire.to(it.url) as wire, attached(node, wire.url, times=PATIENT):
        await eventually(lambda: it.driver.status().gpus)
        wire.down()
        await eventually(lambda: not any(it.nodes.values()))
        waiting = asyncio.ensure_future(it.driver.acquire(request("r0")))
        await asyncio.sleep(0.05)
        assert it.driver.status().waiting == 1
        assert node.orders == []
        wire.heal()
        assert (await waiting).lease
        assert snapshots([*it.events]) == 1, "the stream went on"
    await it.stop()


async def test_node_is_offered_again_when_its_manager_starts_again_after_a_break() -> None:
    it, node = await a_scheduler(times=PATIENT), a_node()
    async with Wire.to(it.url) as wire, attached(node, wire.url, times=PATIENT) as attachment:
        await eventually(lambda: it.driver.status().gpus)
        wire.down()
        await eventually(lambda: not any(it.nodes.values()) and not attachment.connected)
        attachment._stream.restart()  # noqa: SLF001 - as if its process had started again
        wire.heal()
        await eventually(lambda: snapshots([*it.events]) == 2)
        assert (await it.driver.acquire(request("r0"))).node == "n0"
    await it.stop()


async def test_node_is_given_up_when_it_stays_away_and_is_taken_back_when_it_comes() -> None:
    it, node = await a_scheduler(times=STEADY), a_node()
    async with Wire.to(it.url) as wire, attached(node, wire.url, times=STEADY) as attachment:
        held = await it.driver.acquire(request("r1"))
        await eventually(lambda: not node.loading and node.leases)
        wire.down()
        await eventually(lambda: not it.driver.status().gpus)
        assert it.nodes == {}
        assert it.driver.status().counts.finished == {"failed": 1}

        wire.heal()

        await eventually(lambda: it.driver.status().gpus)
        assert leases_of(it) == set(node.leases) == {held.lease}
        (gpu,) = it.driver.status().gpus
        assert [found.model for found in gpu.residents] == ["bert"]
        assert node.residents[GpuId("n0.0")].keys() == {ModelId("bert")}
        asking = asyncio.ensure_future(attachment.acquire(request("r2")))
        await asyncio.sleep(0.05)
        assert not asking.done()  # the slot is still held
        node.end(held.lease)
        assert (await asking).hit
    await it.stop()


async def test_silent_stream_is_given_up_by_both_ends_when_the_network_loses_everything() -> None:
    times = replace(TIMES, grace_s=60.0)
    it, node = await a_scheduler(times=times), a_node()
    async with Wire.to(it.url) as wire, attached(node, wire.url, times=times) as attachment:
        held = await attachment.acquire(request("r1"))
        wire.freeze()
        await eventually(lambda: not attachment.connected)
        await eventually(lambda: it.nodes == {"n0": False})
        wire.thaw()
        await eventually(lambda: attachment.connected and it.nodes == {"n0": True})
        assert leases_of(it) == set(node.leases) == {held.lease}
        assert snapshots([*it.events]) == 1
    await it.stop()


async def test_leases_fail_when_the_manager_comes_back_as_another_process() -> None:
    it, node = await a_scheduler(times=PATIENT), a_node()
    async with Wire.to(it.url) as wire:
        async with attached(node, wire.url, times=PATIENT) as attachment:
            await attachment.acquire(request("r1"))
            wire.down()
            await eventually(lambda: not attachment.connected)
        node.crash()
        wire.heal()
        async with attached(node, wire.url, times=PATIENT) as again:
            await eventually(lambda: snapshots([*it.events]) == 2)
            assert not leases_of(it)
            assert it.driver.status().counts.finished == {"failed": 1}
            assert (await again.acquire(request("r2"))).gpu == "n0.0"
    await it.stop()


async def test_end_of_a_lease_is_ordered_again_when_the_first_order_was_lost() -> None:
    it, node = await a_scheduler(times=PATIENT), a_node()
    async with Wire.to(it.url) as wire, attached(node, wire.url, times=PATIENT) as attachment:
        held = await attachment.acquire(request("r1"))
        wire.down()
        await eventually(lambda: not any(it.nodes.values()) and not attachment.connected)
        it.driver.release(held.lease)
        attachment._stream.restart()  # noqa: SLF001 - as if too many messages had waited
        wire.heal()

        await eventually(lambda: not leases_of(it))
        assert not node.leases
        assert snapshots([*it.events]) == 2
    await it.stop()


async def test_callers_are_answered_once_each_when_the_stream_is_cut_all_the_time() -> None:
    """Ten callers over two nodes whose wires break every few milliseconds."""
    it, nodes = await a_scheduler(times=PATIENT), [a_node("n0", gpus=2), a_node("n1", gpus=2)]
    random = Random(4)
    async with Wire.to(it.url) as left, Wire.to(it.url) as right:
        async with (
            attached(nodes[0], left.url, times=PATIENT) as one,
            attached(nodes[1], right.url, times=PATIENT) as two,
        ):
            await eventually(lambda: len(it.driver.status().gpus) == 4)
            served: list[int] = []

            async def call(number: int) -> None:
                end, turns = (one, two)[number % 2], count()
                while (turn := next(turns)) < 8 or left.connections + right.connections <= 10:
                    model = f"model{(number + turn) % 6}"
                    placement = await end.acquire(request(f"c{number}.{turn}", model))
                    served.append(placement.lease)
                    await asyncio.sleep(0.002)
                    end.release(placement.lease)

            callers = asyncio.gather(*(call(number) for number in range(10)))
            while not callers.done():
                await asyncio.sleep(random.uniform(0.005, 0.04))
                random.choice((left, right)).cut()
            await callers
            await eventually(lambda: not leases_of(it))
            assert snapshots([*it.events]) == 2

        assert len(served) == len(set(served)) >= 80
        assert it.driver.status().counts.finished == {"completed": len(served)}
    assert [node.wrong for node in nodes] == [[], []]
    assert [node.leases for node in nodes] == [{}, {}]
    await it.stop()


async def test_call_is_answered_by_the_grant_when_the_answer_is_lost_with_the_scheduler() -> None:
    it, node = await a_scheduler(times=PATIENT), a_node()
    async with Wire.to(it.url) as wire, attached(node, wire.url, times=PATIENT) as attachment:
        await attachment.attached()
        asking = asyncio.ensure_future(attachment.acquire(request("r1")))
        await eventually(lambda: node.leases)
        wire.down()
        assert not isinstance(await outcome(asking), RequestFailed)
        assert (await asking).lease in node.leases
        assert len(node.leases) == 1
    await it.stop()


async def test_contention_is_forgotten_when_nobody_waits_any_more_at_a_resumed_stream() -> None:
    it, node = await a_scheduler(times=PATIENT), a_node()
    async with (
        Wire.to(it.url) as wire,
        attached(node, wire.url, times=PATIENT) as attachment,
    ):
        await attachment.acquire(request("holder"))
        waiting = asyncio.ensure_future(it.driver.acquire(request("waiting")))
        await eventually(lambda: node.contentions and node.contentions[-1][1])
        wire.down()
        await eventually(lambda: not attachment.connected)
        assert not node.contentions[-1][1]
        waiting.cancel()
        await eventually(lambda: not it.core.cluster.queued)
        wire.heal()
        await eventually(lambda: attachment.connected)
        await attachment.survey()
        assert not node.contentions[-1][1]
    await it.stop()
