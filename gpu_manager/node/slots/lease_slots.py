"""What a lease's slots and configuration mean for the calls under it."""

from gpu_manager.node.leases_in_force import LeaseInForce
from gpu_manager.worker.calls.lease_terms import LeaseTerms
from scheduler.api import GpuSpec


def terms_of(lease: LeaseInForce, spec: GpuSpec) -> LeaseTerms:
    """Return the terms of a lease on this GPU."""
    batch, vcpus = 0, 0
    if lease.configuration is not None:
        batch, vcpus = lease.configuration.batch, lease.configuration.vcpus
    numbers = {slot.id: number for number, slot in enumerate(spec.slot_specs())}
    if len(numbers) == 1:
        return LeaseTerms((), 1, batch, vcpus)
    slots = (lease.slot, *lease.more_slots)
    found = sorted(numbers[slot] for slot in slots if slot in numbers)
    return LeaseTerms(tuple(found), len(numbers), batch, vcpus)
