"""Leaders that follow each other: models and leases stay, and the old leader is fenced."""

import asyncio
from dataclasses import replace

import pytest

from cache_manager.model.ids import GpuId, ModelId, NodeId
from gpu_manager.attachment.attachment import Attachment
from gpu_manager.errors import BadSetting
from scheduler.model.actions import Demote, Dispatch, Prepare
from scheduler.model.events import ModelRegistered, NodeSnapshot
from tests.kit.cores.builders import model, request
from tests.kit.network.held_up import hold_up_between_requests
from tests.kit.waiting import eventually
from tests.kit.worlds.cluster_in_process import (
    ReportingNode,
    Scheduler,
    Wire,
    a_node,
    a_standby,
    leases_of,
)
from tests.unit.scheduler.service.nodes.steady_streams import (
    STEADY,
    a_steady_scheduler,
    steadily_attached,
)

pytestmark = pytest.mark.timeout(180, func_only=True)

GPU = GpuId("n0.0")


def port(it: Scheduler) -> int:
    return int(it.url.rpartition(":")[2])


def residents(it: Scheduler) -> list[str]:
    (gpu,) = it.driver.status().gpus
    return [found.model for found in gpu.residents]


async def warm(it: Scheduler, node: ReportingNode, *models: str) -> None:
    """Have the node hold these models, the first one least recently used."""
    await eventually(lambda: it.driver.status().gpus)
    for name in models:
        placement = await it.driver.acquire(request(f"warm-{name}", name))
        await eventually(lambda: node.leases and not node.loading)
        it.driver.release(placement.lease)
        await eventually(lambda: not leases_of(it))


async def test_models_and_leases_stay_when_a_leader_of_a_higher_term_takes_over() -> None:
    old, node = await a_steady_scheduler(term=3), a_node()
    async with steadily_attached(node, old.url) as attachment:
        await warm(old, node, "vit", "bert")
        held = await attachment.acquire(request("r1", "vit"))
        waiting = asyncio.ensure_future(attachment.acquire(request("r2", "bert")))
        await eventually(lambda: old.driver.status().waiting)
        orders = len(node.orders)
        await old.stop()

        new = await a_steady_scheduler(term=4, port=port(old))

        await eventually(lambda: new.driver.status().waiting)
        assert leases_of(new) == set(node.leases) == {held.lease}
        assert sorted(residents(new)) == ["bert", "vit"]
        assert len(node.orders) == orders
        attachment.release(held.lease)
        again = await waiting
        assert (again.hit, again.lease >> 32) == (True, 4)
        assert set(node.leases) == {again.lease}
        assert node.given(Demote) == []
        assert len(node.given(Prepare)) == 2
        assert node.wrong == []
        await new.stop()


async def test_least_recently_used_model_leaves_first_when_a_new_leader_needs_room() -> None:
    old, node = await a_steady_scheduler(term=3), a_node()
    async with steadily_attached(node, old.url) as attachment:
        for name in ("vit", "bert", "gpt"):
            attachment.report(ModelRegistered(model(name, memory_mb=3000)))
        await warm(old, node, "bert", "vit")
        await old.stop()
        new = await a_steady_scheduler(term=4, port=port(old))
        await eventually(lambda: new.driver.status().gpus)

        await attachment.acquire(request("r1", "gpt"))

        assert node.given(Prepare)[-1].victims == ("bert",)
        await new.stop()


async def test_sizes_of_models_are_reported_again_when_a_new_leader_knows_nothing() -> None:
    old, node = await a_steady_scheduler(term=3), a_node()
    async with steadily_attached(node, old.url) as attachment:
        attachment.report(ModelRegistered(model("vit", memory_mb=3000)))
        await attachment.attached()
        await old.stop()
        new = await a_steady_scheduler(term=4, port=port(old))
        await eventually(lambda: new.driver.status().gpus)
        await attachment.acquire(request("r1", "vit"))
        (order,) = node.given(Prepare)
        assert order.loads[0].memory_bytes == 3000 << 20
        await new.stop()


async def test_leader_of_a_lower_term_is_refused_and_notified_when_a_higher_one_was_met() -> None:
    first, node = await a_steady_scheduler(term=5), a_node()
    async with steadily_attached(node, first.url) as attachment:
        held = await attachment.acquire(request("r1"))
        await first.stop()
        stale = await a_steady_scheduler(term=4, port=port(first))

        await eventually(lambda: stale.fenced)

        assert stale.fenced[0] == 5
        await asyncio.sleep(0.2)
        assert stale.driver.status().gpus == ()
        assert not attachment.connected
        assert set(node.leases) == {held.lease}
        await stale.stop()
        next_one = await a_steady_scheduler(term=6, port=port(first))
        await eventually(lambda: next_one.driver.status().gpus)
        assert leases_of(next_one) == {held.lease}
        await next_one.stop()


