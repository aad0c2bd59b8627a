"""Requests that a policy places together: one lease for all, or one for each."""

from collections.abc import Iterator

import pytest

from cache_manager import eviction
from scheduler.core.core import Core
from scheduler.model.events import GpuJoined, ModelRegistered, SlotFreed
from scheduler.model.values import CoreSettings, RequestId
from scheduler.policies.placement_policy import Decision, Place, View
from tests.kit.cores.builders import gpu, model, request
from tests.kit.cores.core_world import World, placements
from tests.kit.cores.wide_policy import WidePolicy


class TogetherPolicy:
    """Places all requests of the head's models together."""

    def decide(self, view: View) -> Iterator[Decision]:
        for slot in view.idle_slots():
            if (head := view.head(slot)) is not None:
                yield Place(view.waiting_like(head, 8), slot, "all at once")


def world(*, shares: bool) -> World:
    settings = CoreSettings(shares_leases=shares)
    found = World(Core(TogetherPolicy(), eviction.make("lru"), settings))
    found.send(ModelRegistered(model("bert", load_s=2.0, run_s=1.0)))
    found.arrive(request("r0"), request("r1"), request("r2"))
    return found


@pytest.mark.parametrize("shares", [True, False])
def test_requests_that_are_placed_together_have_one_lease_or_one_each(*, shares: bool) -> None:
    it = world(shares=shares)
    first = placements(it.send(GpuJoined(gpu("g0"))))

    if shares:
        assert first == [("r0", "g0"), ("r1", "g0"), ("r2", "g0")]
        return
    assert first == [("r0", "g0")]
    later = [placements(it.free("g0")) for _ in range(3)]
    assert later == [[("r1", "g0")], [("r2", "g0")], []]
    assert not it.core.requests


def test_others_keep_their_lease_when_the_first_one_of_a_group_is_done() -> None:
    it = world(shares=False)
    it.send(GpuJoined(gpu("g0")))
    lease = it.lease_of("r0")

    assert placements(it.send(SlotFreed(it.core.placer.leases[lease].slot.id, lease))) == [
        ("r1", "g0")
    ]
    assert RequestId("r0") not in it.core.requests
    assert {RequestId("r1"), RequestId("r2")} <= it.core.requests.keys()


@pytest.mark.parametrize(("shares", "given"), [(True, 2), (False, 1)])
def test_all_slots_of_a_lease_count_the_requests_that_have_it(*, shares: bool, given: int) -> None:
    settings = CoreSettings(shares_leases=shares)
    it = World(Core(WidePolicy(), eviction.make("lru"), settings))
    it.send(ModelRegistered(model("bert", load_s=2.0, run_s=1.0)))
    it.arrive(request("r0"), request("r1"))
    it.send(GpuJoined(gpu("g0", slots=3, vcpus=8)))

    assert [slot.frequency for slot in it.core.cluster.slots.values()] == [given] * 3
