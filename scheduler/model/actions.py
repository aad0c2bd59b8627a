"""All actions that the core can return; its driver carries them out in order."""

from typing import NamedTuple

from cache_manager.model.ids import GpuId, ModelId, NodeId
from scheduler.model.events import Event
from scheduler.model.values import (
    Estimate,
    Explanation,
    LeaseId,
    ModelLoad,
    RequestId,
    RequestOutcome,
    SlotId,
)


class Prepare(NamedTuple):
    """To the GPU manager: evict the victims, then load; a prefetch has a lease of its own."""

    slot: SlotId
    gpu: GpuId
    lease: LeaseId
    victims: tuple[ModelId, ...]
    loads: tuple[ModelLoad, ...]
    prefetch: bool = False


class Dispatch(NamedTuple):
    """To the callers and the GPU manager: these requests now hold this lease on these models."""

    lease: LeaseId
    slot: SlotId
    gpu: GpuId
    node: NodeId
    requests: tuple[RequestId, ...]
    hit: bool
    held_elsewhere: bool
    estimate: Estimate
    rule: str
    explanation: Explanation | None = None
    models: tuple[ModelId, ...] = ()


class EnqueueLocally(NamedTuple):
    """A request waits for one busy slot from now on."""

    request: RequestId
    slot: SlotId
    rule: str
    explanation: Explanation | None = None


class Demote(NamedTuple):
    """To the GPU manager: evict this model from this GPU."""

    gpu: GpuId
    model: ModelId
    reason: str


class EndLease(NamedTuple):
    """To the GPU manager: admit no further call, let the one in flight end, report the slot."""

    slot: SlotId
    lease: LeaseId
    reason: str


class Finish(NamedTuple):
    """To the caller: this request has ended for good, with this outcome."""

    request: RequestId
    outcome: RequestOutcome
    reason: str = ""


class SetTimer(NamedTuple):
    """Report this event to the core at that time."""

    at_s: float
    event: Event


class Refuse(NamedTuple):
    """An event that was refused, and why."""

    event: Event
    reason: str


Action = Prepare | Dispatch | EnqueueLocally | Demote | EndLease | Finish | SetTimer | Refuse
