"""What a lease occupies: its slot, further slots of the same GPU, and virtual CPUs."""

from scheduler.core.state.cluster_state import ClusterState
from scheduler.core.state.pending import Pending, Standing
from scheduler.core.state.slots import ActiveLease, Slot
from scheduler.model.values import Configuration


def configure(
    lease: ActiveLease, configuration: Configuration | None, more: tuple[Slot, ...]
) -> None:
    """Take what a lease has beside its slot; `occupy` says until when.

    A manager that takes no configurations gets none.
    """
    gpu = lease.slot.gpu
    lease.more = more
    for other in more:
        assert other.gpu is gpu, f"{other.id} is on another GPU than {lease.slot.id}"
        assert other is not lease.slot, f"{other.id} is named twice"
        other.taken += 1
    if configuration is not None and gpu.spec.vcpus:
        lease.configuration = configuration
        gpu.vcpus_used += configuration.vcpus


def join(lease: ActiveLease, chosen: tuple[Pending, ...]) -> None:
    """These requests have the lease."""
    for pending in chosen:
        pending.standing = Standing.LEASED
        pending.at = lease.slot.id
        pending.lease = lease.id
    lease.requests.extend(chosen)


def occupy(cluster: ClusterState, lease: ActiveLease, now: float, load_s: float) -> None:
    """The lease loads at once, and runs once it is loaded and earlier leases have ended."""
    slot, run_s = lease.slot, lease.run_s
    if lease.beside:
        slot.copying += 1
        lease.begins_s, lease.due_s = now, now + load_s + run_s
    else:
        lease.begins_s = max(now, slot.free_s)
        for other in lease.more:
            lease.begins_s = max(lease.begins_s, other.free_s)
        lease.due_s = slot.free_s = max(lease.begins_s, now + load_s) + run_s
    slot.leases[lease.id] = lease
    cluster.settle(slot)
    for other in lease.more:
        other.free_s = lease.due_s
        cluster.settle(other)


def postpone(cluster: ClusterState, lease: ActiveLease, due_s: float, now: float) -> None:
    """Its work should end at `due_s`, later or sooner than was thought."""
    later_s = due_s - lease.due_s
    lease.due_s = due_s
    for slot in (lease.slot, *lease.more):
        slot.free_s = max(now, slot.free_s + later_s)
        cluster.settle(slot)


def adopt(cluster: ClusterState, lease: ActiveLease, now: float) -> None:
    """A lease of unknown length that was in force before."""
    lease.begins_s = lease.due_s = now
    lease.slot.leases[lease.id] = lease
    for slot in (lease.slot, *lease.more):
        slot.free_s = max(slot.free_s, now)
        cluster.settle(slot)


def release(cluster: ClusterState, lease: ActiveLease, now: float) -> None:
    """Take a lease off its slots: the only way in which a slot becomes idle."""
    slot = lease.slot
    del slot.leases[lease.id]
    if lease.configuration is not None:
        slot.gpu.vcpus_used -= lease.configuration.vcpus
    if lease.beside:
        slot.copying -= 1
    else:
        _freed(slot, lease, now)
    cluster.settle(slot)
    for other in lease.more:
        other.taken -= 1
        _freed(other, lease, now)
        cluster.settle(other)


def _freed(slot: Slot, lease: ActiveLease, now: float) -> None:
    slot.free_s = max(now, slot.free_s - lease.left_s(now)) if slot.computing else now