async def test_leader_in_the_same_term_is_followed_when_it_was_started_again() -> None:
    """Without etcd a scheduler may not know that it led before."""
    first, node = await a_steady_scheduler(term=5), a_node()
    async with steadily_attached(node, first.url) as attachment:
        held = await attachment.acquire(request("r1"))
        await first.stop()
        again = await a_steady_scheduler(term=5, port=port(first))
        await eventually(lambda: again.driver.status().gpus)
        assert leases_of(again) == {held.lease}
        attachment.release(held.lease)
        assert (await attachment.acquire(request("r2"))).lease > held.lease
        await again.stop()


async def test_manager_goes_over_when_another_leader_was_elected_behind_its_leaders_back() -> None:
    """The old leader is cut off from its store, not from the nodes, and gives leases on."""
    old, new = await a_steady_scheduler(term=1), await a_steady_scheduler(term=2)
    node = a_node()
    async with steadily_attached(node, old.url, new.url) as attachment:
        await eventually(lambda: leases_of(new) or new.driver.status().gpus)
        assert old.fenced == [2]
        assert attachment.term == 2
        placement = await attachment.acquire(request("r1"))
        assert placement.lease >> 32 == 2
        await eventually(lambda: not old.driver.status().gpus)
        assert all(order.lease >> 32 == 2 for order in node.given(Dispatch))
    await old.stop()
    await new.stop()


async def test_manager_finds_the_leader_when_it_knows_a_standby_alone() -> None:
    it, node = await a_steady_scheduler(), a_node()
    async with a_standby(it.url) as standby, steadily_attached(node, standby) as attachment:
        assert (await attachment.acquire(request("r1"))).node == "n0"
    await it.stop()


async def test_manager_waits_when_no_scheduler_leads_yet() -> None:
    node = a_node()
    no_scheduler = "http://127.0.0.1:1"
    async with (
        a_standby(None) as standby,
        steadily_attached(node, standby, no_scheduler) as attachment,
    ):
        await asyncio.sleep(0.2)
        assert not attachment.connected


async def test_no_slot_is_given_twice_when_two_leaders_give_leases_at_once() -> None:
    """Callers ask both; the node follows one at a time, as its leases show."""
    times = replace(STEADY, grace_s=0.3)
    old, node = await a_steady_scheduler(term=1, times=times), a_node(gpus=2)
    async with Wire.to(old.url) as wire:
        new = await a_steady_scheduler(term=2, times=times)
        async with steadily_attached(node, wire.url, times=times) as attachment:
            held = [await attachment.acquire(request(f"r{n}", f"m{n}")) for n in range(2)]
            late = asyncio.ensure_future(old.driver.acquire(request("late", "m0")))
            wire.target = ("127.0.0.1", port(new))
            wire.cut()
            await eventually(lambda: len(new.driver.status().gpus) == 2)

            next_one = asyncio.ensure_future(new.driver.acquire(request("next", "m0")))
            await eventually(
                lambda: new.driver.status().waiting or new.driver.status().waiting_locally
            )
            assert leases_of(new) == {placement.lease for placement in held}
            assert not next_one.done()
            attachment.release(held[0].lease)
            assert (await next_one).lease >> 32 == 2
            assert not late.done()
            late.cancel()
    assert node.wrong == []
    await old.stop()
    await new.stop()


async def test_contention_is_forgotten_when_a_new_leader_has_no_waiting_requests() -> None:
    old, node = await a_steady_scheduler(term=1), a_node()
    async with steadily_attached(node, old.url) as attachment:
        await attachment.acquire(request("r1"))
        caller = asyncio.ensure_future(old.driver.acquire(request("r2")))
        await eventually(lambda: node.contentions and node.contentions[-1][1])
        await old.stop()
        await asyncio.wait({caller})
        assert caller.exception() is not None
        new = await a_steady_scheduler(term=2, port=port(old))
        await eventually(lambda: any(isinstance(event, NodeSnapshot) for event in new.events))
        assert not node.contentions[-1][1]
        assert node.residents[GPU].keys() == {ModelId("bert")}
        await new.stop()


async def test_release_reaches_the_next_leader_when_no_scheduler_led_as_it_was_sent() -> None:
    old, node = await a_steady_scheduler(term=1), a_node(gpus=2)
    async with steadily_attached(node, old.url) as attachment:
        seen = await attachment.acquire(request("r1", "bert"))
        unseen = await attachment.acquire(request("r2", "vit"))
        await old.stop()
        attachment.release(seen.lease)
        await eventually(lambda: not attachment.connected)
        attachment._stream.restart()  # noqa: SLF001 - as if its process had started again
        attachment.release(unseen.lease)
        new = await a_steady_scheduler(term=2, port=port(old))
        await eventually(lambda: new.driver.status().gpus)
        await eventually(lambda: not node.leases and not leases_of(new))
        await new.stop()


