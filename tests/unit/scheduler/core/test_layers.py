"""A core does without any of its layers, whatever callers and nodes send it."""

import pytest

from cache_manager import eviction
from cache_manager.model.ids import GpuId, ModelId, NodeId
from scheduler import policies
from scheduler.core.core import Core
from scheduler.model.events import (
    ContextKept,
    Event,
    GpuJoined,
    LeaseUsed,
    RecallPassed,
    StageDue,
    TermsSet,
)
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.values import CoreSettings, LeaseId
from tests.kit.cores.builders import gpu, request
from tests.kit.cores.core_world import World, placements, refused


@pytest.mark.parametrize(
    "event",
    [
        LeaseUsed(LeaseId(1), "f"),
        RecallPassed(LeaseId(1)),
        StageDue(NodeId("node-of-g0"), GpuId("g0"), ModelId("bert"), 1.0),
        ContextKept(GpuId("g0"), ModelId("bert"), 1),
        TermsSet("team", OwnerTerms(leases=1)),
    ],
    ids=lambda event: type(event).__name__,
)
def test_event_is_refused_when_its_layer_is_left_out(event: Event) -> None:
    world = World(Core(policies.make("lalb"), eviction.make("lru"), CoreSettings()))
    world.send(GpuJoined(gpu("g0")))
    assert refused(world.send(event)) == [f"no feature that takes '{type(event).__name__}'"]
    assert placements(world.arrive(request("r0"))) == [("r0", "g0")]
