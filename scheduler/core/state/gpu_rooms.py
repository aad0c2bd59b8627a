"""What is free on GPUs, for requests that may take several slots and virtual CPUs."""

from collections.abc import Sequence
from itertools import islice

from cache_manager.model.ids import ModelId, NodeId
from scheduler.core.state.cluster_state import ClusterState
from scheduler.core.state.pending import Bundle, Pending
from scheduler.core.state.slots import Gpu, Slot
from scheduler.estimates.profiles import Profiles
from scheduler.model.values import Configuration
from scheduler.policies.placement_policy import GpuRoom
from scheduler.workflows.node_choice import home


def room_of(gpu: Gpu) -> GpuRoom:
    """What is free on a GPU, and what there is."""
    idle = [slot for slot in gpu.slots if slot.idle]
    vcpus = gpu.spec.vcpus
    return GpuRoom(gpu.spec.id, len(gpu.slots), idle, vcpus, max(0, vcpus - gpu.vcpus_used))


def home_of(cluster: ClusterState, pending: Pending) -> NodeId | None:
    """The node that a request names, else the home of its stage; None if there is no node."""
    request, nodes = pending.request, cluster.nodes
    if request.near is not None or not nodes:
        return request.near
    stage = request.stage or "+".join(pending.models)
    return nodes[home(request.application, stage, len(nodes))]


def idle_holders(cluster: ClusterState, bundle: Bundle, most: int) -> list[Slot]:
    """An idle slot with all these models of each GPU that has one; looks at `most` GPUs."""
    found = []
    for gpu in islice(cluster.index.holders(bundle.models[0]), most):
        for slot in cluster.gpus[gpu].slots:
            if slot.idle and slot.holds(bundle.models) and not slot.gpu.is_stuck(bundle.models):
                found.append(slot)
                break
    return found


def busy_holders(cluster: ClusterState, bundle: Bundle) -> list[Slot]:
    """The busy slots that hold all these models, least used first."""
    busy = [
        slot
        for gpu in cluster.index.holders(bundle.models[0])
        for slot in cluster.gpus[gpu].slots
        if not (slot.idle or slot.gpu.is_stuck(bundle.models)) and slot.holds(bundle.models)
    ]
    busy.sort(key=_used)
    return busy


def measured(
    profiles: Profiles, model: ModelId, gpu_type: str, each: int
) -> Sequence[Configuration]:
    """The configurations in which requests of batch `each` were measured on such GPUs."""
    return [
        found._replace(batch=found.batch // each)
        for found, its_type in profiles.of(model).configured_s
        if its_type == gpu_type and found.batch % each == 0
    ]


def _used(slot: Slot) -> tuple[int, str]:
    return slot.frequency, slot.id
