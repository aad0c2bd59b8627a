"""What a lease occupies: its slot, further slots of the same GPU, and virtual CPUs."""

from scheduler.core.state.cluster_state import ClusterState
from scheduler.core.state.pending import Pending, Standing
from scheduler.core.state.slots import ActiveLease, EndedRun, Slot
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
    lease.is_shared = len(chosen) > 1
    lease.own = all(pending.request.own for pending in chosen)
    if lease.own and not lease.loading:  # else its wait for another lease's load would be kept
        loads = lease.slot.gpu.loads
        lease.loading = {model: loads[model] for model in lease.models if model in loads}


def occupy(cluster: ClusterState, lease: ActiveLease, now: float, load_s: float) -> None:
    """The lease loads at once, and runs once it is loaded and earlier leases have ended."""
    slot, run_s = lease.slot, lease.run_s
    if lease.beside:
        slot.copying += 1
        lease.begins_s, lease.due_s = now, now + load_s + run_s
    elif slot.at_once:
        lease.begins_s, lease.due_s = now, now + load_s + run_s
    else:
        lease.begins_s = max(now, slot.free_s)
        for other in lease.more:
            lease.begins_s = max(lease.begins_s, other.free_s)
        lease.due_s = slot.free_s = max(lease.begins_s, now + load_s) + run_s
    slot.leases[lease.id] = lease
    lease.there_s = _there_s(lease, now)
    if slot.at_once:
        slot.free_s = slot.room_s(now)
    cluster.settle(slot)
    for other in lease.more:
        other.free_s = lease.due_s
        cluster.settle(other)


def _there_s(lease: ActiveLease, now: float) -> float:
    """When its models should all be there, those included that others load."""
    there_s, loads = now, lease.slot.gpu.loads
    if loads:
        for model in lease.models:
            there_s = max(there_s, loads.get(model, 0.0))
    return there_s


def computes(lease: ActiveLease, now: float) -> None:
    """What it was beside its slot's runs for is loaded: from now on it has a part in them."""
    slot = lease.slot
    lease.beside = False
    slot.copying -= 1
    if slot.at_once:
        lease.begins_s, lease.due_s = now, now + lease.run_s
        slot.free_s = slot.room_s(now)
    else:
        lease.begins_s = max(now, slot.free_s)
        lease.due_s = slot.free_s = lease.begins_s + lease.run_s


def stands_aside(cluster: ClusterState, lease: ActiveLease, now: float) -> None:
    """What it waits for may never be there: it has no part in its slot's runs until then."""
    slot = lease.slot
    lease.beside = True
    slot.copying += 1
    if slot.at_once:
        slot.free_s = slot.room_s(now)
    else:
        _freed(slot, lease, now)
    cluster.settle(slot)


def runs_until(cluster: ClusterState, lease: ActiveLease, due_s: float, now: float) -> None:
    """One more call runs under it, which should end at `due_s`."""
    slot = lease.slot
    later_s = max(now, due_s) - max(now, lease.due_s)
    lease.due_s = max(now, due_s)
    if lease.beside:
        return
    slot.free_s = slot.room_s(now) if slot.at_once else max(now, max(now, slot.free_s) + later_s)
    cluster.settle(slot)


def postpone(cluster: ClusterState, lease: ActiveLease, due_s: float, now: float) -> None:
    """Its work should end at `due_s`, later or sooner than was thought."""
    later_s = due_s - lease.due_s
    lease.due_s = due_s
    for slot in (lease.slot, *lease.more):
        slot.free_s = slot.room_s(now) if slot.at_once else max(now, slot.free_s + later_s)
        cluster.settle(slot)


def adopt(cluster: ClusterState, lease: ActiveLease, now: float) -> None:
    """A lease of unknown length that was in force before."""
    lease.begins_s = lease.due_s = lease.there_s = now
    lease.slot.leases[lease.id] = lease
    for slot in (lease.slot, *lease.more):
        slot.free_s = slot.room_s(now) if slot.at_once else max(slot.free_s, now)
        cluster.settle(slot)


def release(cluster: ClusterState, lease: ActiveLease, now: float) -> None:
    """Take a lease off its slots: the only way in which a slot becomes idle."""
    slot = lease.slot
    del slot.leases[lease.id]
    if lease.configuration is not None:
        slot.gpu.vcpus_used -= lease.configuration.vcpus
    if lease.beside:
        slot.copying -= 1
    elif slot.at_once:
        slot.ended.append(EndedRun(lease.models, lease.there_s, now))
        slot.free_s = slot.room_s(now)
    else:
        _freed(slot, lease, now)
    cluster.settle(slot)
    for other in lease.more:
        other.taken -= 1
        _freed(other, lease, now)
        cluster.settle(other)


def _freed(slot: Slot, lease: ActiveLease, now: float) -> None:
    slot.free_s = max(now, slot.free_s - lease.left_s(now)) if slot.computing else now
