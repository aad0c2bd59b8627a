"""Requests that got a lease from an earlier leader, and ask the next leader again."""

from scheduler.core.core import Core
from scheduler.model.actions import Action, Dispatch, EndLease, Finish
from scheduler.model.events import (
    GpuSnapshot,
    LeaseReleased,
    LiveLease,
    NodeSnapshot,
    RequestArrived,
    RequestCancelled,
    SlotFreed,
)
from scheduler.model.values import (
    CoreSettings,
    LeaseId,
    ModelSpec,
    RequestId,
    RequestOutcome,
    SlotId,
)
from tests.kit.cores.builders import GIB, a_core, gpu, model, request

BERT: ModelSpec = model("bert")
LEASE, SLOT = LeaseId(7), SlotId("g0")


def adopting(*requests: str, released: bool = False) -> Core:
    """A core that took over one GPU with a lease of bert, which these requests were given."""
    core = a_core(gpus=())
    live = LiveLease(LEASE, SLOT, (BERT.id,), tuple(RequestId(name) for name in requests))
    spec = gpu("g0")
    snapshot = GpuSnapshot(spec, ((BERT.id, GIB),), (live,))
    core.handle(NodeSnapshot(spec.node, (snapshot,)), 1.0)
    if released:
        core.handle(LeaseReleased(LEASE), 1.5)
    return core


def dispatches(core: Core, name: str, *models: str) -> list[Dispatch]:
    actions = core.handle(RequestArrived(request(name, *models)), 2.0)
    return [action for action in actions if isinstance(action, Dispatch)]


def test_request_is_given_its_lease_again_when_it_asks_the_next_leader() -> None:
    core = adopting("r1")
    (given,) = dispatches(core, "r1")
    assert (given.lease, given.slot, given.requests, given.hit) == (LEASE, SLOT, ("r1",), True)
    assert dispatches(core, "r1") == [given]
    assert core.handle(SlotFreed(SLOT, LEASE), 3.0) == [
        Finish(RequestId("r1"), RequestOutcome.COMPLETED)
    ]


def test_both_requests_of_a_batch_are_given_their_lease_when_they_ask_again() -> None:
    core = adopting("r1", "r2")
    assert dispatches(core, "r1")[0].requests == ("r1",)
    assert dispatches(core, "r2")[0].requests == ("r1", "r2")
    ended = core.handle(SlotFreed(SLOT, LEASE), 3.0)
    assert [action.request for action in ended if isinstance(action, Finish)] == ["r1", "r2"]


def test_lease_ends_when_the_request_that_came_back_to_it_is_cancelled() -> None:
    core = adopting("r1")
    dispatches(core, "r1")
    actions = core.handle(RequestCancelled(RequestId("r1")), 3.0)
    assert [type(action) for action in actions] == [EndLease, Finish]


def test_request_waits_when_the_lease_was_another_ones_or_of_other_models() -> None:
    core = adopting("r1")
    assert dispatches(core, "r2") == []
    assert dispatches(core, "r1", "vit") == []
    assert core.cluster.waiting.count + len(core.cluster.slots[SLOT].local) == 2


def test_request_waits_when_its_lease_is_ending() -> None:
    assert dispatches(adopting("r1", released=True), "r1") == []


def test_request_is_placed_again_when_its_lease_has_ended() -> None:
    core = adopting("r1")
    core.handle(SlotFreed(SLOT, LEASE), 1.5)
    (given,) = dispatches(core, "r1")
    assert given.lease > LEASE


# -- the request was faster than the report of its lease ------------------------------------------


def overtaken(*known: str) -> tuple[Core, list[Action]]:
    """What happens when the lease of r1 is reported, and these requests have asked again by then.

    The core has a GPU of another node already, with one slot.
    """
    core = a_core(gpus=("g1",))
    for name in known:
        core.handle(RequestArrived(request(name)), 0.5)
    spec = gpu("g0")
    live = LiveLease(LEASE, SLOT, (BERT.id,), (RequestId("r1"),))
    snapshot = GpuSnapshot(spec, ((BERT.id, GIB),), (live,))
    return core, core.handle(NodeSnapshot(spec.node, (snapshot,)), 1.0)


def test_waiting_request_is_given_its_lease_when_that_is_reported_later() -> None:
    core, actions = overtaken("r0", "r1")
    (given,) = [action for action in actions if isinstance(action, Dispatch)]
    assert (given.lease, given.requests) == (LEASE, ("r1",))
    assert core.cluster.queued == 0


def test_lease_ends_when_its_request_was_given_another_one_by_then() -> None:
    core, actions = overtaken("r1")
    assert [action for action in actions if isinstance(action, EndLease)] == [
        EndLease(SLOT, LEASE, "its requests hold other leases")
    ]
    core.handle(SlotFreed(SLOT, LEASE), 2.0)
    assert core.requests.keys() == {"r1"}


def test_lease_stays_when_its_request_did_not_ask_again() -> None:
    core, actions = overtaken("r0")
    assert not any(isinstance(action, EndLease | Dispatch) for action in actions)
    assert list(core.cluster.slots[SLOT].leases) == [LEASE]


def early(*released: LeaseReleased) -> tuple[Core, list[Action]]:
    """A core that gets releases first, and then the node's report that the lease is in force."""
    core = a_core(gpus=(), settings=CoreSettings(first_lease=1000))
    for event in released:
        assert core.handle(event, 0.5) == []
    live = LiveLease(LEASE, SLOT, (BERT.id,), (RequestId("r1"),))
    spec = gpu("g0")
    snapshot = NodeSnapshot(spec.node, (GpuSnapshot(spec, ((BERT.id, GIB),), (live,)),))
    return core, core.handle(snapshot, 1.0)


def test_lease_ends_when_it_was_released_before_its_node_reported_it_to_the_new_leader() -> None:
    core, actions = early(LeaseReleased(LEASE))
    (end,) = actions
    assert isinstance(end, EndLease)
    assert (end.slot, end.lease) == (SLOT, LEASE)
    core.handle(SlotFreed(SLOT, LEASE), 2.0)
    assert [given.slot for given in dispatches(core, "r2")] == [SLOT]


def test_lease_stays_when_another_one_was_released_before_its_node_reported_it() -> None:
    assert early(LeaseReleased(LeaseId(8)), LeaseReleased(LeaseId(200)))[1] == []
