"""Recordings that tests write event by event, and what is made of them under other policies."""

from collections.abc import Sequence
from typing import Any

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from scheduler.core.core import Core
from scheduler.model.actions import Action, Dispatch
from scheduler.model.events import (
    Event,
    GpuSnapshot,
    LeaseReleased,
    ModelLoaded,
    NodeSnapshot,
    RequestArrived,
    SlotFreed,
)
from scheduler.model.values import LeaseId, SlotId
from scheduler.recording import VERSION, Beginning, RecordedStep, digest
from scheduler.sim.comparison import Comparison, Rerun, TrafficFigures, TrafficWatch, compare
from scheduler.sim.recorded_world import RecordedWorld, RecordingReader
from tests.kit.cores.action_digest import lived
from tests.kit.cores.builders import gpu, request
from tests.kit.cores.life_lengths import life_length
from tests.kit.cores.random_lives import LEAVING


class Recording(list[Beginning | RecordedStep]):
    """A core that writes down what happens to it, as a recorder does."""

    def __init__(self, policy: str = "lb", **beginning: Any) -> None:
        begun = Beginning(VERSION, policy, "lru", **beginning)
        super().__init__([begun])
        self.core = begun.core()

    def handle(self, event: Event, now: float) -> list[Action]:
        actions = self.core.handle(event, now)
        self.append(RecordedStep(now, event, digest(actions)))
        return actions

    def happens(self, at_s: float, *events: Event) -> None:
        """Several at once."""
        for event in events:
            self.handle(event, at_s)

    def asks(self, at_s: float, name: str, *models: str, **more: Any) -> LeaseId:
        """A request that is given a lease at once, and which one."""
        asked = request(name, *models, arrived_s=at_s, **more)
        actions = self.handle(RequestArrived(asked), at_s)
        return next(each.lease for each in actions if isinstance(each, Dispatch))

    def loads(self, at_s: float, gpu_id: str, model: str, load_s: float) -> None:
        self.handle(ModelLoaded(GpuId(gpu_id), ModelId(model), load_s, Tier.ABSENT), at_s)

    def frees(self, at_s: float, gpu_id: str, lease: LeaseId) -> None:
        """Released and freed at once."""
        self.happens(at_s, LeaseReleased(lease), SlotFreed(SlotId(gpu_id), lease))


def outlook(found: Comparison, policy: str) -> TrafficFigures:
    return next(each.figures for each in found.others if each.policy == policy)


def rebuilt(recording: Recording) -> RecordedWorld:
    """The world that a recording was made in."""
    begun = recording[0]
    assert isinstance(begun, Beginning)
    core = begun.core()
    reading = RecordingReader(begun, core)
    for entry in recording[1:]:
        assert isinstance(entry, RecordedStep)
        reading.take(entry.at_s, entry.event, core.handle(entry.event, entry.at_s))
    return reading.world()


def rerun(world: RecordedWorld, core: Core) -> TrafficWatch:
    """What a core of the test's own makes of it."""
    watch = TrafficWatch()
    Rerun(world, core, watch, policies=False).run()
    return watch


def against(recording: Sequence[Beginning | RecordedStep], *names: str) -> Comparison:
    return compare(recording, [(name, {}) for name in names])


def two_gpus(policy: str = "lb", **beginning: Any) -> Recording:
    """g0 and g1 on one node, with room for one model each."""
    recording = Recording(policy, **beginning)
    specs = [gpu(f"g{n}", node="n0", memory_mb=1500) for n in range(2)]
    recording.happens(0.0, NodeSnapshot(NodeId("n0"), tuple(map(GpuSnapshot, specs))))
    return recording


def check_wild_life(policy: str, seed: int, others: Sequence[str]) -> None:
    """Record a wild life under this policy, compare it with others: no column loses a request."""
    world = lived(policy, seed=seed, count=life_length(900))
    begun = Beginning(
        VERSION, policy, "lru", standing=LEAVING.standing, exit_rule=LEAVING.exit_rule
    )
    steps = [
        RecordedStep(now, event, digest(actions))
        for (event, now), actions in zip(world.log, world.answers, strict=True)
    ]
    found = against([begun, *steps], *others)
    assert found.happened.requests > 50
    for each in (found.recorded, *found.others):
        reported = each.figures
        ended = reported.completed + sum(reported.ended_otherwise.values())
        assert ended + reported.unfinished == reported.requests, each.policy
        assert reported.completed > found.happened.completed / 2, each.policy
