"""A random life, checked at every step."""

from collections.abc import Iterable

from scheduler.model.events import RequestCancelled, SlotFreed
from tests.kit.cores.invariants import Invariants
from tests.kit.cores.random_lives import Chaos, Operation


def check_life(chaos: Chaos, invariants: Invariants, operations: Iterable[Operation]) -> None:
    """Check every step of a life, then bring all that is left to its end."""
    world = invariants.world
    for event in chaos.setup():
        invariants.step(event)
    for operation in operations:
        happened = chaos.event(operation)
        if happened is not None:
            invariants.step(happened)
    for request in list(world.core.requests):
        invariants.step(RequestCancelled(request))
    for lease in list(world.leases.values()):
        invariants.step(SlotFreed(lease.slot, lease.id))
    assert not world.core.requests
    assert not world.leases
