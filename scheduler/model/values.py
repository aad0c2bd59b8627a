"""The scheduler's values: requests, GPUs and slots, placements and how a request may end."""

import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, NamedTuple, NewType, TypeVar

from msgspec import Meta, Struct

from cache_manager.model.ids import MIB, GpuId, ModelId, NodeId, Tier

RequestId = NewType("RequestId", str)
SlotId = NewType("SlotId", str)
LeaseId = NewType("LeaseId", int)

ANY_GPU_TYPE = "any"

T = TypeVar("T")
# Lists as others may send them: what a caller asks for and reports, and what a node has.
Few = Annotated[tuple[T, ...], Meta(max_length=1 << 12)]
Many = Annotated[tuple[T, ...], Meta(max_length=1 << 18)]
# A number that others may send is finite: no comparison would refuse NaN later.
Number = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


class Value(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """What is sent and recorded: an object of its fields, without those at their default.

    Values refer to no cycle of objects, so that the garbage collector need not look at them.
    """


class Message(Value, frozen=True, tag=True):
    """One of several kinds of values: its object says the name of its class, too."""


# What a model uses of a GPU while it runs alone (Kim and Kim 2020, Table III): their names in a
# profile's features, in the paper's order.
METRICS = (
    "gpu_utilization",  # share of the time that any kernel runs
    "sm_efficiency",  # share of the time that a multiprocessor has a warp
    "warp_efficiency",  # share of a warp's threads that are active
    "ipc",  # instructions a cycle
    "occupancy",  # active warps over those that fit
    "memory_used_max",  # bytes
    "memory_used_average",  # bytes
    "memory_utilization",  # share of the time that memory is read or written
    "device_to_host",  # bytes a second
    "host_to_device",  # bytes a second
    "global_load",  # bytes a second through the caches
    "global_store",  # bytes a second through the caches
    "execution_time",  # seconds
)


class RequestOutcome(StrEnum):
    """The one terminal state in which every request ends."""

    COMPLETED = "completed"
    QUEUE_FULL = "queue full"
    OVER_QUOTA = "over quota"
    TOO_LARGE = "too large"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"


class AfterLoss(StrEnum):
    """What becomes of requests whose GPU work was cut off."""

    FAIL = "fail"
    REQUEUE = "requeue"


class Request(Value, frozen=True):
    """One request for GPU time; its models are placed together, on one GPU."""

    id: RequestId
    function: str  # as `namespace/function`; requests of one function alone can share a lease
    models: Few[ModelId]
    batch: int = 1  # the batch size of its inference
    deadline_s: Number | None = None  # the time at which it ends, placed or not, as expired
    priority: int = 0  # each step is a head start of a second; its owners' steps add to it
    arrived_s: Number | None = None  # None: when the core hears of it
    application: str = ""  # the workflow that `stage` is a part of; empty: none
    stage: str = ""
    slo_s: Number | None = None  # within how many seconds of its arrival it should be done
    near: NodeId | None = None  # the node that has its data or its function
    # It fails at once if no node has registered one of the models: its caller has their names from
    # a function, which could invent names to have memory reserved for them.
    registered_only: bool = False
    max_wait_s: Number | None = None  # it is refused on arrival if it should wait for longer
    caller: str = ""  # who can keep the lease for further calls, reports these, and hears recalls
    # The rule by which its models leave from now on when they are idle; empty: the cluster's own
    # rule; None: the rule as before.
    exit_rule: str | None = None
    own: bool = False  # of a session for its own calls, which claims the lease at once
    # Of a call that has used a GPU already: it is not refused because a quota of GPU time is used
    # up, but waits until that quota has room.
    goes_on: bool = False


class StandingTerms(NamedTuple):
    """For how long, and for how many calls at most, a caller may keep one lease.

    Also a recalled lease may serve calls that wait until it is `slice_s` old. One that was given
    while others waited stands `for_a_slice`, and is not kept without a call.
    """

    seconds: Number
    calls: int
    slice_s: Number = 0.0

    @property
    def for_a_slice(self) -> bool:
        return self.seconds <= self.slice_s


class LeaseUse(Value, frozen=True):
    """A call that its caller ran under a lease that stands; without `ended_s` it still runs.

    `parent` is the span, as a `traceparent`, that the use belongs to.
    """

    request: RequestId
    arrived_s: Number
    began_s: Number
    ended_s: Number | None = None
    parent: str = ""


class CallEnd(NamedTuple):
    """The end of a call that was known to run under a lease."""

    request: RequestId
    ended_s: Number


class Configuration(NamedTuple):
    """How many requests run together, on how many virtual CPUs and parts of a GPU (its slots)."""

    batch: int
    vcpus: int
    vgpus: int


class SlotSpec(Value, frozen=True):
    """The schedulable unit: room for `leases` leases at a time on its GPU.

    Their calls run `at_once`, or else in turns. A slot that is a part of its GPU has turns.
    """

    id: SlotId
    leases: int = 1
    at_once: bool = False


class GpuSpec(Value, frozen=True):
    """One GPU, or one slice with memory of its own; by default it is one slot of its own name.

    `context_bytes` is the memory of a process there that holds no model. `vcpus` are those that its
    leases can be given together; 0: its manager takes no configurations.
    """

    id: GpuId
    node: NodeId
    memory_bytes: int
    gpu_type: str = ANY_GPU_TYPE
    slots: Many[SlotSpec] = ()
    context_bytes: int = 0
    vcpus: int = 0

    def slot_specs(self) -> tuple[SlotSpec, ...]:
        return self.slots or (SlotSpec(SlotId(self.id)),)


class ModelSpec(Value, frozen=True):
    """The declaration of a model, before any measurement; every part may be left out.

    `memory_bytes` are those that it needs on a GPU, `weights_bytes` those of its stored image,
    `run_s` its times by batch and type of GPU.
    """

    id: ModelId
    memory_bytes: int | None = None
    load_s: Mapping[Tier, Number] = MappingProxyType({})
    run_s: Many[tuple[int, str, Number]] = ()
    features: Annotated[Mapping[str, Number], Meta(max_length=1 << 18)] = MappingProxyType({})
    weights_bytes: int = 0


class Estimate(NamedTuple):
    """The expected seconds of one dispatch on one slot."""

    load_s: Number
    run_s: Number

    @property
    def total_s(self) -> float:
        return self.load_s + self.run_s


class Placement(Value, frozen=True):
    """A lease in force on one slot; on a miss its models are being loaded meanwhile.

    With `stands` its caller may keep it for its next calls of the same function and models.
    """

    lease: LeaseId
    gpu: GpuId
    node: NodeId
    slot: SlotId
    models: Many[ModelId]
    hit: bool
    estimate: Estimate
    stands: StandingTerms | None = None


class ModelLoad(Value, frozen=True):
    """One model to bring into GPU memory, and the nearest tier that has it.

    `emptied` names the model whose empty process takes it; without one, a process of the pool does.
    """

    model: ModelId
    memory_bytes: int
    source: Tier
    emptied: ModelId | None = None


@dataclass(slots=True)
class SlotCandidate:
    """One slot that a request could have gone to, as the policy saw it; do not change it.

    Its two finish times: the compute is free after `wait_s`, the GPU's copy engine after
    `copy_wait_s`. The load goes on while others run only `beside` them, as the policy has it.
    A policy that weighs slots by a sum says its `terms`: by name, the seconds that each gains.
    A frozen dataclass would take three times as long to make, one for every slot and request.
    """

    slot: SlotId
    idle: bool
    cached: bool
    frequency: int
    wait_s: float
    load_s: float
    run_s: float
    copy_wait_s: float = 0.0
    beside: bool = False
    terms: dict[str, float] | None = None

    @property
    def finish_s(self) -> float:
        if not self.beside or self.cached:
            return self.wait_s + self.load_s + self.run_s
        return max(self.wait_s, self.copy_wait_s + self.load_s) + self.run_s


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why one request was placed where it was.

    Before the policy saw it, it was held back for `held_s`, at last for the reason `held_for`.
    """

    request: RequestId
    decided_s: float
    waited_s: float
    policy: str
    rule: str
    chosen: SlotId
    visits: int
    queue_length: int
    ahead: int
    candidates: tuple[SlotCandidate, ...]
    victims: tuple[ModelId, ...]
    held_s: float = 0.0
    held_for: str = ""


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """The core's own settings; everything about placement belongs to the policy.

    A new leader counts its leases from `first_lease`, above all that an earlier one can have given.
    `largest_gpu_bytes` is the largest GPU that is expected: with it a request for a GPU that has
    not joined yet waits instead of being refused as too large. More than `most_models` models are
    remembered only while they are needed. Without `standing` every lease is for one call.
    Idle models leave by the `exit_rule`, unless their functions name one of their own.
    A model for which a local queue waits is evicted last, unless `spares_waiting` is off. A slot's
    frequency counts the requests that it was assigned; with `counts_dispatches` those that it was
    given to run, so that its local queue does not count. Both are for studies of the thesis.
    """

    max_waiting: int | None = None
    report_weight: float = 0.3
    default_memory_bytes: int = 1024 * MIB
    default_load_s: float = 3.0
    default_run_s: float = 0.5
    explain: Container[RequestId] = frozenset()
    first_lease: int = 1
    largest_gpu_bytes: int = 0
    most_models: int = 20_000
    standing: StandingTerms | None = None
    exit_rule: str = "never"
    spares_waiting: bool = True
    counts_dispatches: bool = False