async def test_caller_is_given_its_lease_again_when_the_answer_died_with_the_leader() -> None:
    old, node = await a_steady_scheduler(term=1), a_node()
    async with steadily_attached(node, old.url):
        await eventually(lambda: old.driver.status().gpus)
        lost = await old.driver.acquire(request("r1"))  # the gateway never receives it
        await eventually(lambda: node.leases)
        await old.stop()
        new = await a_steady_scheduler(term=2, port=port(old))
        await eventually(lambda: new.driver.status().gpus)
        other = asyncio.ensure_future(new.driver.acquire(request("r2")))

        again = await new.driver.acquire(request("r1"))

        assert (again.lease, again.gpu, again.hit) == (lost.lease, "n0.0", True)
        assert not other.done()
        new.driver.release(again.lease)
        assert (await other).lease >> 32 == 2
        assert new.driver.status().counts.finished == {"completed": 1}
        assert node.wrong == []
        await new.stop()


async def test_leaving_node_is_given_no_request_when_a_new_leader_learns_of_it() -> None:
    old, node = await a_steady_scheduler(term=1), a_node()
    async with steadily_attached(node, old.url) as attachment:
        held = await attachment.acquire(request("r1"))
        attachment.drain([GPU])
        await old.stop()
        new = await a_steady_scheduler(term=2, port=port(old))
        await eventually(lambda: new.driver.status().gpus)
        waiting = asyncio.ensure_future(new.driver.acquire(request("r2")))
        await eventually(lambda: new.driver.status().waiting)
        node.end(held.lease)
        await eventually(lambda: not new.driver.status().gpus)
        assert not waiting.done()
        waiting.cancel()
        await new.stop()


async def test_request_fails_when_its_grant_crosses_the_drain_of_its_node() -> None:
    it, node = await a_steady_scheduler(), a_node()
    async with steadily_attached(node, it.url) as attachment:
        await attachment.attached()
        await eventually(lambda: it.driver.status().gpus)
        placement = asyncio.ensure_future(it.driver.acquire(request("r1")))
        attachment.drain([GPU])
        await eventually(lambda: not it.driver.status().gpus)
        assert placement.done()
        assert node.given(Dispatch) == []
        assert it.driver.status().counts.finished == {"failed": 1}
    await it.stop()


class Expiring(ReportingNode):
    """Ends leases that were not used, or are idle, by itself, as a GPU manager does."""

    def grant(self, order: Dispatch) -> None:
        super().grant(order)
        asyncio.get_running_loop().call_later(0.3, self.end, order.lease)

    def twice(self) -> list[str]:
        """Leases that a slot was given while it held another one."""
        return [wrong for wrong in self.wrong if "room for" in wrong]


async def test_every_caller_is_served_when_leaders_follow_each_other_all_the_time() -> None:
    """Six callers, two nodes, a new leader every moment; no slot ever holds two leases.

    A lease is left to its node if its leader died before it could answer a caller at the other
    node, or before it could pass that caller's release on.
    """
    it, parts = await a_steady_scheduler(term=1), [a_node("n0", gpus=2), a_node("n1", gpus=2)]
    nodes = [Expiring(node.name, node.specs, 0.0) for node in parts]
    gate = port(it)
    served: list[int] = []
    async with (
        steadily_attached(nodes[0], it.url) as one,
        steadily_attached(nodes[1], it.url) as two,
    ):

        async def call(number: int) -> None:
            end = (one, two)[number % 2]
            for turn in range(12):
                placement = await end.acquire(request(f"c{number}.{turn}", f"m{turn % 3}"))
                served.append(placement.lease)
                await asyncio.sleep(0.01)
                end.release(placement.lease)

        callers = asyncio.gather(*(call(number) for number in range(6)))
        term = 1
        while not callers.done():
            await asyncio.sleep(0.15)
            await it.stop()
            term += 1
            it = await a_steady_scheduler(term=term, port=gate)
        await callers
        await eventually(lambda: len(it.driver.status().gpus) == 4 and not leases_of(it))
        assert len(served) == len(set(served)) == 72
        assert term > 2
        assert [node.twice() for node in nodes] == [[], []]
        assert [node.leases for node in nodes] == [{}, {}]
    await it.stop()


def test_name_of_a_node_is_refused_when_it_does_not_fit_into_a_url() -> None:
    with pytest.raises(BadSetting):
        Attachment(["http://here"], NodeId("a/b"), b"secret")


async def test_calls_keep_their_order_when_their_node_is_held_up_between_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, node = await a_steady_scheduler(term=1), a_node()
    async with steadily_attached(node, old.url) as attachment:
        held = await attachment.acquire(request("holder"))
        waiting = [
            asyncio.ensure_future(attachment.acquire(request(f"r{number}"))) for number in range(3)
        ]
        await eventually(lambda: old.driver.status().waiting == 3)
        hold_up_between_requests(monkeypatch, "gpu_manager.attachment.attachment")
        await old.stop()
        new = await a_steady_scheduler(term=2, port=port(old))
        await eventually(lambda: new.driver.status().waiting == 3)
        attachment.release(held.lease)
        for each in waiting:
            attachment.release((await each).lease)
        await new.stop()
